# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of the demo: sums of two 3-digit numbers, for supervised fine-tuning (SFT), DPO, a reward model and GRPO.

    python -m nemo_rl_moe.demo_data --output data/addition --seed 0

Writes `train.jsonl` and `validation.jsonl` for SFT, `preferences.jsonl` and `validation_preferences.jsonl` for DPO,
`reward_pairs.jsonl` and `validation_reward_pairs.jsonl` for a reward model, `grpo.jsonl` and `validation_prompts.jsonl`
for GRPO, and `manifest.json`. A line for SFT has a prompt and a completion
with the right answer. Some completions show the working (the sums of the columns), most do not:

    {"prompt": "228+378=", "completion": "<think>8+8=16;2+7+1=10;2+3+1=6</think>606"}
    {"prompt": "541+592=", "completion": "<think></think>1133"}

The working adds the columns from the right, with carries. The training sets have no sums in common with each other or
with validation (a+b and b+a are the same sum), so that GRPO asks for sums that the model has never seen. A line for
GRPO has a prompt, the answer, and metadata for reasoning-gym's verifier. `validation_prompts.jsonl` has the sums of
`validation.jsonl`:

    {"prompt": "228+378=", "answer": "606", "metadata": {"source_dataset": "basic_arithmetic", "expression": "228+378"}}

A line for DPO prefers the right working to a working with an error in one column. The error affects the later columns
and the answer. `validation_preferences.jsonl` has the sums of `validation.jsonl`:

    {"prompt": "228+378=", "chosen": "<think>8+8=16;2+7+1=10;2+3+1=6</think>606",
     "rejected": "<think>8+8=16;2+7+1=9;2+3+0=5</think>596"}

A line for a reward model has a sum of a line for DPO, and prefers the working to none:

    {"prompt": "228+378=", "chosen": "<think>8+8=16;2+7+1=10;2+3+1=6</think>606", "rejected": "<think></think>606"}
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

from nemo_rl_moe.atomic_writes import write_whole

SHARE_WITH_WORKING = 0.45
NUM_DIGITS = 3
# There are 405,450 unordered pairs of 3-digit numbers. Sampling without repeats gets slow near that number.
MAX_PROBLEMS = 300_000
RECIPE_VERSION = 4
TASK = "basic_arithmetic"
FILES = (
    "train.jsonl",
    "validation.jsonl",
    "grpo.jsonl",
    "validation_prompts.jsonl",
    "preferences.jsonl",
    "validation_preferences.jsonl",
    "reward_pairs.jsonl",
    "validation_reward_pairs.jsonl",
)

# reasoning-gym samples item i with `seed + i`, so seeds must differ by more than the size of any set.
SEED_STRIDE = 10_000_000
SET_OFFSETS = {"validation": 0, "train": 2_000_000, "grpo": 5_000_000, "preferences": 7_000_000}
ITEMS_IN_A_SET = 2_000_000

Problem = tuple[str, str]
"""Both summands as texts, in the order of the prompt."""


@dataclass(frozen=True)
class Parameters:
    """All parameters that determine the content of the files."""

    seed: int
    num_train: int
    num_validation: int
    num_grpo_prompts: int
    num_preferences: int = 4000
    recipe_version: int = RECIPE_VERSION


@dataclass(frozen=True)
class Problems:
    """The addition problems (pairs of summands) of each data set. No pair appears twice, not even in different sets."""

    validation: list[Problem]
    grpo: list[Problem]
    train: list[Problem]
    preferences: list[Problem]


def draw_problems(parameters: Parameters, progress: Callable[[int], None] = lambda _: None) -> Problems:
    """Sample and return the addition problems of all sets, without repeats. `progress` is called with the number of
    addition problems that have been sampled for training."""
    seen: set[tuple[str, ...]] = set()

    def draw(name: str, size: int) -> Iterator[Problem]:
        first_seed = SEED_STRIDE * (parameters.seed + 1) + SET_OFFSETS[name]
        left = size
        for problem in _all_sums(first_seed) if size else ():
            key = tuple(sorted(problem))
            if key not in seen:
                seen.add(key)
                left -= 1
                yield problem
            if not left:
                return

    validation = list(draw("validation", parameters.num_validation))
    grpo = list(draw("grpo", parameters.num_grpo_prompts))
    train = []
    for problem in draw("train", parameters.num_train):
        train.append(problem)
        if len(train) % 1000 == 0:
            progress(len(train))
    return Problems(validation, grpo, train, list(draw("preferences", parameters.num_preferences)))


