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

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if (($# < 2)); then
    echo "got $# arguments, expected a golden file and a folder: launch/ci/multinode.sh GOLDEN FOLDER" >&2
    exit 2
fi
GOLDEN=$1
mkdir -p "$2" || exit 2
FOLDER=$(cd "$2" && pwd) || exit 2
shift 2

export PYTHON=${PYTHON:-python3}
LAUNCHER=${LAUNCHER:-slurm}
NUM_NODES=${NUM_NODES:-1}

PRINTED=$("$PYTHON" launch/ci/golden.py options "$GOLDEN") || exit 2
mapfile -t OPTIONS <<<"$PRINTED"
NUM_RANKS=${OPTIONS[0]}

rm -f "$FOLDER"/{report.json,report.html,log.txt} # of an earlier run
COMMAND=(
    -m megatron_lossagg verify "${OPTIONS[@]:1}"
    --json "$FOLDER/report.json"
    --html "$FOLDER/report.html"
)

STATUS=0
case $LAUNCHER in
slurm)
    # A workflow that is cancelled takes its job with it. Hosts that share a cluster share its names.
    JOB_NAME=lossagg-ci-$HOSTNAME-$$
    trap 'kill "$SBATCH" || true; scancel --name "$JOB_NAME" || true; exit 143' INT TERM
    sbatch --wait --job-name "$JOB_NAME" --nodes "$NUM_NODES" --output "$FOLDER/log.txt" "$@" \
        launch/slurm.sbatch "${COMMAND[@]}" &
    SBATCH=$!
    wait "$SBATCH" || STATUS=$?
    ;;
torchrun)
    if (($#)); then
        echo "LAUNCHER=torchrun: got $*, expected no options for sbatch: leave them out" >&2
        exit 2
    fi
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NUM_NODES=1 NODE_RANK=0 PROCESSES_PER_NODE=$NUM_RANKS \
        launch/torchrun.sh "${COMMAND[@]}" &>"$FOLDER/log.txt" || STATUS=$?
    ;;
*)
    echo "LAUNCHER: got $LAUNCHER, expected slurm or torchrun: correct it" >&2
    exit 2
    ;;
esac
echo "$LAUNCHER ended with status $STATUS; the log is $FOLDER/log.txt"

# A job that failed has a report that says why, or a log.
"$PYTHON" launch/ci/golden.py compare "$GOLDEN" "$FOLDER/report.json" --log "$FOLDER/log.txt"
