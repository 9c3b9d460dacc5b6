# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the data of the demo with a tool: questions `a*b+c=`, some of which the demo's model cannot compute itself.

    python -m examples.tools_demo.data --output data/calculator

Two thirds of the questions are hard, such as `482*317+905=` with numbers of three digits, for which a model of this
size needs the calculator. One third is easy, such as `482*100+37=`, whose answer is the first number followed by the
last. Both look alike, so that the decision to call depends on the numbers.

`train.jsonl` and `validation.jsonl` are conversations for SFT. Every answer is right, but the ways to it are random,
good and bad ones (`WAYS`). In some of them the model has no tool, and answers at once. `grpo.jsonl` and
`validation_prompts.jsonl` are questions with their answers. No question is in two sets. The same seed gives the same
files.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.demo_data import holds
from nemo_rl_moe.tools.calculator import calculator
from nemo_rl_moe.tools.definitions import load_tools

SHARE_HARD = 2 / 3
SHARE_WITHOUT_TOOL = 0.2
"""Share of the SFT conversations, from which the model learns that the prompt shows whether it has the tool."""
MOST_QUESTIONS = 50_000
FILES = ("train.jsonl", "validation.jsonl", "grpo.jsonl", "validation_prompts.jsonl")
TOOL = "calculator"
_MADE_BY = "examples/tools_demo/data.py"


@dataclass(frozen=True)
class Question:
    """`a*b+c=`."""

    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        return f"{self.a}*{self.b}+{self.c}="

    @property
    def answer(self) -> str:
        return str(self.a * self.b + self.c)


def needs_tool(prompt: str) -> bool:
    """Return whether a question is hard: its second factor is not 10 or 100."""
    factor = prompt.partition("*")[2].partition("+")[0]
    return factor not in ("10", "100")


WAYS: dict[bool, dict[Callable[[Question], str] | None, float]] = {
    True: {
        None: 0.45,  # in effect a guess of the model
        lambda it: f"{it.b}+{it.c}": 0.15,  # useless
        lambda it: f"{it.a}*{it.b}": 0.15,  # the model must add
        lambda it: f"{it.a}*{it.b}+{it.c}": 0.25,
    },
    False: {None: 0.5, lambda it: f"{it.a}*{it.b}+{it.c}": 0.5},
}
"""Shares of the ways to an answer, for hard (True) and easy questions: the expression for the calculator, or None."""


@dataclass(frozen=True)
class Parameters:
    """All parameters of the data."""

    seed: int
    num_train: int
    num_validation: int
    num_grpo_prompts: int


def draw_question(chance: Random) -> Question:
    """Sample a hard or an easy question."""
    a = chance.randrange(100, 1000)
    if chance.random() < SHARE_HARD:
        return Question(a, chance.randrange(101, 1000), chance.randrange(100, 1000))
    digits = chance.choice((1, 2))
    return Question(a, 10**digits, chance.randrange(10 ** (digits - 1), 10**digits))


def draw_questions(parameters: Parameters) -> dict[str, list[Question]]:
    """Sample the sets, without repeats."""
    chance, seen = Random(parameters.seed), set[Question]()
    sizes = {
        "validation": parameters.num_validation,
        "grpo": parameters.num_grpo_prompts,
        "train": parameters.num_train,
    }
    sets: dict[str, list[Question]] = {name: [] for name in sizes}
    for name, size in sizes.items():
        while len(sets[name]) < size:
            question = draw_question(chance)
            if question not in seen:
                seen.add(question)
                sets[name].append(question)
    return sets


def conversation(question: Question, chance: Random, definition: object) -> dict[str, object]:
    """Return a conversation for SFT, without the tool, or with it and one of `WAYS`."""
    messages: list[dict[str, object]] = [{"role": "user", "content": question.text}]
    answer = {"role": "assistant", "content": question.answer}
    if chance.random() < SHARE_WITHOUT_TOOL:
        return {"messages": [*messages, answer]}
    ways = WAYS[needs_tool(question.text)]
    (expression_of,) = chance.choices(list(ways), list(ways.values()))
    if expression_of is not None:
        expression = expression_of(question)
        call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": expression}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": TOOL, "content": str(calculator(expression))})
    return {"messages": [*messages, answer], "tools": [definition]}


def write_data(folder: Path, parameters: Parameters) -> None:
    """Write the files atomically, the manifest last."""
    sets = draw_questions(parameters)
    definition = load_tools([TOOL], {})[TOOL].definition
    folder.mkdir(parents=True, exist_ok=True)
    for name, questions, chance in (
        ("train.jsonl", sets["train"], Random(f"{parameters.seed} train")),
        ("validation.jsonl", sets["validation"], Random(f"{parameters.seed} validation")),
    ):
        _write_lines(folder / name, [conversation(question, chance, definition) for question in questions])
    for name, questions in (("grpo.jsonl", sets["grpo"]), ("validation_prompts.jsonl", sets["validation"])):
        _write_lines(folder / name, [{"prompt": each.text, "answer": each.answer} for each in questions])
    write_whole(folder / "manifest.json", json.dumps(_manifest(folder, parameters), indent=2) + "\n")


def _write_lines(path: Path, records: Sequence[dict[str, object]]) -> None:
    write_whole(path, "".join(f"{json.dumps(record)}\n" for record in records))


def _manifest(folder: Path, parameters: Parameters) -> dict[str, object]:
    return {
        "made_by": _MADE_BY,
        "parameters": asdict(parameters),
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the data unless it exists, and return the exit code."""
    parser = argparse.ArgumentParser(description="Makes the data of the demo with a tool.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--num-train", type=int, default=12_000, help="conversations for SFT (default %(default)s)")
    parser.add_argument("--num-validation", type=int, default=256, help="default %(default)s")
    parser.add_argument("--num-grpo-prompts", type=int, default=640, help="default %(default)s")
    chosen = parser.parse_args(arguments)
    names = ("num_train", "num_validation", "num_grpo_prompts")
    for name in names:
        if not 1 <= getattr(chosen, name) <= MOST_QUESTIONS:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: got {getattr(chosen, name)}, expected a number from 1 to {MOST_QUESTIONS:,}")
    parameters = Parameters(chosen.seed, *(getattr(chosen, name) for name in names))
    try:
        if holds(chosen.output, lambda: _manifest(chosen.output, parameters)):
            print(f"{chosen.output}: already made with these parameters")
            return 0
        write_data(chosen.output, parameters)
    except OSError as error:
        print(f"--output {chosen.output}: {error}", file=sys.stderr)
        return 2
    print(
        f"{chosen.output}: wrote {chosen.num_train:,} conversations for SFT, {chosen.num_grpo_prompts:,} questions for"
        f" GRPO and {chosen.num_validation:,} to validate with"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
