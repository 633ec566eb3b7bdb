"""What slime and miles dump of their rollouts is read, as by ``lossagg plot``."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from frameworks import checkout_of, needs
from recorded import columns, read

from megatron_lossagg.cli.rollouts import RolloutsError

pytest.importorskip("pandas", reason="pandas is not installed")


def sample(**fields):
    """Return what slime's and miles' ``Sample.to_dict`` has of a sample."""
    defaults = {
        "group_index": 0, "index": 0, "rollout_id": None, "prompt": "q", "tokens": [1, 2],
        "response": "a", "response_length": 2, "reward": 1.0, "loss_mask": None,
        "remove_sample": False, "status": "completed", "metadata": {},
    }  # fmt: skip
    return {**defaults, **fields}


def test_a_slime_dump_is_read_with_removed_samples_and_split_rollouts(tmp_path):
    samples = [
        sample(loss_mask=[1, 0]),
        sample(group_index=1, remove_sample=True),
        sample(group_index=1, rollout_id=7, rollout_routed_experts=torch.tensor([[0, 1]])),
        sample(group_index=1, rollout_id=7, response_length=5, reward=torch.tensor(1.0)),
        sample(group_index=1, loss_mask=torch.tensor([1, 1])),
    ]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    (step,) = read(tmp_path / "3.pt").steps
    assert columns(step) == [[1, 0, 2, 5, 2], [0, 1, 1, 1, 1], [0, 1, 2, 2, 3]]


LONG = [torch.zeros(5000, dtype=torch.int64) for _ in range(2)]
LONG[1][2500] = 1


@pytest.mark.parametrize("ids", [
    [torch.tensor(4), torch.tensor(4), torch.tensor(5)],
    [torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 3])],
    [LONG[0], LONG[0].clone(), LONG[1]],  # printed, both are [0, 0, 0, ..., 0, 0, 0]
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}],
], ids=["numbers", "tokens", "long", "objects"])  # fmt: skip
def test_ids_are_told_apart_by_value(tmp_path, ids):
    samples = [sample(group_index=one, rollout_id=one) for one in ids]
    torch.save({"samples": samples}, tmp_path / "3.pt")
    assert columns(read(tmp_path / "3.pt").steps[0]) == [[2, 2, 2], [0, 0, 1], [0, 0, 1]]


class Own:
    """Something that a dump may hold and torch does not load by itself."""


@pytest.fixture
def _without_megatron():
    """Megatron-Core lets torch load some of NumPy's classes, where it was imported."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


@pytest.mark.usefixtures("_without_megatron")
@pytest.mark.parametrize("value", [np.zeros(2), np.float64(1), np.dtype("i4"), Own()], ids=type)
def test_a_dump_that_torch_does_not_load_safely_is_refused(tmp_path, value):
    torch.save({"samples": [sample(metadata={"own": value})]}, tmp_path / "3.pt")
    message = (
        r"cannot be read \(it holds (numpy\S*|test_slime_dumps.Own)\), expected .*"
        "of slime or miles with tensors and plain"
    )
    with pytest.raises(RolloutsError, match=message) as error:
        read(tmp_path / "3.pt")
    assert '{"prompt_id": 7, "response_length": 512}' in str(error.value)


DUMP_BY = """
import sys
from types import SimpleNamespace
import numpy as np, torch
framework, checkout, template, has_numpy = sys.argv[1:]
sys.path.insert(0, checkout)
if framework == "slime":
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample
    save = lambda samples: save_debug_rollout_data(
        template, samples, rollout_id=3, evaluation=False)
else:
    from miles.ray.rollout.debug_data import save_debug_rollout_data
    from miles.utils.types import Sample
    args = SimpleNamespace(save_debug_rollout_data=template, save_debug_trajectory_data=None)
    save = lambda samples: save_debug_rollout_data(args, samples, 3, evaluation=False)
samples = [Sample(group_index=g, index=g, tokens=[0] * 9, response_length=n, reward=1.0)
           for g, n in ((0, 3), (0, 4), (1, 5), (1, 6))]
samples[1].loss_mask = [1, 1, 0, 0]
samples[2].remove_sample = True
samples[3].metadata = {"t": torch.zeros(2)}
if has_numpy == "True":
    samples[3].rollout_routed_experts = np.zeros((8, 2, 2), dtype=np.int32)
save(samples)
"""


@pytest.mark.launches
@pytest.mark.parametrize("has_numpy", [False, True])
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=needs(name, "httpx")) for name in ("slime", "miles")]
)
def test_what_a_framework_dumps_by_its_own_code_is_read_or_refused(tmp_path, framework, has_numpy):
    command = [sys.executable, "-c", DUMP_BY, framework, str(checkout_of(framework))]
    subprocess.run([*command, str(tmp_path / "{rollout_id}.pt"), str(has_numpy)], check=True)
    if has_numpy:
        with pytest.raises(RolloutsError, match=r"cannot be read \(it holds numpy"):
            read(tmp_path / "3.pt")
    else:
        rollouts = read(tmp_path / "3.pt")
        assert columns(rollouts.steps[0]) == [[3, 2, 0, 6], [0, 0, 1, 1], None]
