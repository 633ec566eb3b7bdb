#!/bin/bash

# README's commands on a machine of a user's: an empty home, an empty environment with the system's
# PATH, and a clone of this commit in a path with a space. What is installed here is not seen.
#
#   launch/ci/machine.sh                      # the system's Python, and each of VERSIONS that is here
#   launch/ci/machine.sh --list               # names these
#   launch/ci/machine.sh system 3.13 /opt/py/bin/python3
#   PLAIN=1 launch/ci/machine.sh python3      # with the torch that plain pip takes: 5.5 GB
#   MAKE_TEST=1 launch/ci/machine.sh python3  # then `make test` too, which takes long
#
# Which torch: the system's Python, or one that is named by its command, takes a CPU build of the
# torch in constraints.txt, from where pip's own settings say (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS: all
# PIP_* pass), or else what plain pip takes. A version takes what plain pip takes, or else the CPU build.
# PLAIN=1: plain pip for all, PLAIN=0: for none. Plain pip needs 20 GB of free disk. If neither is
# possible, the row says SKIPPED.
#
# Each Python: README's own lines that install and verify, and the tests that start no process, on the
# torch and the megatron-core that those lines installed. Rows of the table at the end go to
# runs/ran/pythons.tsv (tests/support/ran.py). Exit status 1 if a Python failed, or if none ran.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SYSTEM_PATH=$(getconf PATH)
VERSIONS=(3.10 3.11 3.12 3.13)

# What `python3.N` is here: on the PATH, or built by pyenv.
python_of() {
    compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1.*/bin/python3" | sort -V | tail -n 1 ||
        PATH=$PATH:$SYSTEM_PATH command -v "python$1"
}

# The names of what is here.
list() {
    local version
    echo system
    for version in "${VERSIONS[@]}"; do
        if python_of "$version" >/dev/null; then
            echo "$version"
        else
            echo "Python $version: none here" >&2
        fi
    done
}

# As a user's shell: nothing of this environment but pip's settings.
typed() {
    local settings
    mapfile -t settings < <(env | grep '^PIP_' || true)
    # shellcheck disable=SC2016  # what the inner shell expands
    env -i HOME="$WORK/home" PATH="$SYSTEM_PATH" "${settings[@]}" bash -euc \
        'cd "$1"; if [[ -e ../environment ]]; then . ../environment/bin/activate; fi; eval "$2"' \
        - "$CHECKOUT" "$1"
}

# README's lines that begin with a word, of the block that clones.
readme() {
    sed -n '/^git clone/,/^```/p' "$CHECKOUT/README.md" | grep "^$1"
}

versions() {
    typed 'python -c "
from importlib.metadata import version
import platform
print(platform.python_version(), version(\"torch\"), version(\"megatron-core\"), sep=\" | \")"'
}

# Prints cpu, plain or nothing. $1: what is tried first.
which_torch() {
    local pinned kind
    pinned=$(sed -n 's/^torch==//p' constraints.txt)
    for kind in "$1" cpu plain; do
        if [[ $kind == plain && ${PLAIN:-} != 0 ]]; then
            (($(df --output=avail -k "$WORK" | tail -n 1) > 20 * 1000 * 1000)) || continue
        elif [[ $kind == cpu && ${PLAIN:-} != 1 ]]; then
            [[ $(typed "pip index versions torch") == *"$pinned+cpu"* ]] || continue
        else
            continue
        fi
        echo "$kind"
        return
    done
}

tried() {
    local kind lines pins="" began installed verified
    typed "'$1' -m venv ../environment"
    kind=$(which_torch "$2")
    lines=$(readme pip)
    began=$SECONDS
    case $kind in
    cpu) # README's line for a machine without a GPU then finds it there
        typed "pip install --quiet --constraint constraints.txt torch numpy"
        # Of the tests' tools only: megatron-core stays the one that README's lines install.
        grep -v '^megatron-core' constraints.txt >"$WORK/pins"
        pins="--constraint ../pins"
        ;;
    plain) lines=$(grep -v -e --index-url <<<"$lines") ;;
    *)
        RESULT="SKIPPED: no CPU build of the pinned torch, and PLAIN=0 or no 20 GB of disk |"
        return
        ;;
    esac
    typed "$lines"
    installed=$((SECONDS - began))
    FOUND=$(versions)
    began=$SECONDS
    typed "$(readme lossagg)" | tee "$WORK/verify"
    verified=$((SECONDS - began))
    typed "pip install --quiet $pins '.[demo,dev]'"
    typed 'OMP_NUM_THREADS=1 python -m pytest --quiet -m "not launches and not gpu"' | tee "$WORK/tests"
    [[ $FOUND == "$(versions)" ]]
    if [[ ${MAKE_TEST:-} == 1 ]]; then
        typed "make test" | tee -a "$WORK/tests"
    fi
    RESULT="$(grep -o '[0-9]* of [0-9]* cases' "$WORK/verify" | tail -n 1)"
    RESULT+=", $verified s, after $installed s of pip"
    RESULT+=" | $(grep -o '[0-9]* passed.* in .*' "$WORK/tests" | tr -d = | paste -s -d ';')"
}

if [[ ${1:-} == --list ]]; then
    list
    exit
fi
NAMES=("$@")
(($#)) || mapfile -t NAMES < <(list)
STATUS=0
RAN=0
ROWS=()
for NAME in "${NAMES[@]}"; do
    FIRST=cpu
    case $NAME in
    system) PYTHON=$(PATH=$SYSTEM_PATH command -v python3) ;;
    3.*)
        FIRST=plain
        PYTHON=$(python_of "$NAME")
        ;;
    *) PYTHON=$NAME ;;
    esac
    echo "== $PYTHON"
    WORK=$(mktemp -d)
    CHECKOUT="$WORK/a checkout"
    mkdir "$WORK/home"
    git clone --quiet . "$CHECKOUT"
    FOUND=$("$PYTHON" -c 'import platform; print(platform.python_version(), "", "", sep=" | ")')
    RESULT=""
    # As the condition of an if it would go on after an error.
    set +e
    (
        set -e
        tried "$PYTHON" "$FIRST"
        echo "| $FOUND | $RESULT |" >"$WORK/row"
    )
    FAILED=$?
    set -e
    if ((FAILED)); then
        echo "| $FOUND | FAILED | |" >"$WORK/row"
        STATUS=1
    fi
    ROWS+=("$(cat "$WORK/row")")
    if [[ ${ROWS[-1]} != *SKIPPED* ]]; then
        RAN=1
        mkdir -p runs/ran
        sed "s/^| *//; s/ *|$//; s/ *| */\t/g; s/$/\t$(date -u +%F)/" "$WORK/row" >>runs/ran/pythons.tsv
    fi
    rm -rf "$WORK"
done

printf '%s\n' "| Python | torch | megatron-core | verify | tests |" '|---|---|---|---|---|' "${ROWS[@]}" |
    tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
((RAN)) || STATUS=1
exit "$STATUS"
