"""Record what NeMo-RL's own loss function returns, for ``tests/integrations/test_nemo_rl.py``.

NeMo-RL is not released as a package. From a checkout at 7ea279ab, after ``make test-frameworks``::

    PYTHONPATH=.venv-frameworks:tests/integrations:. python tests/integrations/record_nemo_rl.py
    NEMO_RL_CHECKOUT

It writes ``recorded/nemo_rl.json``: the inputs, and loss, gradient and metrics of
``ClippedPGLossFn`` per microbatch, token- and sequence-level, and those of this package's
integration around the same object. Numbers only.
"""

import json
import sys
from pathlib import Path

import stand_ins
import torch

COMMIT = "7ea279ab"
FILE = Path(__file__).with_name("recorded") / "nemo_rl.json"
LENGTHS = [[4, 0, 2, 3], [5, 1, 3, 2]]
"""Active tokens of each sequence of two microbatches; a sequence has none."""
NOT_VALID = (1, 3)
"""Microbatch and sequence whose ``sample_mask`` is 0."""
L = 12
OPTIONS = {
    "token": {"token_level_loss": True},
    "token, KL, dual clip, TIS": {
        "token_level_loss": True,
        "ratio_clip_c": 3.0,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.1,
    },
    "sequence": {"token_level_loss": False},
    "GSPO": {"token_level_loss": False, "sequence_level_importance_ratios": True},
}
AGGREGATIONS = {
    "token_mean": {},
    "sample_mean": {},
    "constant": {"divisor": L},
    "sample_sum": {},
}


def microbatches():
    """Draw the inputs, float64."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for number, lengths in enumerate(LENGTHS):
        sequences, width = len(lengths), max(lengths) + 2
        mask = torch.zeros(sequences, width)
        for sequence, length in enumerate(lengths):
            mask[sequence, 1 : 1 + length] = 1
        draw = lambda sequences=sequences, width=width: torch.randn(  # noqa: E731
            sequences, width, generator=generator, dtype=torch.float64
        )
        valid = torch.ones(sequences)
        if number == NOT_VALID[0]:
            valid[NOT_VALID[1]] = 0
        made.append(
            {
                "advantages": draw(),
                "prev_logprobs": -2 + 0.3 * draw(),
                "generation_logprobs": -2 + 0.3 * draw(),
                "reference_policy_logprobs": -2 + 0.3 * draw(),
                "token_mask": mask.double(),
                "sample_mask": valid.double(),
                "next_token_logprobs": -2 + 0.3 * draw()[:, 1:],
            }
        )
    return made


def counts(batches):
    """Count as NeMo-RL's get_global_batch does."""
    valid = [mb["sample_mask"] for mb in batches]
    tokens = [(mb["token_mask"][:, 1:] * mb["sample_mask"][:, None]).sum() for mb in batches]
    return {
        "global_valid_seqs": torch.stack([v.sum() for v in valid]).sum(),
        "global_valid_toks": torch.stack(tokens).sum(),
    }


def run(loss_fn, batches):
    """Return loss, gradient and metrics of each microbatch."""
    results = []
    for mb in batches:
        data = dict(mb)
        x = data.pop("next_token_logprobs").clone().requires_grad_()
        loss, metrics = loss_fn(x, data=data, **counts(batches))
        (gradient,) = torch.autograd.grad(loss, x)
        results.append(
            {
                "loss": loss.item(),
                "gradient": gradient.tolist(),
                "metrics": {name: float(value) for name, value in metrics.items()},
            }
        )
    return results


def main(checkout):
    sys.path.insert(0, checkout)
    stand_ins.install(
        stand_ins.RAY, stand_ins.HYDRA, stand_ins.DATA, stand_ins.SERVERS, stand_ins.NEMO
    )
    from transformers import AutoProcessor  # noqa: F401  which loads transformers anew
    import transformers  # isort: skip

    transformers.__version__ = "5.11.0"  # NeMo-RL's patch of a tokenizer asserts an older one
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from megatron_lossagg import Aggregation
    from megatron_lossagg.integrations.nemo_rl import aggregated

    batches = microbatches()
    recorded = []
    for name, options in OPTIONS.items():
        loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**options))
        ours = {
            mode: run(aggregated(loss_fn, Aggregation(mode, **given)), batches)
            for mode, given in AGGREGATIONS.items()
        }
        normalizations = {k: v.value for k, v in loss_fn.metric_normalizations.items()}
        recorded.append(
            {
                "name": name,
                "loss_type": loss_fn.loss_type.value,
                "metric_normalizations": normalizations,
                "theirs": run(loss_fn, batches),
                "ours": ours,
            }
        )
    inputs = [{name: value.tolist() for name, value in mb.items()} for mb in batches]
    FILE.parent.mkdir(exist_ok=True)
    content = {"commit": COMMIT, "microbatches": inputs, "runs": recorded}
    FILE.write_text(json.dumps(rounded(content), indent=None, separators=(",", ":")) + "\n")
    print(f"{len(recorded)} runs, {FILE.stat().st_size} bytes")


def rounded(value):
    """Keep 12 significant digits; infinities as strings."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.12g}") if abs(value) != float("inf") else str(value)
    return value


if __name__ == "__main__":
    main(sys.argv[1])
