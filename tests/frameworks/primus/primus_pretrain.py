"""Primus's own pretraining trainer on the flags of Megatron-LM; a script for megatron_lm_worker.py.

``HOOK=megatron_lm`` puts the hook where Megatron-LM's own scripts have it. Primus's arguments come
from its YAML files; here they come from the same parser that gives Primus its defaults.
"""

import os
import sys
from pathlib import Path

from megatron_lossagg import add_loss_aggregation_args
from megatron_lossagg.integrations import megatron_lm, primus
from megatron_lossagg.loop.flags import aggregation_from_args

sys.path.append(str(Path(os.environ["FRAMEWORKS_DIR"], "Primus")))

from megatron.training.arguments import parse_args
from primus.backends.megatron.megatron_pretrain_trainer import MegatronPretrainTrainer

args = parse_args(extra_args_provider=add_loss_aggregation_args)
aggregation = aggregation_from_args(args)
if aggregation is not None:
    {"megatron_lm": megatron_lm, "primus": primus}[os.environ["HOOK"]].install(aggregation)
trainer = MegatronPretrainTrainer(backend_args=args)
trainer.setup()
trainer.init()
trainer.train()
