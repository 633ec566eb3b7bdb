"""slime and miles as their pages start them, and where they are to place their workers."""

import os
import re
import sys

import page_lines
import page_stops
import stand_ins


def start(folder, framework, *, weighed=False):
    """Start slime or miles from its checkout; return what was reached, and the ended process.

    ``weighed``: with the line of ``docs/weigh.md`` in the page's file.
    """
    text = (page_lines.PAGES / f"{framework}.md").read_text()
    option, file = re.search(r"`(--custom-config-path) (\S+\.yaml)`", text).groups()
    given = page_lines.blocks(framework, "yaml")[0]
    if weighed:
        line, _ = page_lines.weighing("slime, miles")
        line = line.replace(".slime", f".{framework}")
        given, replaced = re.subn(r"^custom_megatron_init_path: .*$", line, given, flags=re.M)
        assert replaced == 1
    (folder / file).write_text(given)
    checkout = page_lines.checkout_of(framework)
    given = ["--debug-train-only", "--num-layers", "2", "--hidden-size", "32"]
    given += ["--num-attention-heads", "4", "--max-position-embeddings", "64", "--seq-length", "64"]
    given += ["--micro-batch-size", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    given += ["--num-rollout", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    command = ["python", str(checkout / "train.py"), option, file, *given]
    paths = [checkout, page_lines.checkout_of("Megatron-LM")]
    return page_lines.started(command, folder, "slime_miles_page", paths=paths, FRAMEWORK=framework)


def stop():
    """Stop where the arguments are as every worker gets them."""
    name = os.environ["FRAMEWORK"]
    from megatron_lossagg.cpu.training import install_training

    stand_ins.install(stand_ins.RAY, stand_ins.SERVERS, stand_ins.of(name))
    install_training()

    def stops(module):
        def create_placement_groups(args):
            from megatron_lossagg.integrations._rollouts import checked_aggregation

            load = sys.modules[f"{name}.utils.misc"].load_function
            init = load(args.custom_megatron_init_path)
            init(args)  # as each worker does
            hooks = getattr(sys.modules[init.__module__], "HOOKS", None)
            if hooks is None:  # it weighs
                schedule = sys.modules[f"{name}.backends.megatron_utils.model"]
                page_stops.reached(
                    weighs=hasattr(schedule.get_forward_backward_func, "__wrapped__")
                )
            page_stops.reached(
                aggregation=str(checked_aggregation(args, hooks)),
                carries=load(getattr(args, hooks.carry_argument)).__qualname__,
            )

        module.create_placement_groups = create_placement_groups

    page_stops.once_imported(f"{name}.ray.placement_group", stops)
    page_stops.once_imported(f"{name}.backends.sglang_utils.arguments", _without_an_engine)


def _without_an_engine(module):
    """Leave out the arguments of SGLang, which are not there without it."""
    module.validate_args = lambda args: None
