"""LLaMA-Factory's own start of Megatron-Bridge, for ``bridge_worker.py``.

Its workflow chooses Bridge's entry point and step, and the loss scaling at CP > 1. What reads or
writes Hugging Face's models and data, or loads a checkpoint, is replaced.
"""

import importlib
from types import SimpleNamespace

import stand_ins


def run(stage, config, callbacks):
    """Train a Bridge configuration by LLaMA-Factory's ``run_sft`` or ``run_pt``."""
    stand_ins.install(stand_ins.of("llama-factory"), stand_ins.ENGINES)
    from llamafactory.train.megatron_bridge import config_builder, workflow

    asked = SimpleNamespace(context_parallel_size=config.model.context_parallel_size)
    entry, finetuning = (
        importlib.import_module(f"megatron.bridge.training.{name}")
        for name in ("pretrain", "finetune")
    )
    stock = entry.pretrain

    def started(config, step, **none):
        config.checkpoint.pretrained_checkpoint = None
        config._checkpoint_load_required = False
        return stock(config, step, callbacks=callbacks)

    def sft_config(**given):
        config.checkpoint.pretrained_checkpoint = "finetune asks for one"
        config_builder._apply_context_parallel_finetuning_requirements(config, asked)
        return config

    entry.pretrain = finetuning.pretrain = started
    vars(workflow).update(
        _check_backend_available=lambda: None,
        _check_model_support=lambda *given: None,
        _load_aligned_datasets=lambda *given: ([], {}),
        _run_on_main_process=lambda *given: None,
        _maybe_export_hf_checkpoint=lambda *given: None,
        ensure_megatron_pretrained_checkpoint=lambda **given: None,
        build_sft_config=sft_config,
        build_pretrain_config=lambda **given: config,
    )
    start = {"sft": workflow.run_sft, "pt": workflow.run_pt}[stage]
    nothing = SimpleNamespace(output_dir="")
    start(nothing, nothing, nothing, nothing, asked)
