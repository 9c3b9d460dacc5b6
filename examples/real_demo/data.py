# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Write the data of `make demo-real`: words, each with one of five kinds of things as the answer.

python -m examples.real_demo.data --output data/words --seed 0

Each kind has 32 words: 20 for training and 12 held out, by the seed. Supervised fine-tuning sees four of the 20 with
their answers. Reinforcement learning sees all 20 without answers.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

WORDS = {
    "animal": "bee butterfly camel cow crab deer dolphin eagle elephant fox frog giraffe goat horse kangaroo lizard "
    "monkey mouse owl parrot penguin rabbit salmon shark sheep snake spider tiger turtle whale wolf zebra",
    "plant": "bamboo birch cactus cedar clover daffodil daisy dandelion elm fern heather ivy jasmine juniper "
    "lavender lily magnolia maple marigold moss nettle oak orchid palm pine poplar rose spruce sunflower "
    "tulip violet willow",
    "food": "bacon biscuit bread burger butter cake cheese chocolate curry dumpling ham honey jam lasagna muffin "
    "noodles omelette pancake pasta pie pizza popcorn pudding salad sandwich sausage soup steak stew "
    "toast waffle yogurt",
    "tool": "anvil axe broom chisel clamp crowbar drill grinder hammer hatchet hoe jigsaw ladder lathe mallet "
    "pitchfork pliers plough rake ruler sander saw scissors screwdriver scythe shovel sickle spanner "
    "stapler tongs trowel wrench",
    "country": "Austria Bolivia Brazil Canada Chile Cuba Denmark Egypt Finland France Ghana Greece Hungary Iceland "
    "Iran Ireland Italy Japan Kenya Malaysia Mexico Morocco Nepal Nigeria Norway Peru Poland Portugal "
    "Sweden Thailand Uganda Vietnam",
}
"""Words by their kind, which is the answer."""
QUESTION = "Answer with one word: animal, plant, food, tool or country."
NUM_TRAINED, NUM_SHOWN = 20, 4
"""Words of each kind in training, and in supervised fine-tuning."""


def write_data(folder: Path, seed: int) -> None:
    """Write `sft.jsonl` and `sft_validation.jsonl` (conversations), `grpo.jsonl` and `validation.jsonl` (prompts)."""
    generator = random.Random(seed)
    shown, trained, held_out = [], [], []
    for kind, text in WORDS.items():
        words = text.split()
        generator.shuffle(words)
        pairs = [(word, kind) for word in words]
        shown += pairs[:NUM_SHOWN]
        trained += pairs[:NUM_TRAINED]
        held_out += pairs[NUM_TRAINED:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("sft", shown), ("sft_validation", held_out)):
        _write(
            folder / f"{name}.jsonl",
            ({"messages": [*prompt(word), {"role": "assistant", "content": kind}]} for word, kind in pairs),
        )
    for name, pairs in (("grpo", trained), ("validation", held_out)):
        _write(folder / f"{name}.jsonl", ({"prompt": prompt(word), "answer": kind} for word, kind in pairs))


def prompt(word: str) -> list[dict[str, str]]:
    """Return the messages that ask about a word."""
    return [{"role": "system", "content": QUESTION}, {"role": "user", "content": word}]


def _write(path: Path, records: Iterable[object]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the data of make demo-real.")
    parser.add_argument("--output", type=Path, default=Path("data/words"), help="default: data/words")
    parser.add_argument("--seed", type=int, default=0, help="of which words are held out")
    options = parser.parse_args(arguments)
    write_data(options.output, options.seed)
    print(f"{options.output}: sft.jsonl, sft_validation.jsonl, grpo.jsonl and validation.jsonl")


if __name__ == "__main__":
    main()
