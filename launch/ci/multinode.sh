#!/bin/bash

# lossagg verify over several nodes of a Slurm cluster, compared with a golden file.
#
#   NUM_NODES=2 launch/ci/multinode.sh launch/ci/golden/16_ranks.json runs/multinode \
#       --gpus-per-node 8 --partition batch        # what follows the folder goes to sbatch
#   FAULT=times_dp NUM_NODES=2 launch/ci/multinode.sh ...
#   DEVICE=cpu ALLOW="device=cpu backend=gloo hosts=1" LAUNCHER=torchrun \
#       launch/ci/multinode.sh launch/ci/golden/4_ranks.json FOLDER
#
# The golden file names the options of verify, the number of ranks, and on what they have to run:
# device, backend, number of hosts. ALLOW names what may be another one, and which; without it a run
# on a CPU, or on fewer hosts, fails. LAUNCHER=torchrun takes the processes of this machine instead
# of a cluster. FAULT runs a copy of the package with that fault of tests/wrong_factors in it: the
# negative control, which passes where verify fails and names the fault. FOLDER is on a file system
# that the nodes share; it gets report.json, report.md and log.txt. On GitHub the summary of the step
# has the comparison and, without FAULT, report.md. Exit status: that of golden.py compare: 0 if the
# report is as expected and, without FAULT, no process failed.

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
REPOSITORY=$PWD
GOLDEN_PY=$REPOSITORY/launch/ci/golden.py

export PYTHON=${PYTHON:-python3}
LAUNCHER=${LAUNCHER:-slurm}
NUM_NODES=${NUM_NODES:-1}

GOLDEN=$(realpath -- "$GOLDEN")
COMPARE=(--log "$FOLDER/log.txt")
for FACT in ${ALLOW:-}; do COMPARE+=(--allow "$FACT"); done

PRINTED=$("$PYTHON" "$GOLDEN_PY" options "$GOLDEN") || exit 2
mapfile -t OPTIONS <<<"$PRINTED"
NUM_RANKS=${OPTIONS[0]}

rm -f "$FOLDER"/{report.json,report.md,log.txt,sbatch.txt} # of an earlier run
rm -rf "$FOLDER/faulty"

# The ranks run the package of the folder in which the command starts.
PACKAGE=$REPOSITORY
if [[ -n ${FAULT:-} ]]; then
    if [[ ! -f tests/wrong_factors/$FAULT.txt ]]; then
        echo "FAULT: got $FAULT, expected the name of a .txt file in tests/wrong_factors: correct it" >&2
        exit 2
    fi
    PACKAGE=$FOLDER/faulty
    COMPARE+=(--fault "$FAULT")
    mkdir "$PACKAGE"
    cp -r megatron_lossagg "$PACKAGE"
    PYTHONPATH=tests/wrong_factors "$PYTHON" -c '
import sys
from pathlib import Path
import run
run.apply(run.HERE / f"{sys.argv[1]}.txt", Path(sys.argv[2]))' "$FAULT" "$PACKAGE" || exit 2
fi
export PYTHONPATH=$PACKAGE${PYTHONPATH:+:$PYTHONPATH}
cd "$PACKAGE"

COMMAND=(
    -m megatron_lossagg verify "${OPTIONS[@]:1}"
    --json "$FOLDER/report.json"
    --markdown "$FOLDER/report.md"
)

STATUS=0
case $LAUNCHER in
slurm)
    # A workflow that is cancelled takes its job with it. Hosts that share a cluster share its names.
    JOB_NAME=lossagg-ci-$HOSTNAME-$$
    trap 'kill "$SBATCH" || true; scancel --name "$JOB_NAME" || true; exit 143' INT TERM
    LAUNCH_DIR=$REPOSITORY/launch sbatch --wait --job-name "$JOB_NAME" --nodes "$NUM_NODES" \
        --output "$FOLDER/log.txt" "$@" "$REPOSITORY/launch/slurm.sbatch" "${COMMAND[@]}" \
        2>"$FOLDER/sbatch.txt" &
    SBATCH=$!
    wait "$SBATCH" || STATUS=$?
    cat "$FOLDER/sbatch.txt" >&2
    if [[ ! -e $FOLDER/log.txt ]]; then
        { echo "the job did not start: sbatch ended with status $STATUS"; cat "$FOLDER/sbatch.txt"; } \
            >"$FOLDER/log.txt"
    fi
    ;;
torchrun)
    if (($#)); then
        echo "LAUNCHER=torchrun: got $*, expected no options for sbatch: leave them out" >&2
        exit 2
    fi
    NUM_NODES=1 NODE_RANK=0 PROCESSES_PER_NODE=$NUM_RANKS \
        "$REPOSITORY/launch/torchrun.sh" "${COMMAND[@]}" &>"$FOLDER/log.txt" || STATUS=$?
    ;;
*)
    echo "LAUNCHER: got $LAUNCHER, expected slurm or torchrun: correct it" >&2
    exit 2
    ;;
esac
echo "$LAUNCHER ended with status $STATUS; the log is $FOLDER/log.txt"

# A job that failed has a report that says why, or a log.
COMPARED=0
"$PYTHON" "$GOLDEN_PY" compare "$GOLDEN" "$FOLDER/report.json" "${COMPARE[@]}" --status "$STATUS" || COMPARED=$?
if [[ -z ${FAULT:-} && -e $FOLDER/report.md ]]; then
    cat "$FOLDER/report.md" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
fi
exit "$COMPARED"
