"""NeMo-RL's GRPO script with its page's lines, and where its trainer has its loss function."""

import contextlib
import pickle
import re

import page_lines
import page_stops
import stand_ins


def start(folder, *, weighed=False):
    """Start NeMo-RL's GRPO script with the page's lines where the page says they go.

    Returns what was reached, or None, and the ended process. ``weighed``: NeMo-RL's own weights.
    """
    checkout, model = page_lines.checkout_of("NeMo-RL"), page_lines.tiny_model(folder)
    script = (checkout / "examples" / "run_grpo.py").read_text()
    after_setup = '    rl_init_timer.record("total"'
    assert script.count(after_setup) == 1
    text, environment = page_lines.blocks("nemo-rl", "python")[0], {}
    if weighed:
        variable, stock = page_lines.weighing("NeMo-RL")
        text = re.sub(r"aggregated\(loss_fn, .*\)$", stock, text, flags=re.MULTILINE)
        assert stock in text
        environment = dict([variable.split("=")])
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    (folder / "train.py").write_text(script.replace(after_setup, lines + after_setup))
    file = checkout / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    command = ["python", "train.py", "--config", str(file), f"policy.model_name={model}"]
    command += [f"logger.log_dir={folder}", "checkpointing.enabled=false"]
    return page_lines.started(command, folder, "nemo_rl_page", paths=[checkout], **environment)


def stop():
    """NeMo-RL, where its trainer has its loss function; models, data and Ray come before."""
    import typing

    import tiny_gpt  # noqa: F401  it lets Megatron-Core run on a CPU
    import typing_extensions

    stand_ins.install(stand_ins.of("nemo-rl", but=stand_ins.HYDRA))
    typing.TypedDict = typing_extensions.TypedDict  # pydantic models, before Python 3.12
    stand_ins.older_transformers()

    def stops(module):
        def setup(config, *given, **more):
            loss_fn = module.ClippedPGLossFn(config.loss_fn)
            checkpointer = contextlib.nullcontext()
            return (*[None] * 6, loss_fn, None, checkpointer, None, config, None, None)

        def grpo_train(*given):
            from megatron_lossagg.integrations.weigh_rl import _install_once

            loss_fn = pickle.loads(pickle.dumps(given[5]))  # as each worker does
            aggregation = vars(loss_fn).get("aggregation")
            page_stops.reached(
                aggregation=aggregation and str(aggregation),
                of=type(loss_fn.loss_fn).__name__,
                weighs=bool(_install_once.cache_info().currsize),
            )

        module.setup, module.grpo_train = setup, grpo_train

    def without(module):
        module.setup_response_data = lambda *given: (None, None, {}, {})

    page_stops.once_imported("nemo_rl.algorithms.grpo", stops)
    page_stops.once_imported("nemo_rl.data.utils", without)
