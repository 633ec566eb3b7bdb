"""``loss_func`` of the checkout's pretrain_gpt.py, for ``check_loss``."""

from functools import cache
from types import SimpleNamespace


@cache
def pretrain_gpt():
    """Import it on the ranks, which the stand-ins change."""
    from megatron_lossagg.cpu.training import install_training

    install_training()
    import pretrain_gpt

    pretrain_gpt.get_args = lambda: SimpleNamespace(
        check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False
    )
    return pretrain_gpt


def loss_func(microbatch, output):
    return pretrain_gpt().loss_func(microbatch["loss_mask"], output)
