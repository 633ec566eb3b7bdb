"""ms-swift as its page starts it, and where its trainer is to build its model."""

import re
import sys

import page_lines
import page_stops
import stand_ins

TRAINED = {
    "sft": ("ms_swift", []),
    "grpo": ("ms_swift_grpo", ["--use_vllm", "true", "--vllm_mode", "colocate"]),
    "gkd": ("ms_swift_gkd", ["--teacher_model", "model", "--teacher_model_type", "qwen2"]),
}
"""Our module of what ms-swift trains, and what that needs."""


def start(folder, trained, *, paths=()):
    """Start ms-swift; return what was reached, or None, and the ended process."""
    module, more = TRAINED[trained]
    (plugin,) = re.findall(
        r"^# (\w+\.py)$", text := page_lines.blocks("ms-swift", "python")[0], re.MULTILINE
    )
    assert re.search(rf"\b{module}\b", text)
    (folder / plugin).write_text(re.sub(r"\bms_swift\b", module, text))
    sft, rlhf = page_lines.blocks("ms-swift", "sh")[0].splitlines()
    line = sft if trained == "sft" else rlhf.replace(" grpo ", f" {trained} ")
    given = [
        "--model",
        page_lines.tiny_model(folder),
        "--model_type",
        "qwen2",
        "--template",
        "default",
    ]
    given += ["--dataset", "conversations.jsonl", "--ddp_backend", "gloo", *more]
    typed = page_lines.words(line, *map(str, given))
    return page_lines.started(typed, folder, "ms_swift_page", paths=paths, NPROC_PER_NODE="1")


def stop():
    """ms-swift's trainer, where it is to build its model; its data are not read before."""
    if any("/_megatron/" in word for word in sys.orig_argv):
        import imports_swift  # noqa: F401

        page_stops.once_imported("swift.megatron.pipelines.train.sft", _stops)
    else:  # the command, which starts that
        stand_ins.install(stand_ins.of("ms-swift"))


def _without(name, parser):
    """Let a parser of a dataclass's arguments pass by a field."""

    class Parser(parser):
        def _parse_dataclass_field(self, given, field):
            if field.name == name:
                given.set_defaults(**{name: None})
            else:
                parser._parse_dataclass_field(given, field)

    return Parser


def _stops(module):
    from swift.megatron.trainers import base
    from swift.utils import utils

    # transformers' parser cannot read the type of this field: isinstance(None, List[str]).
    utils.HfArgumentParser = _without("cp_comm_type", utils.HfArgumentParser)

    def prepare_model(trainer):
        (hook,) = page_stops.hooks_of(base.get_forward_backward_func)
        page_stops.reached(trainer=type(trainer).__name__, aggregation=str(hook.aggregation))

    base.BaseMegatronTrainer.prepare_model = prepare_model
    module.MegatronSft._prepare_dataset = lambda pipeline: pipeline.prepare_trainer()
