#!/bin/bash

# Dr.GRPO over several machines, on their CPUs: run it on each with its NODE_RANK.
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=host0 PROCESSES_PER_NODE=4 CP=2 \
#       launch/torchrun.sh --output /shared/runs/online

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-2}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$PROCESSES_PER_NODE"
    --nnodes "$NUM_NODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
)

TRAINING_ARGS=(
    --num-microbatches 2
    --prompts-per-step 16
    --samples-per-prompt 8
)

# --loss-aggregation chooses the loss; by default constant over the longest response (Dr.GRPO).
KL_ARGS=(
    --kl-coefficient 0.01
    --kl-aggregation token_mean
)

exec "${PYTHON:-python3}" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" \
    examples/drgrpo/train.py \
    "${MODEL_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${KL_ARGS[@]}" \
    "$@"
