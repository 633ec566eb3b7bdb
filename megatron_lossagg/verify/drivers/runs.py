"""What the command line does with a framework: find it, run its driver, say what is missing.

A driver runs in processes of their own, since importing a framework may be slow, may fail, and may
end the process. A framework without one has checks of its functions (``verify/frameworks``).
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import megatron_lossagg
from megatron_lossagg.errors import LossAggregationError, ProofError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.missing import (
    Placeholders,
    install_line,
    missing_modules,
    not_found,
)
from megatron_lossagg.verify.job import Event, failure_of, launched
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.text import error_text, number_of

if TYPE_CHECKING:
    from megatron_lossagg.verify.drivers.driver import Driver, Reference
    from megatron_lossagg.weigh.compare import Weighed

State = Literal["PASS", "FAIL", "NOT RUN"]
PASS: State = "PASS"
FAIL: State = "FAIL"
NOT_RUN: State = "NOT RUN"

TIMEOUT = 600.0
"""Seconds that a driver may take, imports included."""
DEFAULT = Aggregation("sample_mean")
"""What the checks of a framework without a driver train, if no aggregation is configured."""
ALL = "all"
"""All settings of a framework's own."""
_PACKAGE = Path(megatron_lossagg.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework."""

    package: str
    imports: tuple[str, ...]
    """What its driver imports."""
    written_for: str
    """The commits and releases that the integration was tested with."""
    unused: tuple[str, ...] = ()
    """What it imports and its step never calls: placeholders stand there if it is not installed."""
    passed_by: tuple[str, ...] = ()
    """Modules of its own that load models, or of a newer Megatron-Core: placeholders, always."""
    is_hooked: bool = False
    """Whether its integration is around Megatron's schedule: verified by ``--hooked`` too."""
    has_driver: bool = True
    """Whether ``drivers/`` has it; if not, ``frameworks/`` has checks of its functions."""
    needs_transformer_engine: bool = False
    """Whether its checks import Transformer Engine, which a machine without CUDA cannot."""


_SERVING = ("polars", "sglang", "sglang_router", "torch_memory_saver", "mooncake", "pylatexenc")
_ROLLOUTS = (
    *_SERVING,
    *("six", "wandb", "tensorboard", "PIL", "pandas", "pybase64", "msgspec", "zmq", "starlette"),
    *("transfer_queue", "aiohttp", "cachetools", "fastapi", "uvicorn", "openai", "datasets"),
)

FRAMEWORKS: dict[str, Framework] = {
    "megatron-lm": Framework(
        package="megatron.training",
        imports=("megatron.training",),
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        is_hooked=True,
        has_driver=False,
    ),
    "bridge": Framework(
        package="megatron.bridge",
        imports=("megatron.bridge.training.train", "megatron.bridge.training.eval"),
        written_for="067f987d",
        is_hooked=True,
        has_driver=False,
        needs_transformer_engine=True,
    ),
    "ms-swift": Framework(
        package="swift.megatron",
        imports=("swift.megatron.trainers.trainer", "swift.megatron.trainers.grpo_trainer"),
        written_for="4.6.0",
        is_hooked=True,
        has_driver=False,
        needs_transformer_engine=True,
    ),
    "llama-factory": Framework(
        package="llamafactory",
        imports=("llamafactory.train.mca.workflow", "mcore_adapter.trainer"),
        written_for="ff6d4d12",
        has_driver=False,
    ),
    "slime": Framework(
        package="slime",
        imports=(
            "megatron.training",
            "ray",
            "slime.utils.arguments",
            "slime.backends.megatron_utils.actor",
            "slime.ray.rollout",
        ),
        written_for="624b824a",
        unused=_ROLLOUTS,
    ),
    "miles": Framework(
        package="miles",
        imports=(
            "megatron.training",
            "ray",
            "miles.utils.arguments",
            "miles.backends.megatron_utils.model",
            "miles.ray.rollout.train_data_conversion",
        ),
        written_for="31f1ca96",
        unused=_ROLLOUTS,
    ),
    "verl": Framework(
        package="verl",
        imports=("verl.workers.config", "verl.workers.engine.megatron.transformer_impl"),
        written_for="0.9.1, 1dda039b",
        unused=("ray", "hydra", "datasets", "peft"),
    ),
    "skyrl": Framework(
        package="skyrl",
        imports=(
            "skyrl.train.trainer",
            "skyrl.backends.skyrl_train.workers.megatron.megatron_worker",
        ),
        written_for="0.3.0, 0.4.0, a9564572",
        unused=(
            *("ray", "hydra", "datasets", "skyrl_gym", "aiohttp", "httpx", "requests", "urllib3"),
            *("cloudpathlib", "pybase64", "zstandard", "megatron.bridge", "nvidia_resiliency_ext"),
            *("megatron.core.models.hybrid.hybrid_model", "megatron.core.recompute"),
            "megatron.core.transformer.hyper_connection",
        ),
    ),
    "nemo-rl": Framework(
        package="nemo_rl",
        imports=(
            "transformers",
            "nemo_rl.algorithms.grpo",
            "nemo_rl.models.policy.lm_policy",
            "nemo_rl.models.policy.workers.megatron_policy_worker",
        ),
        written_for="7ea279ab",
        unused=(
            *("ray", "hydra", "datasets", "skyrl_gym", "aiohttp", "httpx", "requests", "urllib3"),
            *("nemo_automodel", "transformer_engine", "tensorstore", "decord", "zmq", "pynvml"),
            *("uvicorn", "fastapi", "mlflow", "swanlab", "wandb", "prometheus_client", "soundfile"),
            *(
                "megatron.bridge",
                "megatron.core.inference.config",
                "megatron.core.inference.shards",
            ),
            *("megatron.core.transformer.moe.moe_logging", "scipy"),
        ),
        passed_by=("nemo_rl.models.megatron.setup",),
    ),
    "areal": Framework(
        package="areal",
        imports=("areal.engine.megatron_engine", "areal.trainer.ppo.actor"),
        written_for="4aef98d8",
        unused=(
            *("ray", "hydra", "datasets", "mbridge", "megatron.bridge", "aiofiles", "aiohttp"),
            *("colorlog", "etcd3", "flask", "httpx", "lark", "numba", "openai", "pybase64"),
            *("requests", "swanlab", "tabulate", "tenacity", "tensorboardX", "trackio", "triton"),
            *("torch_memory_saver", "uvloop", "wandb"),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a mode or a check ended; numbers are None if there was nothing to compare."""

    check: str
    function: str
    state: State
    got: float | None = None
    """The loss: of a driver, what the framework logs."""
    wanted: float | None = None
    loss_error: float | None = None
    """Relative, of a driver the largest of all that is logged."""
    gradient_error: float | None = None
    """Relative, of a driver the largest of a token's weight, which is the gradient at its loss."""
    factor: float | None = None
    tolerance: float | None = None
    explanation: str = ""


class NotRunError(LossAggregationError):
    """A check that cannot run here; the message has the reason and what to change."""


class FrameworkError(LossAggregationError):
    """A framework lacks what its integration uses, or fails under it."""


@dataclass(frozen=True)
class CheckJob:
    """The checks of a framework that has no driver, in a process that is no rank."""

    framework: str
    aggregation: Aggregation

    def run(self) -> Iterator[Event]:
        """Run the checks in this process; yield each outcome as it is known."""
        from megatron_lossagg.verify.frameworks.check import outcome_of as outcome_of_check

        listing = f"import of {self.framework}"
        needs = FRAMEWORKS[self.framework].needs_transformer_engine
        if needs and find_spec("transformer_engine") is None:
            reason = (
                f"{self.framework} imports Transformer Engine, which is not here and needs CUDA: "
                f"run where {self.framework} trains"
            )
            outcome = Outcome(check=listing, function="", state=NOT_RUN, explanation=reason)
            yield {"outcome": asdict(outcome)}
            return
        try:
            checks = checks_of(self.framework, self.aggregation)
        except (Exception, SystemExit) as error:
            yield {"outcome": asdict(ended_by(error, listing, framework=self.framework))}
            return
        for check in checks:
            yield {"outcome": asdict(outcome_of_check(check, framework=self.framework))}


def checks_of(framework: str, aggregation: Aggregation = DEFAULT) -> list[Any]:
    """List the checks of a framework without a driver; imports the framework."""
    name = framework.replace("-", "_")
    module = import_module(f"megatron_lossagg.verify.frameworks.{name}")
    checks: list[Any] = module.checks(aggregation)
    return checks


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """Steps of a framework: what :func:`~megatron_lossagg.verify.job.launched` runs.

    ``setting``: one of its own, by name, or all; empty for its default, None for none of them.
    ``aggregations``: those that are trained after it; None for all that the driver has. ``edges``:
    whether the batch has fully masked sequences, and samples of several.
    """

    framework: str
    parallelism: Parallelism
    setting: str | None
    aggregations: Sequence[Aggregation] | None
    edges: bool

    def run(self) -> Iterator[Event]:
        """Run the steps on this rank; yield an event for each."""
        import megatron_lossagg.cpu as cpu

        cpu.install()
        with suppress(ImportError):  # Megatron-Core, before it finds placeholders
            import_module("megatron_lossagg.verify.small_gpt")
        framework = FRAMEWORKS[self.framework]
        sys.meta_path.insert(0, Placeholders(framework.passed_by))
        sys.meta_path.append(Placeholders(framework.unused))
        try:
            from megatron_lossagg.verify.drivers.drawn import draw

            drawn = draw(edges=self.edges)
            driver = driver_of(self.framework)(self.parallelism, drawn)
            steps = [*self._trained(driver)]
        except (Exception, SystemExit) as error:
            outcome = ended_by(error, f"import of {self.framework}", framework=self.framework)
            yield {"outcome": asdict(outcome)}
            return
        yield {"imported": self.framework}
        prepared = [(trained, driver.prepare(trained)) for trained in steps]
        import torch.distributed as dist

        from megatron_lossagg.verify.drivers.driver import reference_of
        from megatron_lossagg.verify.world import join_world, split_world

        join_world()
        with split_world(Parallelism(dp=self.parallelism.world_size)):
            reference = reference_of(driver)
        with split_world(self.parallelism):
            driver.start()
            terms: dict[str, Weighed] = {}
            driver.listen(lambda step, _, term: terms.update({term: step}))
            for trained, given in prepared:
                terms.clear()
                logged = driver.train(trained, given)
                yield _step(driver, reference, trained, terms, logged)
            del driver  # whose models hold groups
        dist.barrier()  # a launcher ends the others as soon as one rank has failed
        gc.collect()  # a group that is still held aborts the process at its end
        dist.destroy_process_group()

    def _trained(self, driver: Driver) -> Iterator[str | Aggregation]:
        from megatron_lossagg.verify.drivers.drawn import aggregations

        if self.setting not in (None, "", ALL, *driver.settings):
            raise NotRunError(
                f"got the setting {self.setting!r} of {self.framework}, expected one of "
                f"{', '.join(driver.settings)}, or {ALL}"
            )
        if self.setting == ALL:
            yield from driver.settings
        elif self.setting is not None:
            yield self.setting or next(iter(driver.settings))
        if self.aggregations is None:
            yield from filter(driver.trains, aggregations().values())
        else:
            yield from self.aggregations


def driver_of(framework: str) -> type[Driver]:
    """Return a framework's driver."""
    module = import_module(f"{__package__}.{framework.replace('-', '_')}")
    found: type[Driver] = module.FrameworkDriver
    return found


def _step(
    driver: Driver,
    reference: Reference,
    trained: str | Aggregation,
    terms: Mapping[str, Weighed],
    logged: Mapping[str, float],
) -> Event:
    """Compare a step with the reference; of rank 0, which has the terms."""
    if not terms:
        return {}
    from megatron_lossagg.weigh.report import as_json

    is_ours = isinstance(trained, Aggregation)
    wanted = trained if isinstance(trained, Aggregation) else driver.settings[trained]
    of_reference = reference.weights(wanted)
    return {
        "trained": _name(wanted) if is_ours else trained,
        "is_ours": is_ours,
        "wanted": _name(wanted),
        "function": driver.function,
        "tolerance": driver.tolerance,
        "terms": {
            name: {
                "report": str(step),
                "verdict": step.verdict,
                "weighed": as_json(step, number=1),
                **_by_hand(driver, name, step, of_reference),
            }
            for name, step in terms.items()
        },
        "missing": [name for name in driver.terms if name not in terms],
        "logged": {
            name: [value, reference.loss(wanted, driver.logged(name))]
            for name, value in logged.items()
        },
    }


def _name(aggregation: Aggregation) -> str:
    from megatron_lossagg.verify.cases import Case

    return str(Case(aggregation=aggregation))


def _by_hand(
    driver: Driver, name: str, step: Weighed, wanted: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Compare a term's weights with those by hand, if the driver knows it.

    ``relative``: the smallest and the largest of a sequence over what is wanted; None if other
    sequences have weights. ``error``: how far they are from 1.
    """
    if name not in driver.terms:
        return {"follows": None, "coefficient": None, "relative": None, "error": None}
    kind, factor = driver.terms[name]
    found = sorted(
        (one.tokens, one.weight_sum / one.tokens, one.weight_min, one.weight_max)
        for one in step.sequences
        if one.tokens
    )
    pairs = zip(found, sorted((n, w * factor) for n, w in wanted), strict=False)
    ratios = [a / w for (_, *weights), (_, w) in pairs for a in weights]
    is_same = [n for n, *_ in found] == [n for n, _ in wanted]
    return {
        "follows": kind in driver.follow,
        "coefficient": factor,
        "relative": [min(ratios), max(ratios)] if is_same else None,
        "error": max(abs(ratio - 1) for ratio in ratios) if is_same else math.inf,
    }


def outcome_of(event: Event, framework: str) -> Outcome:
    """Return how a mode of ours ended in a step."""
    followed = {  # a term that the driver does not know and that trains something is one too many
        name: term["error"]
        for name, term in event["terms"].items()
        if term["follows"] or (term["follows"] is None and term["weighed"]["tokens"])
    }
    missing, logged = event["missing"], event["logged"]
    errors = [math.inf if e is None else e for e in followed.values()]
    weights = math.inf if missing else max(errors, default=math.inf)
    losses = max((abs(over(got - want, want)) for got, want in logged.values()), default=math.inf)
    is_right = max(weights, losses) < event["tolerance"]
    got, wanted = next(iter(logged.values()), (None, None))
    said = [f"got no term {name}" for name in missing]
    said += [f"{name}: {event['terms'][name]['verdict']}" for name in followed]
    said += [f"{k}: got a loss of {a:.9g}, expected {b:.9g}" for k, (a, b) in logged.items()]
    return Outcome(
        check=event["trained"],
        function=event["function"],
        state=PASS if is_right else FAIL,
        got=got,
        wanted=wanted,
        loss_error=losses,
        gradient_error=weights,
        tolerance=event["tolerance"],
        explanation="" if is_right else f"{'; '.join(said)}. {release(framework)}",
    )


def over(difference: float, size: float) -> float:
    """Divide; 0 / 0 is 0. What is not finite is inf, never NaN."""
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    quotient = difference / size
    return quotient if math.isfinite(quotient) else math.inf


def run_job(
    job: DriverJob | CheckJob,
    *,
    timeout: float = TIMEOUT,
    take: Callable[[Event], None] = lambda event: None,
    report: Callable[[Outcome], None],
) -> None:
    """Run a job in processes of its own; ``take`` gets each step, ``report`` each outcome.

    Processes that end early, or are ended after ``timeout`` seconds, leave an outcome that says so:
    a driver's failed if the framework was imported.
    """
    began: list[Event] = []

    def event(found: Event) -> None:
        began.append(found)
        if "outcome" in found:
            report(Outcome(**found["outcome"]))
        elif "trained" in found:
            take(found)

    processes = job.parallelism.world_size if isinstance(job, DriverJob) else None
    reason = ""
    try:
        done = launched(job, event, processes=processes, timeout=timeout)
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {timeout:g} s: give it more by --timeout"
    else:
        if done.returncode:
            reason = failure_of(done)
            reason += "" if began else f"\nImport {job.framework} by itself"
    if reason:
        begins = "the steps that follow" if began else f"import of {job.framework}"
        state = FAIL if began and isinstance(job, DriverJob) else NOT_RUN
        report(Outcome(check=begins, function="", state=state, explanation=reason))


def run_framework(
    framework: str,
    aggregation: Aggregation | None = None,
    *,
    timeout: float = TIMEOUT,
    report: Callable[[dict[str, Any]], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Train a mode, or each, by a framework's driver, or run its checks.

    Returns the verification's part about it. ::

        {"name", "seconds", "passed": none failed and one ran, "checks": [Outcome, ...]}

    ``report`` gets each outcome as it is known.
    """
    begun = time.monotonic()
    outcomes: list[dict[str, Any]] = []

    def take(outcome: Outcome) -> None:
        outcomes.append(asdict(outcome))
        report(outcomes[-1])

    job: DriverJob | CheckJob = CheckJob(framework, aggregation or DEFAULT)
    if FRAMEWORKS[framework].has_driver:
        job = DriverJob(
            framework=framework,
            parallelism=Parallelism(dp=2, float32=True),
            setting=None,
            aggregations=None if aggregation is None else [aggregation],
            edges=True,
        )
    run_job(
        job,
        timeout=timeout,
        take=lambda event: take(outcome_of(event, framework)),
        report=take,
    )
    failed = any(outcome["state"] == FAIL for outcome in outcomes)
    return {
        "name": framework,
        "seconds": time.monotonic() - begun,
        "passed": not failed and not none_ran(outcomes),
        "checks": outcomes,
    }


def check_installed(name: str) -> None:
    """Look for a framework without importing it; :class:`ProofError` if it is not installed.

    If the current folder is a checkout whose packages lie in ``src``, that is put on the path, of
    this process and of those that it starts.
    """
    package = FRAMEWORKS[name].package
    source = Path.cwd() / "src"
    if not _is_found(package) and source.joinpath(*package.split(".")).is_dir():
        sys.path.insert(0, str(source))
        on_path = filter(None, [str(source), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(on_path)
        invalidate_caches()
    if not _is_found(package):
        raise ProofError(
            f"nothing to verify: {package} is not installed here. Run this in the checkout of "
            f"{name}, put the folder that has the package on PYTHONPATH, or install it"
        )


def _is_found(package: str) -> bool:
    """Look for a package; ``find_spec`` of a dotted name imports what is before the dot."""
    outer, *inner = package.split(".")
    spec = find_spec(outer)
    if spec is not None and spec.origin is None:  # a namespace, such as megatron, has no code
        spec, inner = find_spec(package), []
    places = None if spec is None else spec.submodule_search_locations
    return any(Path(place, *inner).is_dir() for place in places or ())


def ended_by(error: BaseException, check: str, *, framework: str, function: str = "") -> Outcome:
    """Describe what a check raised, or, without a ``function``, what importing a framework raised.

    Not run: :class:`NotRunError`, a missing package that is not the framework itself, and whatever
    the framework's own import raises. All else fails. If an import ends for a missing package, all
    that are missing are named, and this process can run nothing more.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}"
    missing = not_found(error)
    is_of_others = missing is not None and not f"{missing}.".startswith(f"{_own(framework)}.")
    is_elsewhere = isinstance(error, NotRunError) or is_of_others
    names = []
    if is_elsewhere and not function:
        names = missing_modules(FRAMEWORKS[framework].imports, own=_own(framework))
    state: State = NOT_RUN
    if names:
        text = f"got no {', '.join(names)}: {install_line(names)}, or run where {framework} trains"
    elif isinstance(error, NotRunError):
        text = str(error)
    elif is_elsewhere and missing:
        text += f": {install_line([missing])}, or run where {framework} trains"
    elif is_elsewhere:
        text += f". Run where {framework} trains"
    elif not function and not _is_raised_here(error):
        text += f". Run where python can import {framework}"
    else:
        expected = "a loss" if function else "what the integration uses"
        got = f"{function} raised" if function else "got"
        state, text = FAIL, f"{got} {text}, expected {expected}. {release(framework)}"
    return Outcome(check=check, function=function, state=state, explanation=text)


def _own(framework: str) -> str:
    """Return the package whose modules are all the framework's; several share ``megatron``."""
    package = FRAMEWORKS[framework].package
    return package if package.startswith("megatron.") else package.partition(".")[0]


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, such as by a name that the framework lacks."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen")]
    return bool(files) and Path(files[-1]).is_relative_to(_PACKAGE)


def release(framework: str) -> str:
    """Say which releases its integration was written for."""
    written_for = FRAMEWORKS[framework].written_for
    return f"Use a release of {framework} that the integration was written for: {written_for}"


def none_ran(outcomes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing of the framework ran."""
    return all(outcome["state"] == NOT_RUN for outcome in outcomes)


def counted(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Count outcomes: ``4 of 6 checks of its own code pass, 1 fails, 1 not run``."""
    number = dict.fromkeys((PASS, FAIL, NOT_RUN), 0)
    for outcome in outcomes:
        number[outcome["state"]] += 1
    pass_ = "passes" if len(outcomes) == 1 else "pass"
    checks = number_of(len(outcomes), "check")
    text = f"{number[PASS]} of {checks} of its own code {pass_}"
    if number[FAIL]:
        text += f", {number[FAIL]} {'fails' if number[FAIL] == 1 else 'fail'}"
    return text + (f", {number[NOT_RUN]} not run" if number[NOT_RUN] else "")


def cells(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """Write an outcome in a table: check, function, errors, state; no errors if none exist."""
    errors = [
        "" if outcome["wanted"] is None else error_text(outcome[name])
        for name in ("loss_error", "gradient_error")
    ]
    function = ".".join(outcome["function"].split(".")[-2:])
    return (outcome["check"], function, *errors, outcome["state"])