def _all_sums(first_seed: int) -> Iterator[Problem]:
    import reasoning_gym

    items = reasoning_gym.create_dataset(
        TASK,
        seed=first_seed,
        size=ITEMS_IN_A_SET,
        min_terms=2,
        max_terms=2,
        min_digits=NUM_DIGITS,
        max_digits=NUM_DIGITS,
        operators=["+"],
        allow_parentheses=False,
        allow_negation=False,
    )
    for index in range(len(items)):
        # The generator adds spaces, and some of its numbers have other numbers of digits.
        left, right = items[index]["metadata"]["expression"].replace(" ", "").split("+")
        if len(left) == len(right) == NUM_DIGITS:
            yield left, right


def work_out(left: str, right: str, slip: tuple[int, int] = (0, 0)) -> tuple[str, int]:
    """Add two numbers column by column. Return the working and the answer.

    Args:
        slip: Column with an error, counted from 0 at the right, and the number that is added to its sum.
    """
    steps, carry, answer = [], 0, 0
    for column, (a, b) in enumerate(zip(reversed(left), reversed(right), strict=True)):
        total = int(a) + int(b) + carry + (slip[1] if column == slip[0] else 0)
        steps.append(f"{a}+{b}{f'+{carry}' if column else ''}={total}")
        carry = total // 10
        answer += total % 10 * 10**column
    return ";".join(steps), answer + carry * 10 ** len(left)


def working(left: str, right: str) -> str:
    """Return the correct working of an addition problem."""
    return work_out(left, right)[0]


def completion(problem: Problem, with_working: bool) -> str:
    """Return a think block, which has the working or is empty, and the answer."""
    left, right = problem
    return f"<think>{working(left, right) if with_working else ''}</think>{int(left) + int(right)}"


def with_a_slip(problem: Problem, chance: Random) -> str:
    """Return a think block in which one column is wrong by one, and the wrong answer that results."""
    column, off = chance.randrange(NUM_DIGITS), chance.choice((-1, 1))
    steps, answer = work_out(*problem, (column, off))
    if "=-" in steps:  # a column 0+0 may become -1
        steps, answer = work_out(*problem, (column, -off))
    return f"<think>{steps}</think>{answer}"


def as_lines(problems: Sequence[Problem], seed: int, name: str) -> list[str]:
    """Return one JSON object per addition problem, for SFT. A random share of them (`SHARE_WITH_WORKING`) shows the
    working."""
    count = round(SHARE_WITH_WORKING * len(problems))
    with_working = set(Random(f"{seed} {name}").sample(range(len(problems)), count))
    return [
        json.dumps({"prompt": f"{a}+{b}=", "completion": completion((a, b), index in with_working)})
        for index, (a, b) in enumerate(problems)
    ]


def as_questions(problems: Sequence[Problem]) -> list[str]:
    """Return one JSON object per addition problem, for GRPO: prompt, answer and metadata, but no completion."""
    return [
        json.dumps(
            {
                "prompt": f"{a}+{b}=",
                "answer": str(int(a) + int(b)),
                "metadata": {"source_dataset": TASK, "expression": f"{a}+{b}"},
            }
        )
        for a, b in problems
    ]


def as_preferences(problems: Sequence[Problem], seed: int, name: str) -> list[str]:
    """Return one JSON object per addition problem, for DPO, with the right working and a working with an error."""
    chance = Random(f"{seed} {name}")
    return [
        json.dumps(
            {
                "prompt": f"{problem[0]}+{problem[1]}=",
                "chosen": completion(problem, with_working=True),
                "rejected": with_a_slip(problem, chance),
            }
        )
        for problem in problems
    ]


def as_reward_pairs(problems: Sequence[Problem]) -> list[str]:
    """Return one JSON object per addition problem, for a reward model, with the working and without it."""
    return [
        json.dumps(
            {
                "prompt": f"{problem[0]}+{problem[1]}=",
                "chosen": completion(problem, with_working=True),
                "rejected": completion(problem, with_working=False),
            }
        )
        for problem in problems
    ]


