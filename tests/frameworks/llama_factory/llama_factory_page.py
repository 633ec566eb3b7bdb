"""LLaMA-Factory as its page starts it on either backend, and where that has its model to load."""

import json
import os
import re

import bridge_page
import page_lines
import page_stops
import stand_ins

BACKENDS = {
    "bridge": ("megatron-bridge", "Megatron-Bridge/3rdparty/Megatron-LM/megatron"),
    "mcore_adapter": ("mcore-adapter", "ROLL/mcore_adapter/src"),
}
"""Its two Megatron backends: the package of each, and the checkout that has it."""


def start(folder, backend):
    """Start LLaMA-Factory; return what was reached, or None, and the ended process."""
    page_lines.as_installed(folder, BACKENDS[backend][0])
    (text,) = page_lines.blocks("llama-factory", "python")[:1]
    (line,) = page_lines.blocks("llama-factory", "sh")
    paths = [page_lines.checkout_of("LLaMA-Factory/src")]
    if backend == "bridge":
        paths += bridge_page.paths()
    else:
        (switch,) = re.findall(r"# for (\w+=1): mcore_adapter$", text, re.MULTILINE)
        line = line.replace("USE_MEGATRON_BRIDGE=1", switch)
        text = re.sub(r"\bbridge\b", backend, text)
        paths += [page_lines.checkout_of("ROLL/mcore_adapter/src")]
    (folder / "train.py").write_text(text)
    given = {
        "model_name_or_path": str(page_lines.tiny_model(folder)),
        "stage": "sft",
        "do_train": True,
        "dataset": "conversations",
        "template": "default",
        "output_dir": str(folder / "out"),
    }
    (folder / "your.yaml").write_text(json.dumps(given))
    command = page_lines.words(line.replace("--nproc_per_node 8", "--nproc_per_node 1"))
    # Its tests for versions refuse the transformers that is here.
    more = {"DISABLE_VERSION_CHECK": "1"}
    return page_lines.started(["env", *command], folder, "llama_factory_page", paths=paths, **more)


def stop():
    """LLaMA-Factory, where it is to configure Bridge or to load mcore_adapter's model; no data."""
    if page_stops.is_torchs_launcher():
        return
    if "USE_MCA" in os.environ:
        from megatron_lossagg import cpu

        cpu.install()
        stand_ins.install(stand_ins.of("llama-factory"), stand_ins.ENGINES)
        page_stops.once_imported("llamafactory.train.mca.workflow", _mca_stops)
        return
    bridge_page.stop()
    stand_ins.install(stand_ins.of("llama-factory"), stand_ins.ENGINES)

    def stops(workflow):
        workflow._load_aligned_datasets = lambda *given: ([0], {})
        workflow._run_on_main_process = lambda *given: None
        workflow.ensure_megatron_pretrained_checkpoint = lambda **given: "."
        workflow.build_sft_config = lambda **given: bridge_page.is_set_up()

    page_stops.once_imported("llamafactory.train.megatron_bridge.workflow", stops)


def _mca_stops(workflow):
    from mcore_adapter.trainer import trainer

    def from_pretrained(*given, **more):
        (hook,) = page_stops.hooks_of(trainer.get_forward_backward_func)
        page_stops.reached(aggregation=str(hook.aggregation))

    workflow.AutoModel.from_pretrained = from_pretrained
    workflow.get_dataset = lambda *given, **more: {}
