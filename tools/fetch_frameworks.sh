#!/usr/bin/env bash
# Clone the frameworks' own code into $FRAMEWORKS_DIR, at the commits that the integrations were tested with:
#
#     FRAMEWORKS_DIR=~/frameworks tools/fetch_frameworks.sh            # all of them
#     FRAMEWORKS_DIR=~/frameworks tools/fetch_frameworks.sh slime      # some
#
# What their code imports is installed apart: docs/evidence.md. Tests read FRAMEWORKS_DIR.
set -euo pipefail

: "${FRAMEWORKS_DIR:?set FRAMEWORKS_DIR to the folder for the checkouts}"

frameworks=(
    "slime https://github.com/THUDM/slime.git 624b824a898ab0ec1fcb4d373004c7f3852bf515"
    "miles https://github.com/radixark/miles.git 31f1ca961a94cb860cec3b2dea34ec332bfa8f76"
    "Megatron-LM https://github.com/NVIDIA/Megatron-LM.git 55ac7082517c3878ae653c07c09c534b8aed49f6"
    "Megatron-LM-main https://github.com/NVIDIA/Megatron-LM.git d98e8a64ddf34856e74b24714e3bedb2f5a39553"
    "Megatron-LM-dev https://github.com/NVIDIA/Megatron-LM.git d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1"
    "NeMo-RL https://github.com/NVIDIA-NeMo/RL.git 7ea279abfbeb698b092856d0dab61e7cf39bc909"
    "SkyRL https://github.com/NovaSky-AI/SkyRL.git a9564572eb8e91076be43c1bd5e4615e3de17265"
    "Megatron-Bridge https://github.com/NVIDIA-NeMo/Megatron-Bridge.git 067f987df03b8355b03192d88d70f1709fedf51a"
    "ROLL https://github.com/alibaba/ROLL.git 8eb27cc2dc34c4d1310b169d9b86d339004d811a"
    "LLaMA-Factory https://github.com/hiyouga/LLaMA-Factory.git ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30"
    "Primus https://github.com/AMD-AGI/Primus.git fd1eeabbad15135e3702094087e96142b4b4eacb"
    "AReaL https://github.com/inclusionAI/AReaL.git 4aef98d8d818af55b43621aaadba047ae10f4e77"
    "open-instruct https://github.com/allenai/open-instruct.git e6c3044aa6201c8bfa4573c1b03142af599e730d"
)

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
