"""Megatron-Bridge as its page starts it, and where it is to set up its model."""

import page_lines
import page_stops


def paths():
    """Return the paths of Megatron-Bridge, with the Megatron-LM that it pins."""
    return [
        page_lines.checkout_of(f"Megatron-Bridge/{path}")
        for path in ("src", "3rdparty/Megatron-LM")
    ]


def start(folder):
    """Start Megatron-Bridge; return what was reached, or None, and the ended process."""
    before = """
from bridge_worker import configuration
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

config = configuration(1, per_token=False, evaluation_cp=1)
config.checkpoint.pretrained_checkpoint = "."
"""
    (folder / "train.py").write_text(before + page_lines.blocks("bridge", "python")[0])
    return page_lines.started(["python", "train.py"], folder, "bridge_page", paths=paths())


def stop():
    """Megatron-Bridge, where it is to set up its model; its configuration is checked by then."""
    import imports_bridge  # noqa: F401
    from megatron.bridge.training import pretrain

    pretrain.setup = lambda *given, **more: is_set_up()


def is_set_up():
    """Write the hook that is around its training and its evaluation."""
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import train

    (hook,) = page_stops.hooks_of(train.get_forward_backward_func)
    assert page_stops.hooks_of(evaluation.get_forward_backward_func) == [hook]
    page_stops.reached(aggregation=str(hook.aggregation))