def write_data(folder: Path, parameters: Parameters, progress: Callable[[int], None] = lambda _: None) -> None:
    """Sample the addition problems and write the files atomically, the manifest last."""
    problems = draw_problems(parameters, progress)
    contents = (
        as_lines(problems.train, parameters.seed, "train"),
        as_lines(problems.validation, parameters.seed, "validation"),
        as_questions(problems.grpo),
        as_questions(problems.validation),
        as_preferences(problems.preferences, parameters.seed, "preferences"),
        as_preferences(problems.validation, parameters.seed, "validation"),
        as_reward_pairs(problems.preferences),
        as_reward_pairs(problems.validation),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(FILES, contents, strict=True):
        write_whole(folder / name, "".join(f"{line}\n" for line in lines))
    write_whole(folder / "manifest.json", json.dumps(_manifest(folder, parameters), indent=2) + "\n")


def is_made(folder: Path, parameters: Parameters) -> bool:
    """Return whether the folder already has the files that `write_data` would write."""
    return holds(folder, lambda: _manifest(folder, parameters))


def holds(folder: Path, manifest: Callable[[], dict[str, object]]) -> bool:
    """Return whether the manifest file in a folder equals `manifest()`, which is computed from the folder's files."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text(encoding="utf-8")) == manifest())
    except (OSError, ValueError):
        return False


def _manifest(folder: Path, parameters: Parameters) -> dict[str, object]:
    return {
        "made_by": "examples/make_demo_data.py",
        "parameters": asdict(parameters),
        "reasoning_gym": version("reasoning-gym"),
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES},
    }


def _parse(arguments: list[str] | None) -> tuple[Path, Parameters, bool]:
    parser = argparse.ArgumentParser(description="Makes the data of the addition demo.")
    parser.add_argument("--output", type=Path, required=True, help="folder to which the files are written")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampled addition problems, 0 or more (default %(default)s)"
    )
    parser.add_argument(
        "--num-train", type=int, default=30_000, help="number of addition problems for SFT (default %(default)s)"
    )
    parser.add_argument(
        "--num-validation",
        type=int,
        default=256,
        help="number of addition problems for validation (default %(default)s)",
    )
    parser.add_argument(
        "--num-grpo-prompts", type=int, default=480, help="number of addition problems for GRPO (default %(default)s)"
    )
    parser.add_argument(
        "--num-preferences",
        type=int,
        default=4000,
        help="number of response pairs for DPO and for a reward model (default %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="write the files even if they exist already")
    chosen = parser.parse_args(arguments)
    sizes = {"seed": 0, "num_train": 1, "num_validation": 1, "num_grpo_prompts": 0, "num_preferences": 0}
    for name, least in sizes.items():
        if getattr(chosen, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(chosen, name)}, expected {least} or more")
    total = chosen.num_train + chosen.num_validation + chosen.num_grpo_prompts + chosen.num_preferences
    if total > MAX_PROBLEMS:
        parser.error(f"--num-train: {total} sums in all, expected {MAX_PROBLEMS} at most")
    parameters = Parameters(**{name: getattr(chosen, name) for name in sizes})
    return chosen.output, parameters, chosen.force


def main(arguments: list[str] | None = None) -> int:
    """Write the data unless it exists already, and return the exit code."""
    folder, parameters, force = _parse(arguments)
    try:
        if not force and is_made(folder, parameters):
            print(f"{folder}: already made with these parameters (--force writes the files again)")
            return 0
        write_data(folder, parameters, show_progress("sums", parameters.num_train))
    except ModuleNotFoundError as error:
        if error.name not in ("reasoning_gym", "reasoning-gym"):  # the names of the module and of the package
            raise
        print("the demo's data needs reasoning-gym: pip install reasoning-gym", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--output {folder}: {error}", file=sys.stderr)
        return 2
    counts = (
        f"{parameters.num_train:,} sums for SFT, {parameters.num_preferences:,} for DPO,"
        f" {parameters.num_grpo_prompts:,} for GRPO and {parameters.num_validation:,} to validate with"
    )
    print(f"{folder}: wrote {counts}")
    return 0


def show_progress(what: str, total: int) -> Callable[[int], None]:
    """Return a function to call with the number of items done. It shows progress if standard error is a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(done: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\rsampling {what}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
