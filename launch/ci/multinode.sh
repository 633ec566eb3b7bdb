#!/bin/bash

# lossagg verify over several nodes of a Slurm cluster, compared with a golden file.
#
#   NUM_NODES=2 launch/ci/multinode.sh launch/ci/golden/16_ranks.json runs/multinode \
#       --gpus-per-node 8 --partition batch        # what follows the folder goes to sbatch
#   DEVICE=cpu PROCESSES_PER_NODE=2 NUM_NODES=2 launch/ci/multinode.sh launch/ci/golden/4_ranks.json FOLDER
#   DEVICE=cpu LAUNCHER=torchrun launch/ci/multinode.sh launch/ci/golden/4_ranks.json FOLDER
#
# The golden file names the options of verify and the number of ranks. LAUNCHER=torchrun takes the
# processes of this machine instead of a cluster. FOLDER is on a file system that the nodes share;
# it gets report.json, report.html and log.txt. Exit status: that of golden.py compare, 0 where the
# report is as it should be.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

if (($# < 2)); then
    echo "got $# arguments, expected a golden file and a folder: launch/ci/multinode.sh GOLDEN FOLDER" >&2
    exit 2
fi
GOLDEN=$1
mkdir -p "$2"
FOLDER=$(cd "$2" && pwd)
shift 2

export PYTHON=${PYTHON:-python3}
LAUNCHER=${LAUNCHER:-slurm}
NUM_NODES=${NUM_NODES:-1}

RANKS_AND_OPTIONS=$("$PYTHON" launch/ci/golden.py options "$GOLDEN") || exit 2
read -r NUM_RANKS OPTIONS <<<"$RANKS_AND_OPTIONS"
read -r -a OPTIONS <<<"$OPTIONS"

rm -f "$FOLDER"/{report.json,report.html,log.txt} # of an earlier run
COMMAND=(
    -m megatron_lossagg verify "${OPTIONS[@]}"
    --json "$FOLDER/report.json"
    --html "$FOLDER/report.html"
)

case $LAUNCHER in
slurm)
    # A workflow that is cancelled takes its job with it.
    JOB_NAME=lossagg-ci-$$
    trap 'scancel --name "$JOB_NAME"; kill "$SBATCH"; exit 143' INT TERM
    sbatch --wait --job-name "$JOB_NAME" --nodes "$NUM_NODES" --output "$FOLDER/log.txt" "$@" \
        launch/slurm.sbatch "${COMMAND[@]}" &
    SBATCH=$!
    wait "$SBATCH"
    ;;
torchrun)
    if [[ ${DEVICE:-cuda} == cpu ]]; then
        export CUDA_VISIBLE_DEVICES=
    fi
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
        "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
        --nproc-per-node "$NUM_RANKS" "${COMMAND[@]}" &>"$FOLDER/log.txt"
    ;;
*)
    echo "LAUNCHER: got $LAUNCHER, expected slurm or torchrun: correct it" >&2
    exit 2
    ;;
esac
echo "$LAUNCHER ended with status $?; the log is $FOLDER/log.txt"

# A job that failed has a report that says why, or a log.
"$PYTHON" launch/ci/golden.py compare "$GOLDEN" "$FOLDER/report.json" --log "$FOLDER/log.txt"
