"""Aggregations for the policy loss of an unmodified SkyRL, by its entry point.

::

    python -m skyrl.train.entrypoints.main_base loss_aggregation=prompt_mean \
        trainer.override_entrypoint=megatron_lossagg.integrations.skyrl ...

The arguments ``loss_aggregation``, ``loss_aggregation_divisor``, ``loss_aggregation_exponent``
and ``loss_aggregation_count_empty`` are this module's, all others SkyRL's. With an entry point
or trainer of your own: ``aggregated(RayPPOTrainer, Aggregation("prompt_mean"))``.

SkyRL applies its own reductions to advantages, before a mini-batch is split over ranks, and its
policy losses then sum. While ``RayPPOTrainer._normalize_advantages`` runs, the function that
does so is replaced, and advantages leave as::

    A_t * w_s

A group of ``balanced`` is a prompt's samples with one sign of these advantages.

SFT has an entry point of its own: ``aggregated_sft(SFTTrainer, Aggregation("sample_mean"))``. There
SkyRL divides the loss mask by N when it collates a batch; the mask leaves as ``m_t * w_s``.

To weigh it, the trainer leaves what it multiplied into advantages in the batch, column ``SCALE``,
with ids of its sequences, ``IDS``; the worker copies no column that it does not know into its
microbatches, and is made to here.

A mini-batch is one optimizer step; the trainer has all of it, so counting needs no collective.
Afterwards SkyRL multiplies the sum by M DP, and Megatron by CP / M. KL and entropy stay as they
are in SkyRL: means of each microbatch; a patch of ``docs/integrations/patches`` changes it. The
loss of MTP heads (a draft model) stays SkyRL's too, with or without the patch, and a critic's loss.
Sources: SkyRL a9564572 and 0.4.0 ``RayPPOTrainer.train``, ``_normalize_advantages``,
``apply_loss_reduction_to_advantages_minibatch``, ``ppo_critic_loss``, ``loss_func`` of
``MegatronModelWrapper.forward_backward_mini_batch``; a9564572 ``SFTTrainer``,
``DefaultCollator``, ``PackedDataCollator``, ``RayPPOTrainer.build_models``, ``reduce_loss``,
``BaseBatchIterator.batch_to_experience``, ``MegatronPolicyWorkerBase.forward_backward``,
``AllGatherPackedCPTensor``.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.integrations import weigh_rl
from megatron_lossagg.integrations._shared import (
    WEIGH,
    advantage_groups,
    imported,
    is_asked,
    not_a_mask,
    replaced,
    variables,
)
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.loop.step import say_counted
from megatron_lossagg.reduction.aggregation import Aggregation, require_mask_count
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.weigh.listen import own

LAST_STEPS = "loss_aggregation_is_last_step"
"""Where the batch keeps ``is_last_step``, which SkyRL's synchronous loop drops."""
_REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
_VERSIONS = "use skyrl 0.3.0, 0.4.0 or a9564572"
SCALE = "loss_aggregation_scale"
"""Column of a batch, ``[sequences, 1 or s]``: what advantages were multiplied by."""
IDS = "loss_aggregation_ids"
"""Column of a batch, int64 ``[sequences, 3]``: sample, prompt and group, -1 if not known."""
_KINDS = ("sample", "prompt", "group")
_TRAIN = "skyrl.backends.skyrl_train"
_WRAPPER = f"{_TRAIN}.workers.megatron.megatron_model_wrapper"


