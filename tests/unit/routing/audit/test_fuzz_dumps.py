# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Other frameworks' files that nobody has thought of, through `audit`."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from nemo_rl_moe.errors import EXIT_RUN_FAILED
from tests.conftest import REPOSITORY_ROOT
from tests.support.fuzzing import Case, command, fuzz, mutated_bytes, mutated_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"


@cache
def examples() -> list[Path]:
    """Healthy files of every format."""
    found = [file for file in sorted(EXAMPLES.rglob("*")) if file.is_file() and file.name != "config.json"]
    return [file for file in found if not {"one_token_late", "layer_swapped"} & set(file.parts)]


def dumps(generator: random.Random, folder: Path) -> Case:
    """A file with odd bytes or odd values."""
    example = generator.choice(examples())
    path = folder / f"3{example.suffix}"
    if example.suffix == ".jsonl" and generator.random() < 0.8:
        lines = [json.loads(line) for line in example.read_text().splitlines()]
        number = generator.randrange(len(lines))
        lines[number], what = mutated_tree(generator, lines[number])
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    else:
        content, what = mutated_bytes(generator, example.read_bytes())
        path.write_bytes(content)
    words = ["audit", str(path)]
    for option, place in (("--model", "model"), ("--training", "transformers")):
        if generator.random() < 0.6:
            words += [option, str(EXAMPLES / place)]
    run = command(*words)

    def audit() -> int:
        code = run()
        return 0 if code == EXIT_RUN_FAILED else code  # a finding is a right result

    return Case(f"{' '.join(words[2:])}, {example.relative_to(EXAMPLES)}: {what}", audit)


def test_dumps(tmp_path: Path) -> None:
    fuzz(dumps, tmp_path)
