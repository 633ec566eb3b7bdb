#!/bin/bash

# Submit a command to a Ray cluster that is up, with this package for all its workers.
#
#   launch/ray_job.sh python3 train.py --custom-config-path lossagg.yaml ...      # slime, miles
#   launch/ray_job.sh python3 -m verl.trainer.main_ppo ...                        # verl
#   launch/ray_job.sh python3 -m skyrl.train.entrypoints.main_base ...            # SkyRL
#
# Their drivers start workers on all nodes themselves. What torchrun runs starts with the word
# torchrun, and launch/torchrun.sh runs on NUM_NODES nodes of the cluster:
#
#   NUM_NODES=2 launch/ray_job.sh torchrun -m megatron_lossagg verify
#   NUM_NODES=2 MEGATRON_PATH=/opt/Megatron-LM launch/ray_job.sh \
#       torchrun -m megatron_lossagg run /opt/Megatron-LM/pretrain_gpt.py ...
#   launch/ray_job.sh torchrun /shared/megatron_lossagg/examples/drgrpo/train.py \
#       --output /shared/runs/online
#
# Paths are those of the cluster's nodes. DEVICE=cpu instead of GPUs and NCCL: CPU and gloo.

set -euo pipefail

LAUNCH_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}

# Uploaded to every worker and put on its PYTHONPATH, so that nothing has to be installed there.
# UPLOAD=0 where the package is in the image; verl needs that, it finds plugins by their metadata.
PY_MODULES=()
if [[ ${UPLOAD:-1} == 1 ]]; then
    PY_MODULES+=("$LAUNCH_DIR/../megatron_lossagg")
fi

# Ray's workers do not inherit this shell's environment: what they need is named here. slime and
# miles, single node and several:
#   CUDA_DEVICE_MAX_CONNECTIONS   torchrun.sh has the reason
#   PYTHONPATH                    Megatron-LM's checkout, which pip does not install
ENV_VARS=(
    "CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    "PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}"
)
if [[ -n ${MEGATRON_PATH:-} ]]; then
    ENV_VARS+=("PYTHONPATH=$MEGATRON_PATH")
fi
# No reduction inside NVLink switches where GPUs are not linked by NVLink. A machine without GPUs
# that submits says nothing about the cluster's.
if [[ -z ${NCCL_NVLS_ENABLE:-} ]] && TOPOLOGY=$(nvidia-smi topo -m 2>/dev/null); then
    if [[ $TOPOLOGY =~ NV[0-9] ]]; then NCCL_NVLS_ENABLE=1; else NCCL_NVLS_ENABLE=0; fi
fi
# Passed on where they are set: every exported setting of the libraries that communicate and of
# Transformer Engine, and what torchrun.sh and verl read.
SETTINGS=$(compgen -e | grep -E '^(NCCL|GLOO|TP|NVTE)_') || true
for NAME in DEVICE PROCESSES_PER_NODE RENDEZVOUS_TIMEOUT PYTHON OMP_NUM_THREADS MASTER_ADDR VERL_ENGINE_VENDOR \
    NCCL_NVLS_ENABLE $SETTINGS; do
    if [[ -n ${!NAME:-} ]]; then
        ENV_VARS+=("$NAME=${!NAME}")
    fi
done

if [[ ${1:-} == torchrun ]]; then
    PY_MODULES+=("$LAUNCH_DIR")
    set -- python3 -m launch.ray_nodes "${NUM_NODES:-1}" "${@:2}"
fi

RUNTIME_ENV_JSON=$(
    python3 - "${#PY_MODULES[@]}" "${PY_MODULES[@]}" "${ENV_VARS[@]}" <<'PYTHON'
import json, sys

num_modules = int(sys.argv[1])
modules, variables = sys.argv[2 : 2 + num_modules], sys.argv[2 + num_modules :]
env_vars = dict(variable.split("=", 1) for variable in variables)
print(json.dumps({"py_modules": modules, "env_vars": env_vars}))
PYTHON
)

exec ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$RUNTIME_ENV_JSON" -- "$@"
