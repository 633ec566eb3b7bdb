"""Primus as its launcher starts it, and where Megatron-LM is to set up its model."""

import json

import page_lines
import page_stops
import stand_ins


def start(folder):
    """Start what Primus's launcher starts, whose hooks install packages before.

    Returns what was reached, or None, and the ended process.
    """
    (folder / "train.py").write_text(page_lines.blocks("primus", "python")[0])
    module = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": "llama2_7B.yaml",
        "overrides": {"mock_data": True},
    }
    given = {"work_group": "one", "user_name": "one", "exp_name": "one", "workspace": str(folder)}
    (folder / "your.yaml").write_text(json.dumps({**given, "modules": {"pre_trainer": module}}))
    megatron = page_lines.checkout_of("Megatron-LM")
    command = ["torchrun", "train.py", "train", "pretrain", "--config", "your.yaml"]
    paths = [page_lines.checkout_of("Primus"), megatron]
    return page_lines.started(
        command, folder, "primus_page", paths=paths, BACKEND_PATH=str(megatron)
    )


def stop():
    """Primus, where Megatron-LM is to set up its model; its arguments are parsed by then."""
    if page_stops.is_torchs_launcher():
        return
    from megatron_lossagg.cpu.training import install_training

    stand_ins.install(["six"])  # of a tokenizer
    install_training()
    from megatron.training import training

    def setup(*given, **more):
        (hook,) = page_stops.hooks_of(training.get_forward_backward_func)
        page_stops.reached(aggregation=str(hook.aggregation))

    training.initialize_megatron = setup
