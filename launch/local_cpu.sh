#!/bin/bash

# Dr.GRPO on this machine's CPU, over loopback: 2 processes unless NPROC says otherwise.
#
#   launch/local_cpu.sh --output runs/online
#   CP=2 launch/local_cpu.sh --output runs/cp2
#   PP=2 launch/local_cpu.sh --mode replay --output runs/pp2 \
#       --rollouts examples/drgrpo/data/rollouts.jsonl \
#       --start-from examples/drgrpo/data/warmup_weights.pt

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}

export DEVICE=cpu
export NUM_NODES=1 NODE_RANK=0
export PROCESSES_PER_NODE=${NPROC:-$((TP * PP * CP > 2 ? TP * PP * CP : 2))}
export PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
)

TRAINING_ARGS=(
    --num-microbatches 2
)

exec launch/torchrun.sh examples/drgrpo/train.py \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "$@"
