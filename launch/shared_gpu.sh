#!/bin/bash

# N ranks of a command on this machine's GPUs, several on one where there are fewer GPUs than ranks:
#
#   launch/shared_gpu.sh 8 python -m megatron_lossagg verify --dp 2 --cp 2 --pp 2
#   NUM_GPUS=1 launch/shared_gpu.sh 2 python pretrain_gpt.py ...
#
# NCCL refuses two ranks of one host on one GPU, so each rank then names a host of its own and all
# meet over loopback. NUM_GPUS: by default those of CUDA_VISIBLE_DEVICES, or of nvidia-smi. A line of
# a rank begins with its number. When a rank fails, all are ended, and its exit status is returned.

set -euo pipefail
set -m # each rank is a process group, which ends with what it started

refuse() {
    echo "$1" >&2
    exit 2
}

NUMBER='^[1-9][0-9]{0,3}$'
N=${1:-}
if [[ ! $N =~ $NUMBER || $# -lt 2 ]]; then
    refuse "shared_gpu.sh: got ${*:-nothing}, expected the number of ranks and a command: launch/shared_gpu.sh N COMMAND..."
fi
shift
if [[ -z ${NUM_GPUS:-} && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    NUM_GPUS=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
fi
NUM_GPUS=${NUM_GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)}
if [[ ! $NUM_GPUS =~ $NUMBER ]]; then
    refuse "NUM_GPUS: got $NUM_GPUS, expected the number of GPUs, from 1: repair the driver, or set it"
fi
if ((NUM_GPUS > N)); then NUM_GPUS=$N; fi

export WORLD_SIZE=$N
export LOCAL_WORLD_SIZE=$NUM_GPUS GROUP_WORLD_SIZE=$(((N + NUM_GPUS - 1) / NUM_GPUS))
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
if ((N > NUM_GPUS)); then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
    export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi
if [[ -z ${MASTER_PORT:-} ]]; then
    # Below what Linux gives to outgoing connections, and nobody answers there.
    MASTER_PORT=$((21000 + RANDOM % 11000))
    while (: <"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do
        MASTER_PORT=$((21000 + RANDOM % 11000))
    done
fi
export MASTER_PORT

GROUPS_OF_RANKS=()

# TERM for all ranks, and KILL for what is left after 5 seconds.
end() {
    trap - EXIT
    trap '' INT TERM HUP
    exec 2>/dev/null # bash reports each job that it ends
    local group tenths=0 left=1
    for group in "${GROUPS_OF_RANKS[@]}"; do kill -TERM -- "-$group" || true; done
    while ((left && tenths++ < 50)); do
        left=0
        for group in "${GROUPS_OF_RANKS[@]}"; do
            if kill -0 -- "-$group"; then left=1; fi
        done
        if ((left)); then sleep 0.1; fi
    done
    for group in "${GROUPS_OF_RANKS[@]}"; do kill -KILL -- "-$group" || true; done
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

for ((rank = 0; rank < N; rank++)); do
    (
        trap - EXIT HUP INT TERM
        export RANK=$rank LOCAL_RANK=$((rank % NUM_GPUS)) GROUP_RANK=$((rank / NUM_GPUS))
        if ((N > NUM_GPUS)); then export NCCL_HOSTID=${NCCL_HOSTID:-host$rank}; fi
        set +m # the pipeline stays in the rank's group
        # The last lines of a rank that is ended are still read.
        "$@" 2>&1 </dev/null | (trap '' TERM && exec sed -u "s/^/[$rank] /") || {
            status=$?
            echo "shared_gpu.sh: rank $rank ended with status $status, so all are ended" >&2
            exit "$status"
        }
    ) &
    GROUPS_OF_RANKS+=($!)
done

for ((ended = 0; ended < N; ended++)); do
    status=0
    wait -n || status=$?
    if ((status)); then exit "$status"; fi
done
