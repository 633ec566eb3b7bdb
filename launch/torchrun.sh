#!/bin/bash

# torchrun on one node, or on each of several. The arguments are what torchrun is to run:
#
#   launch/torchrun.sh -m megatron_lossagg verify
#   launch/torchrun.sh -m megatron_lossagg run pretrain_gpt.py --loss-aggregation sample_mean ...
#   launch/torchrun.sh examples/drgrpo/train.py --output runs/online
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=host0 launch/torchrun.sh ...    # host0
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=host0 launch/torchrun.sh ...    # host1
#
# DEVICE=cpu instead of GPUs and NCCL: CPU and gloo, 2 processes per node unless PROCESSES_PER_NODE
# says otherwise. With DEVICE=cuda, the default, a node without CUDA ends all of them. The package
# must be installed on every node: launch/README.md.

set -euo pipefail

DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}

# PET_*: torchrun's own variables, set by Kubeflow in every pod. SLURM_*: by srun in every task.
NUM_NODES=${NUM_NODES:-${PET_NNODES:-${SLURM_NNODES:-}}}
NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-${SLURM_NODEID:-}}}
MASTER_ADDR=${MASTER_ADDR:-${PET_MASTER_ADDR:-}}
MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${PET_NPROC_PER_NODE:-}}

# The ranks of lossagg verify fail together where one of them has another device.
export LOSSAGG_DEVICE=$DEVICE

# Seconds in which all nodes have to meet: launch/agent.py.
export RENDEZVOUS_TIMEOUT=${RENDEZVOUS_TIMEOUT:-300}

refuse() {
    echo "$1" >&2
    exit 2
}

# A node that takes itself for the only one, or for another one, trains a model of its own or waits.
if [[ -z $NUM_NODES && -n $MASTER_ADDR ]]; then
    refuse "NUM_NODES: got none with MASTER_ADDR=$MASTER_ADDR, expected the number of nodes: set it"
fi
NUM_NODES=${NUM_NODES:-1}
NUMBER='^(0|[1-9][0-9]{0,5})$'
if [[ ! $NUM_NODES =~ $NUMBER || $NUM_NODES == 0 ]]; then
    refuse "NUM_NODES: got $NUM_NODES, expected the number of nodes, from 1: correct it"
fi
if [[ $NUM_NODES != 1 && -z $MASTER_ADDR ]]; then
    refuse "MASTER_ADDR: got none with $NUM_NODES nodes, expected the first node's address: set it, or NUM_NODES=1"
fi
if [[ $NUM_NODES != 1 && -z $NODE_RANK ]]; then
    refuse "NODE_RANK: got none with $NUM_NODES nodes, expected this node's number from 0 to $((NUM_NODES - 1)): set it"
fi
NODE_RANK=${NODE_RANK:-0}
if [[ $NUM_NODES == 1 && $NODE_RANK != 0 ]]; then
    refuse "NODE_RANK: got $NODE_RANK with one node, expected 0: correct it or set NUM_NODES"
fi
if [[ ! $NODE_RANK =~ $NUMBER ]] || ((NODE_RANK >= NUM_NODES)); then
    refuse "NODE_RANK: got $NODE_RANK with $NUM_NODES nodes, expected a number from 0 to $((NUM_NODES - 1)): correct it"
fi
if [[ ! $MASTER_PORT =~ $NUMBER ]] || ((MASTER_PORT < 1 || MASTER_PORT > 65535)); then
    refuse "MASTER_PORT: got $MASTER_PORT, expected a port from 1 to 65535: correct it"
fi
if [[ ! $PROCESSES_PER_NODE =~ ^(|gpu|[1-9][0-9]{0,5})$ ]]; then
    refuse "PROCESSES_PER_NODE: got $PROCESSES_PER_NODE, expected a number from 1, or gpu: correct it"
fi
if [[ ! $RENDEZVOUS_TIMEOUT =~ ^[1-9][0-9]{0,5}$ ]]; then
    refuse "RENDEZVOUS_TIMEOUT: got $RENDEZVOUS_TIMEOUT, expected a number of seconds from 1: correct it"
fi

# One thread per process: torchrun's own default, without its warning. Processes share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# What a rank prints is in the log when the rank dies.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}

case $DEVICE in
cuda)
    PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-gpu}

    # One hardware queue starts kernels in the order in which they were issued, so that communication
    # for tensor and context parallelism overlaps. Megatron-LM asks for it before Blackwell, and
    # refuses it with FSDP: set another number there.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

    # slime and miles: reductions inside NVLink switches only where GPUs are linked by NVLink.
    if nvidia-smi topo -m 2>/dev/null | grep -E 'NV[0-9]+' >/dev/null; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
    export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-$HAS_NVLINK}

    # Megatron-LM's RL examples: NCCL says why it failed.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

    # Of your network, so without a default here; export them, and they reach every rank:
    #   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the interface, where a node has several
    #   NCCL_IB_SL=1, NCCL_IB_TIMEOUT=19         Megatron-LM: InfiniBand's service level, and patience
    #                                            with a large or busy fabric
    #   NCCL_P2P_NET_CHUNKSIZE=2097152           Megatron-LM: larger messages between pipeline stages
    #   NVTE_FWD_LAYERNORM_SM_MARGIN=16, NVTE_BWD_LAYERNORM_SM_MARGIN=16
    #                                            Megatron-LM: multiprocessors left for communication
    ;;
cpu)
    PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-2}

    # Without a visible GPU the ranks take gloo.
    export CUDA_VISIBLE_DEVICES=

    # Megatron-LM's training loop needs stand-ins for CUDA: docs/integrations/megatron-lm.md.
    if [[ ${*:1:3} == "-m megatron_lossagg run" ]]; then
        set -- "${@:1:3}" --cpu "${@:4}"
    fi
    ;;
*)
    refuse "DEVICE: got $DEVICE, expected cuda or cpu: correct it"
    ;;
esac

DISTRIBUTED_ARGS=(
    --nproc-per-node "$PROCESSES_PER_NODE"
)
if [[ $NUM_NODES == 1 ]]; then
    # A free port of this machine: several runs can share it.
    DISTRIBUTED_ARGS+=(
        --standalone
        --local-addr 127.0.0.1
    )
else
    DISTRIBUTED_ARGS+=(
        --nnodes "$NUM_NODES"
        --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR"
        --master-port "$MASTER_PORT"
    )
fi

exec "$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/agent.py" "${DISTRIBUTED_ARGS[@]}" "$@"
