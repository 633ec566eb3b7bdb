#!/bin/bash

# README's commands on a machine of a user's: an empty home, an empty environment with the system's
# PATH, and a clone of this commit in a path with a space. What is installed here is not seen.
#
#   launch/ci/machine.sh                      # the system's Python, and one other, by the commit's number
#   launch/ci/machine.sh python3.13 /opt/py/bin/python3
#   PLAIN=1 launch/ci/machine.sh python3      # with the torch that plain pip takes: 5.5 GB
#
# Without PLAIN a CPU build of the torch in constraints.txt is installed first, from where pip's own
# settings say (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS: all PIP_* pass). A Python for which pip finds only
# a CUDA build is skipped. Each Python: the installation, lossagg verify, and the tests that start no
# process. The table at the end is for docs/compatibility.md. Exit status 1 if a Python failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SYSTEM_PATH=$(getconf PATH)
VERSIONS=(3.10 3.11 3.12 3.13)

# What `python3.N` is here: on the PATH, or built by pyenv.
python_of() {
    compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1.*/bin/python3" | sort -V | tail -n 1 ||
        PATH=$PATH:$SYSTEM_PATH command -v "python$1"
}

chosen() {
    local system others=() version python
    system=$(PATH=$SYSTEM_PATH command -v python3) && echo "$system"
    for version in "${VERSIONS[@]}"; do
        if python=$(python_of "$version"); then
            others+=("$python")
        else
            echo "Python $version: none here, skipped" >&2
        fi
    done
    if ((${#others[@]})); then
        echo "${others[$(git rev-list --count HEAD) % ${#others[@]}]}"
    fi
}

# As a user's shell: nothing of this environment but pip's settings.
typed() {
    local settings
    mapfile -t settings < <(env | grep '^PIP_' || true)
    env -i HOME="$WORK/home" PATH="$SYSTEM_PATH" "${settings[@]}" bash -euc \
        'cd "$1"; if [[ -e .venv ]]; then . .venv/bin/activate; fi; eval "$2"' - "$CHECKOUT" "$1"
}

versions() {
    typed 'python -c "
from importlib.metadata import version
import platform
print(platform.python_version(), version(\"torch\"), version(\"megatron-core\"), sep=\" | \")"'
}

tried() {
    local pins=""
    typed "'$1' -m venv .venv"
    if [[ -z ${PLAIN:-} ]]; then
        local pinned found
        pins="--constraint constraints.txt"
        pinned=$(sed -n 's/^torch==//p' constraints.txt)
        found=$(typed "pip index versions torch")
        if [[ $found != *"$pinned+cpu"* ]]; then
            RESULT="skipped: pip finds no CPU build of torch $pinned for it"
            return
        fi
        typed "pip install --quiet $pins torch numpy"
    fi
    typed "pip install --quiet '.[megatron]'"
    FOUND=$(versions)
    typed 'lossagg verify --dp 2 --cp 2' | tee "$WORK/verify"
    typed "pip install --quiet $pins '.[demo,dev]'"
    typed 'OMP_NUM_THREADS=1 python -m pytest --quiet -m "not launches and not gpu"' | tee "$WORK/tests"
    [[ $FOUND == "$(versions)" ]]
    RESULT="$(grep -o '[0-9]* of [0-9]* cases' "$WORK/verify" | head -n 1) | $(tail -n 1 "$WORK/tests")"
}

if (($#)); then
    PYTHONS=("$@")
else
    mapfile -t PYTHONS < <(chosen)
fi
STATUS=0
ROWS=()
for PYTHON in "${PYTHONS[@]}"; do
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
        tried "$PYTHON"
        echo "| $FOUND | $RESULT |" >"$WORK/row"
    )
    (($?)) && echo "| $FOUND | FAILED | |" >"$WORK/row" && STATUS=1
    set -e
    ROWS+=("$(cat "$WORK/row")")
    rm -rf "$WORK"
done

printf '%s\n' "| Python | torch | megatron-core | verify | tests |" '|---|---|---|---|---|' "${ROWS[@]}" |
    tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$STATUS"
