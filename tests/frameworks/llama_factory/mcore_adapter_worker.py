"""The gradient of mcore_adapter's own loss over CP, on stock Megatron-Core; a launched worker.

``mcore_adapter_worker.py CHECKOUT FILE``: rank 0 writes one JSON line of rows. The function is cut
out of the trainer's file, whose module imports Transformers' Trainer. Model, data and layouts are
those of ``examples/stock_gradients.py``.
"""

import __future__

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from framework_folders import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import stock_gradients
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import leave

FILE = "mcore_adapter/src/mcore_adapter/trainer/trainer.py"


def post_compute_loss(checkout):
    """Return ``McaTrainer._post_compute_loss``."""
    tree = ast.parse(Path(checkout, FILE).read_text())
    (function,) = (
        node for node in ast.walk(tree) if getattr(node, "name", "") == "_post_compute_loss"
    )
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([function], []), FILE, "exec", flags=flags, dont_inherit=True)
    namespace = {"torch": torch, "mpu": mpu}
    exec(code, namespace)
    return namespace["_post_compute_loss"]


def main(checkout, output):
    dist.init_process_group("gloo")
    function = post_compute_loss(checkout)
    rows = []
    for per_token in (False, True):
        mpu.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        model_parallel_cuda_manual_seed(1)
        trainer = SimpleNamespace(
            args=SimpleNamespace(calculate_per_token_loss=per_token),
            model=SimpleNamespace(
                config=SimpleNamespace(context_parallel_size=dist.get_world_size())
            ),
        )

        def loss_func_of(number, pack, here, trainer=trainer):
            return lambda losses: function(trainer, pack.mask[here], losses)

        stock_gradients.stock = loss_func_of
        for name, size in (("one token", 1), ("unequal", 4)):
            rows.append(stock_gradients.measured(name, size, per_token=per_token))
        mpu.destroy_model_parallel()
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
