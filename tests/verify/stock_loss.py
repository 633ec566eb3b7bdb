"""``loss_func`` of the checkout's pretrain_gpt.py, for ``check_loss``."""

from types import SimpleNamespace

from megatron_lossagg.cpu.training import install_training

install_training()

import pretrain_gpt  # noqa: E402

pretrain_gpt.get_args = lambda: SimpleNamespace(
    check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False
)


def loss_func(microbatch, output):
    return pretrain_gpt.loss_func(microbatch["loss_mask"], output)
