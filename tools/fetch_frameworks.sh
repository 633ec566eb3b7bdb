#!/usr/bin/env bash
# Clone the frameworks' own code into $FRAMEWORKS_DIR, at the commits of tools/frameworks.txt:
#
#     FRAMEWORKS_DIR=~/frameworks tools/fetch_frameworks.sh            # all of them
#     FRAMEWORKS_DIR=~/frameworks tools/fetch_frameworks.sh slime      # some
#
# What their code imports is installed apart: docs/evidence.md. Tests read FRAMEWORKS_DIR.
set -euo pipefail

: "${FRAMEWORKS_DIR:?set FRAMEWORKS_DIR to the folder for the checkouts}"

mapfile -t frameworks < <(grep -E ' [0-9a-f]{40}$' "$(dirname "$0")/frameworks.txt")

known=" $(printf '%s\n' "${frameworks[@]}" | cut -d ' ' -f 1 | tr '\n' ' ')"
for name in "$@"; do
    [[ $known == *" $name "* ]] || { echo "unknown framework $name, expected one of:$known" >&2; exit 2; }
done

mkdir -p "$FRAMEWORKS_DIR"
for framework in "${frameworks[@]}"; do
    read -r name url commit <<<"$framework"
    if (($#)) && [[ " $* " != *" $name "* ]]; then
        continue
    fi
    folder=$FRAMEWORKS_DIR/$name
    if [[ -e $folder && ! -d $folder/.git ]]; then
        echo "$folder exists and is not a clone: move it away" >&2
        exit 1
    fi
    if [[ $(git -C "$folder" rev-parse HEAD 2>/dev/null) == "$commit" ]]; then
        echo "$name $commit is there"
    else
        git init --quiet "$folder"
        git -C "$folder" fetch --quiet --depth 1 "$url" "$commit"
        git -C "$folder" checkout --quiet --detach FETCH_HEAD
        echo "$name $commit"
    fi
    if [[ $name == Megatron-Bridge ]]; then # trains with a Megatron-Core of its own
        git -C "$folder" submodule --quiet update --init --depth 1 3rdparty/Megatron-LM
    fi
done
