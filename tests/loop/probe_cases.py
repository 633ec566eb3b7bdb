"""The layouts that ``probe_worker.py`` runs, and how often it puts each fault in."""

import os
from importlib.util import find_spec

from megatron_lossagg.verify.parallelism import Parallelism

REPEATS = int(os.environ.get("PROBE_REPEATS", "1"))
"""How often each fault is introduced; ``FULL=1 launch/ci/check.sh`` asks for 20."""
LAYOUTS = {
    "DP2": Parallelism(dp=2),
    "CP2": Parallelism(cp=2),
    "PP2": Parallelism(pp=2),
    "PP2xVPP2": Parallelism(pp=2, vpp=2, microbatches=4),
    "TP2": Parallelism(tp=2),
    "EP2": Parallelism(dp=2, ep=2, moe=True),
    "DP2xCP2": Parallelism(dp=2, cp=2),
    "DP2xPP2": Parallelism(dp=2, pp=2),
    "CP2xPP2xVPP2": Parallelism(cp=2, pp=2, vpp=2, microbatches=4),
    "DP2xTP2": Parallelism(dp=2, tp=2),
    "DP4xEP2, 2 optimizer instances": Parallelism(
        dp=4, ep=2, moe=True, optimizer_instances=2, distributed_optimizer=True
    ),
}
if find_spec("einops") is None:  # Megatron-Core makes the groups of instances with it
    LAYOUTS = {n: layout for n, layout in LAYOUTS.items() if layout.optimizer_instances == 1}
MEGATRON_LM_LAYOUTS = ("DP2", "PP2", "PP2xVPP2", "DP2xCP2")
"""Those that run under the config of Megatron-LM too; before 0.15 only those of two ranks do."""
