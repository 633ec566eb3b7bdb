"""Make a small chat data set of uneven conversations and a word tokenizer for it.

``python make_sft_data.py FOLDER [SEED]`` writes ``data.jsonl`` and ``tokenizer/``. Megatron-LM's
``--sft`` reads both; each line holds one to three conversations, which it packs.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(100)]
ROLES = ["System", "User", "Assistant"]
# The control tokens of the chat template nemotron-h-aligned.
CONTROLS = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]


def make(folder, seed):
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(CONTROLS + WORDS + ROLES)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=CONTROLS[2:],
    ).save_pretrained(folder / "tokenizer")
    rng = random.Random(seed)

    def say(count):
        return " ".join(rng.choice(WORDS) for _ in range(count))

    lines = []
    for _ in range(40):
        messages = []
        for _ in range(rng.randint(1, 3)):
            answer = rng.choice([1, 1, 2, 4, 9])
            messages += [
                {"role": "system", "content": say(1)},
                {"role": "user", "content": say(rng.randint(1, 3))},
                {"role": "assistant", "content": say(answer)},
            ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