@dataclass(eq=False)
class Reduction:
    """What reduces the advantages of a step's mini-batches: a mode of ours, or SkyRL's own."""

    aggregation: Aggregation | None
    """None: SkyRL's own."""
    boundaries: Sequence[tuple[int, int]]
    samples: list[int] | None
    """Sample of each sequence, if SkyRL trains step by step; None: each sequence is one."""
    weights: list[Tensor] = field(default_factory=list)
    """What each mini-batch's advantages were multiplied by, ``[its sequences, 1 or s]``."""
    groups: list[str] = field(default_factory=list)
    """Of each sequence, if they are counted."""

    @contextmanager
    def in_place(self, trainer: Any) -> Iterator[None]:
        """Replace SkyRL's in the module whose ``_normalize_advantages`` runs.

        Raises :class:`ContractError` unless it is then called once for each mini-batch.
        """
        module = sys.modules[trainer._normalize_advantages.__module__]
        own = getattr(module, _REDUCTION, None)
        if own is None:
            raise ContractError(
                f"{module.__name__} has no {_REDUCTION}: {_VERSIONS}, or a trainer that does not "
                "override _normalize_advantages"
            )
        reduce = partial(self._own, own) if self.aggregation is None else self._planned
        with replaced(module, **{_REDUCTION: reduce}):
            yield
        if len(self.weights) != len(self.boundaries):
            raise ContractError(
                f"SkyRL reduced {len(self.weights)} of {len(self.boundaries)} mini-batches: this "
                f"version does not call {_REDUCTION} once for each; {_VERSIONS}"
            )

    def column(self, like: Tensor) -> Tensor:
        """Return the weights of all sequences, ``[sequences, 1 or s]``; 0 for those in no step."""
        width = max([1, *(weights.shape[1] for weights in self.weights)])
        weight_S = like.new_zeros(len(like), width)
        for (start, end), weights in zip(self.boundaries, self.weights, strict=True):
            weight_S[start:end] = weights.to(like)
        return weight_S

    def ids(self, data: Any, prompt_boundaries: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return the ids of all sequences for weighing, int64 ``[sequences, 3]``."""
        num = len(data["advantages"])
        prompts = data.metadata.get("uids")
        if prompts is None and prompt_boundaries is not None:
            prompts = [n for n, (a, b) in enumerate(prompt_boundaries) for _ in range(b - a)]
        samples = range(num) if self.samples is None else self.samples
        return column_of(num, sample=samples, prompt=prompts, group=self.groups)

    def _own(self, own: Callable[..., Tensor], *, advantages: Tensor, **given: Any) -> Tensor:
        """Return what SkyRL's own does, which is proportional to advantages; keep its weights."""
        self.weights.append(own(advantages=torch.ones_like(advantages), **given))
        return own(advantages=advantages, **given)

    def _planned(
        self,
        advantages: Tensor,
        loss_mask: Tensor,
        loss_reduction: str,
        micro_batch_size: int,
        max_seq_len: int | None,
        prompt_boundaries: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return A w_s; ``advantages``, ``loss_mask``: ``[sequences of the mini-batch, s]``."""
        assert self.aggregation is not None
        start, end = self.boundaries[len(self.weights)]
        if end - start != len(advantages):
            raise ContractError(
                f"SkyRL reduces {len(advantages)} sequences, and the mini-batch has {end - start}: "
                f"{_VERSIONS}"
            )
        if not bool(((loss_mask == 0) | (loss_mask == 1)).all()):
            raise not_a_mask("loss_mask", "make it 0 or 1, and scale advantages to weigh a token")
        prompts = None
        if prompt_boundaries is not None:
            prompts = [n for n, (a, b) in enumerate(prompt_boundaries) for _ in range(b - a)]
        samples = None if self.samples is None else self.samples[start:end]
        groups = None
        if self.aggregation.mode == "balanced" and prompts is not None:
            # waits before the step
            groups = advantage_groups(prompts, advantages.cpu(), loss_mask.cpu(), samples)
            self.groups += groups
        plan = plan_step(
            self.aggregation,
            Sequences(
                active_tokens=loss_mask.sum(-1).to("cpu", torch.int64),
                sample=samples,
                prompt=prompts if self.aggregation.reads("prompt") else None,
                group=groups,
            ),
        )
        say_counted(plan, leave_out="loss_aggregation_count_empty=false (count_empty=False)")
        self.weights.append(plan.weights[:, None])
        return advantages * plan.weights.to(advantages)[:, None]


def samples_of(cfg: Any, data: Any) -> list[int] | None:
    """Number the trajectories of step-wise training, whose sequences are contiguous.

    None if each sequence is a sample. Raises :class:`ContractError` if the trainer lost them.
    """
    is_last_step = data.metadata.get(LAST_STEPS, data.metadata.get("is_last_step"))
    num_sequences = len(data["advantages"])
    is_step_wise = getattr(getattr(cfg, "generator", None), "step_wise_trajectories", False)
    if is_last_step is None and not is_step_wise:
        return None
    if is_last_step is None or len(is_last_step) != num_sequences:
        got = "none" if is_last_step is None else f"{len(is_last_step)} of them"
        raise ContractError(
            f"got {got} of metadata['is_last_step'] for {num_sequences} sequences of step-wise "
            "trajectories, expected one for each: without it every turn would count as a sample. "
            "Use a trainer that calls compute_advantages_and_returns before it trains"
        )
    ends = [0, *accumulate(map(int, is_last_step))]
    return ends[:-1]


_LINEAR = (
    *("regular", "dual_clip", "gspo", "cispo", "sapo"),
    *("importance_sampling", "dppo", "rollout_is"),
)
"""SkyRL's policy losses whose per-token loss grows in proportion to the advantage."""
_NOT_LINEAR = ("clip_cov", "kl_cov", "cross_entropy")
_NOT_HERE = (CUSTOM, "microbatch_token_mean")
_NOT_IN_SFT = (*_NOT_HERE, "prompt_mean", "balanced")
_ENTRY_POINT = "trainer.override_entrypoint"
"""What SkyRL's ``main`` reads to come here, and its configuration does not know."""
_WEIGHED = "loss_aggregation"
"""Where a batch of SFT says that its loss mask has the weights."""
_PATCHES = (
    "docs/integrations/patches/skyrl-kl-entropy.patch (a9564572) or skyrl-0.4.0-kl-entropy.patch"
)


def aggregated(
    trainer: Any, aggregation: Aggregation | None, *, carry_weights: bool = False
) -> Any:
    """Make a subclass of a SkyRL trainer whose policy loss has our weights.

    ``None`` keeps SkyRL's own, which ``LOSSAGG_WEIGH=1`` weighs. ``carry_weights``: leave w_s in
    the batch too, ``loss_weights`` ``[sequences, 1]``, for a SkyRL with a patch of
    ``docs/integrations/patches``, whose KL and entropy then have them.
    Raises :class:`AggregationError` here for a mode that needs microbatches, and if the
    trainer is built for a policy loss that is not proportional to advantages. To weigh FSDP is a
    :class:`ContractError` then.
    """
    if aggregation is not None:
        _check_mode(aggregation, _NOT_HERE, "trainer knows no microbatches")

    class LossAggregationTrainer(trainer):  # type: ignore[misc]
        """A SkyRL trainer; every mini-batch's advantages are multiplied by w_s."""

        def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
            if aggregation is not None:
                check_config(cfg, carry_weights=carry_weights)
            if is_asked():
                _check_weighed(cfg)
            super().__init__(cfg, *args, **kwargs)

        def build_models(self, PolicyWorker: Any, *others: Any) -> Any:
            """Build SkyRL's models; if the run is weighed, a policy worker that listens."""
            if is_asked():
                PolicyWorker = weighing_actor(PolicyWorker, aggregation)
            return super().build_models(PolicyWorker, *others)

        def compute_advantages_and_returns(self, data: Any) -> Any:
            """Keep ``is_last_step``: SkyRL's loop drops it before :meth:`_normalize_advantages`."""
            is_last_step = data.metadata.get("is_last_step")
            data = super().compute_advantages_and_returns(data)
            if is_last_step is not None:
                data.metadata[LAST_STEPS] = is_last_step
            return data

        def _normalize_advantages(
            self,
            data: Any,
            mini_batch_boundaries: Sequence[tuple[int, int]],
            prompt_boundaries: Sequence[tuple[int, int]] | None = None,
        ) -> Any:
            """Multiply by w_s when SkyRL applies ``loss_reduction``; no collective."""
            samples = None if aggregation is None else samples_of(self.cfg, data)
            reduction = Reduction(aggregation, mini_batch_boundaries, samples)
            with reduction.in_place(trainer):
                data = super()._normalize_advantages(data, mini_batch_boundaries, prompt_boundaries)
            if carry_weights:
                data["loss_weights"] = reduction.column(data["advantages"])
            if is_asked():
                data[SCALE] = reduction.column(data["advantages"])
                # waits before the step
                data[IDS] = reduction.ids(data, prompt_boundaries).to(data["advantages"].device)
            return data

    return LossAggregationTrainer


def aggregated_sft(trainer: Any, aggregation: Aggregation) -> Any:
    """Make a subclass of SkyRL's ``SFTTrainer`` that trains with our weights.

    Each sequence is a sample, and a batch is one optimizer step. Evaluation keeps SkyRL's token
    mean. Raises :class:`AggregationError` here for a mode that needs prompts or microbatches.
    """
    _check_mode(aggregation, _NOT_IN_SFT, "SFT trainer knows neither prompts nor microbatches")

    class LossAggregationSFTTrainer(trainer):  # type: ignore[misc]
        """SkyRL's SFT trainer; the loss mask of every training batch is multiplied by w_s."""

        collator: Any

        def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
            layers = getattr(getattr(cfg, "megatron_config", None), "mtp_num_layers", 0)
            if cfg.strategy == "megatron" and layers != 0:
                _warn(
                    "the loss of MTP heads, if the model has any, stays SkyRL's mean over each "
                    "microbatch's tokens: set megatron_config.mtp_num_layers=0 to leave them out"
                )
            super().__init__(cfg, *args, **kwargs)

        def build_train_dataloader(self, tokenized: Any) -> Any:
            """Collate training batches with the weights; the evaluation's collator stays."""
            with replaced(self, collator=_Collator(self.collator, aggregation)):
                return super().build_train_dataloader(tokenized)

        def train_step(self, batch: Any, step: int) -> Any:
            """Train a batch that has the weights; any other one is an error."""
            if not (batch.metadata or {}).get(_WEIGHED):
                raise ContractError(
                    "got a training batch without the weights: use SkyRL a9564572's "
                    "build_train_dataloader, and set dummy_run_full_ctx=false"
                )
            return super().train_step(batch, step)

    return LossAggregationSFTTrainer


def _check_mode(aggregation: Aggregation, refused: tuple[str, ...], reason: str) -> None:
    require_mask_count(aggregation, "SkyRL")
    if aggregation.mode in refused:
        raise AggregationError(
            f"got {aggregation}, expected a mode of whole steps: SkyRL's {reason}; choose another "
            "mode"
        )


@dataclass(eq=False)
class _Collator:
    """SkyRL's collator of a training batch, whose loss mask leaves as m w_s."""

    collator: Any
    aggregation: Aggregation

    def __call__(self, examples: Sequence[dict[str, Any]], batch_size: int) -> Any:
        """Collate a step's examples; no collective. Raises :class:`PlanError` for a wrong mask."""
        for example in examples:
            if not set(map(float, example["loss_mask"])) <= {0.0, 1.0}:
                change = "make it 0 or 1, since SkyRL passes no token weights through this package"
                raise not_a_mask("loss_mask", change)
        batch = self.collator(examples, batch_size=batch_size)
        mask = batch["loss_mask"]
        sequence = self._sequences(batch, mask)
        # waits before the step: counts
        active_tokens = torch.bincount(sequence[mask > 0], minlength=len(examples))
        plan = plan_step(self.aggregation, Sequences(active_tokens=active_tokens))
        say_counted(plan, leave_out="count_empty=False")
        weights = plan.weights.to(mask)[sequence]
        batch["loss_mask"] = torch.where(mask > 0, weights, torch.zeros_like(mask))
        batch.metadata[_WEIGHED] = True  # does not wait: a dictionary
        return batch

    def _sequences(self, batch: Any, mask: Tensor) -> Tensor:
        """Return the sequence of each mask position: its row, or its place in the packed rows."""
        if "sub_seq_lengths" not in batch:
            return torch.arange(len(mask))[:, None].expand_as(mask)
        is_token = batch["attention_mask"] > 0  # padding between packed sequences is none
        lengths = torch.cat([*batch["sub_seq_lengths"]])
        sequence = torch.zeros_like(batch["attention_mask"])
        sequence[is_token] = torch.arange(len(lengths)).repeat_interleave(lengths)
        return sequence[:, : mask.shape[1]]


def check_config(cfg: Any, *, carry_weights: bool = False) -> None:
    """Refuse a policy loss whose weights cannot be carried by advantages; warn of KL, entropy."""
    algorithm = cfg.trainer.algorithm
    _check_loss(algorithm)
    terms = {"use_kl_loss": "KL", "use_entropy_loss": "entropy"}
    kept = [term for name, term in terms.items() if getattr(algorithm, name)]
    if kept and not carry_weights:
        _warn(
            f"{' and '.join(kept)} stay SkyRL's means of each microbatch, whatever the "
            f"aggregation: turn them off, or apply {_PATCHES} and pass carry_weights=True"
        )
    if getattr(getattr(getattr(cfg.trainer, "critic", None), "model", None), "path", None):
        _warn(
            "the critic's value loss stays SkyRL's mean over each microbatch's sequences of their "
            "token means, whatever the aggregation"
        )
    if getattr(getattr(cfg.trainer, "mtp", None), "enabled", False):
        _warn(
            "the loss of the MTP heads stays SkyRL's mean over each microbatch's tokens, with the "
            "patch too: set trainer.mtp.enabled=false if they are to have the aggregation's weights"
        )


def _check_loss(algorithm: Any) -> None:
    loss = str(algorithm.policy_loss_type)
    if loss in _NOT_LINEAR:
        raise AggregationError(
            f"policy_loss_type={loss} is not proportional to advantages, and SkyRL aggregates by "
            f"them: set trainer.algorithm.policy_loss_type to one of {', '.join(_LINEAR)}"
        )
    if loss not in _LINEAR:
        _warn(
            f"policy_loss_type={loss} is not one of SkyRL's own: its per-token loss must be "
            "proportional to the advantage, and it must sum over tokens"
        )


def _check_weighed(cfg: Any) -> None:
    """Refuse a run that cannot be weighed."""
    _check_loss(cfg.trainer.algorithm)
    if cfg.trainer.strategy != "megatron":
        raise ContractError(
            f"got {WEIGH} with trainer.strategy={cfg.trainer.strategy}, expected megatron: only "
            f"its workers are weighed; unset {WEIGH}"
        )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def main() -> None:
    """Train as SkyRL's own entry point does, with the aggregation of ``loss_aggregation=...``."""
    aggregation, rest = _split(sys.argv[1:])
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    cfg = SkyRLTrainConfig.from_cli_overrides(rest)
    validate_cfg(cfg)
    if aggregation is not None:
        check_config(cfg)
    initialize_ray(cfg)
    train = ray.remote(num_cpus=1, runtime_env={"env_vars": variables()})(_train)
    ray.get(train.remote(cfg, aggregation))


def _split(arguments: Sequence[str]) -> tuple[Aggregation | None, list[str]]:
    """Read our arguments; returns the aggregation and those of SkyRL.

    None, for SkyRL's own reduction, if the run is weighed.
    """
    suffixes = ("", "_divisor", "_exponent", "_count_empty")
    known = [f"loss_aggregation{suffix}" for suffix in suffixes]
    ours: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == _ENTRY_POINT:
            continue
        if not name.startswith("loss_aggregation"):
            rest.append(argument)
        elif name not in known:
            raise AggregationError(f"got {argument!r}, expected one of {', '.join(known)}")
        elif name != "loss_aggregation_count_empty":
            ours[name] = value
        elif value.lower() in ("true", "false"):
            ours[name] = value.lower() == "true"
        else:
            raise AggregationError(f"got {argument!r}, expected true or false")
    aggregation = aggregation_from_args(argparse.Namespace(**ours))
    if aggregation is None and not is_asked():
        raise AggregationError(
            "got no loss_aggregation: add loss_aggregation=prompt_mean or another mode, or drop "
            f"{_ENTRY_POINT}"
        )
    return aggregation, rest


def _train(cfg: Any, aggregation: Aggregation | None) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.trainer import RayPPOTrainer

    class Experiment(BasePPOExp):  # type: ignore[misc]
        def get_trainer(self, **arguments: Any) -> Any:
            return aggregated(RayPPOTrainer, aggregation)(**arguments)

    Experiment(cfg).run()


def column_of(num: int, **ids: Sequence[Hashable] | None) -> Tensor:
    """Return ``IDS`` of so many sequences, from ids that may be anything, by their kind."""
    made = torch.full((num, len(_KINDS)), -1)
    for number, kind in enumerate(_KINDS):
        of_kind = ids.get(kind)
        if of_kind is not None and len(of_kind) == num:
            first: dict[Hashable, int] = {}
            made[:, number] = torch.tensor([first.setdefault(one, len(first)) for one in of_kind])
    return made


def ids_of(batch: Any, first: Sequence[int]) -> dict[str, Any]:
    """Return the ids of a microbatch's sequences, for weighing."""
    columns = batch[IDS].T.tolist() if IDS in batch else []
    return {
        kind: [None if one < 0 else one for one in column]
        for kind, column in zip(_KINDS, columns, strict=False)
        if max(column) >= 0
    }


def weighing_actor(actor: Any, aggregation: Any = None) -> Any:
    """Return a Ray actor class of SkyRL's Megatron policy worker, whose process is weighed.

    ``aggregation``: the trainer's, None for SkyRL's own.
    """
    import ray

    return ray.remote(num_gpus=1)(weighed_worker(actor.__ray_actor_class__, aggregation))


def weighed_worker(worker: Any, aggregation: Any = None) -> Any:
    """Return a subclass of a policy worker that weighs the first step of its process."""

    class WeighedPolicyWorker(worker):  # type: ignore[misc]
        """SkyRL's policy worker; it listens before it builds a model."""

        def init_model(self, *args: Any, **kwargs: Any) -> Any:
            own[:] = [] if aggregation is None else [aggregation]
            weigh_rl.install("skyrl")
            return super().init_model(*args, **kwargs)

    return WeighedPolicyWorker


def carry() -> None:
    """Let this process's workers copy ``SCALE`` into the microbatches that they train.

    Where a policy batch lacks it, a worker then raises :class:`ContractError`.
    """
    expected = f"SkyRL's Megatron workers: {_VERSIONS}"
    utils = imported(f"{_TRAIN}.workers.worker_utils", expected=expected)
    iterator = utils.BaseBatchIterator
    wrapper = imported(_WRAPPER, expected=expected).MegatronModelWrapper
    convert, run = iterator.batch_to_experience, wrapper.forward_backward_mini_batch
    heard: list[tuple[Tensor | None, Tensor | None]] = []
    """Both columns of the microbatches that were made since the last step."""

    @functools.wraps(convert)
    def batch_to_experience(batch: Mapping[str, Any]) -> Any:
        heard.append((batch.get(SCALE), batch.get(IDS)))
        return convert(batch)

    @functools.wraps(run)
    def forward_backward_mini_batch(
        self: Any, micro_batches: Sequence[MutableMapping[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        columns = heard[-len(micro_batches) :]
        heard.clear()
        if not kwargs.get("forward_only", False):
            _put(micro_batches, columns)
        return run(self, micro_batches, *args, **kwargs)

    iterator.batch_to_experience = staticmethod(batch_to_experience)
    wrapper.forward_backward_mini_batch = forward_backward_mini_batch


def _put(
    micro_batches: Sequence[MutableMapping[str, Any]],
    columns: Sequence[tuple[Tensor | None, Tensor | None]],
) -> None:
    """Put the columns into the microbatches of a policy; 0 and -1 for sequences that SkyRL has
    added.
    """
    for microbatch, (scale, ids) in zip(micro_batches, columns, strict=True):
        if microbatch.get("sub_seq_lengths") is not None:
            raise ContractError(
                "got rows of several sequences, expected one in a row, since rows are weighed: "
                "set use_sequence_packing=false"
            )
        advantages = microbatch["advantages"]
        if advantages is None:  # SFT, whose loss mask has the weights
            continue
        if scale is None and not microbatch.get("is_padding_batch", False):
            raise ContractError(
                "got a batch without what SkyRL's trainer multiplied advantages by, expected the "
                f"column {SCALE}: set LOSSAGG_WEIGH=1 for our entry point, or make the trainer "
                "with aggregated(RayPPOTrainer, None)"
            )
        if scale is None:
            scale = advantages.new_zeros(0, 1)
        added = len(advantages) - len(scale)
        microbatch[SCALE] = pad(scale, (0, 0, 0, added))
        if ids is None:
            ids = torch.full((len(scale), len(_KINDS)), -1)
        microbatch[IDS] = pad(ids, (0, 0, 0, added), value=-1)


HEARD = weigh_rl.Where(
    _WRAPPER,
    [
        weigh_rl.Reduction(
            *(f"{_TRAIN}.utils.ppo_utils", "reduce_loss", "loss", "loss_mask"), scale=SCALE
        ),
        weigh_rl.Reduction(_WRAPPER, "masked_mean", "tensor", "mask"),
    ],
    sums_gradients=False,
    ids=ids_of,
    column=IDS,
    reduces=(_WRAPPER, "MegatronModelWrapper.run_pending_grad_sync"),
    prepare=carry,
)
"""The functions by which its terms are weighed; those of the policy loss are in ``SCALE``."""
