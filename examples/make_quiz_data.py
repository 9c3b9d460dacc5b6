# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the data of the addition quiz from the demo's additions: two questions per record, the first as its prompt.

python examples/make_quiz_data.py --data data/addition --output data/quiz
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.atomic_writes import write_whole

FILES = ("grpo.jsonl", "validation_prompts.jsonl")


def records(lines: Sequence[str]) -> list[str]:
    """Return the lines of quizzes, each with a question and the next one."""
    prompts = [json.loads(line)["prompt"] for line in lines]
    pairs = zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    return [json.dumps({"prompt": first, "reset": {"questions": [first, second]}}) for first, second in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the files, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/addition"), help="folder of the additions")
    parser.add_argument("--output", type=Path, default=Path("data/quiz"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        source = options.data / name
        if not source.is_file():
            print(
                f"error: there is no {source}; python -m nemo_rl_moe.demo_data --output {options.data}", file=sys.stderr
            )
            return 2
        write_whole(options.output / name, "".join(f"{line}\n" for line in records(source.read_text().splitlines())))
    print(f"[data] {', '.join(str(options.output / name) for name in FILES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
