# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small files of checkpoints, changed in every way: a resume takes what was written, or an older step and says so.

Damage of weights and exported models, through whole commands: `tests/functional/test_damage.py`.
"""

import json
import random
from pathlib import Path

import pytest

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.errors import UserError, report_error
from tests.support.fuzzing import Case, Output, fuzz, mutated_bytes, mutated_json
from tests.support.saving_runs import Place, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OLDER, NEWER = 10, 20
FILES = ("state.json", "state.json", "files.json", "files.json", "policy/files.json", "policy/shard_0.bin")


def small_files(generator: random.Random, folder: Path) -> Case:
    place = Place(folder / "place")
    checkpoint = saved(place.run(1), OLDER, NEWER).store.path_of(NEWER)
    existing = [name for name in FILES if (checkpoint / name).is_file()]
    path = checkpoint / generator.choice(existing)
    whole = path.read_bytes()
    if path.suffix == ".json" and generator.random() < 0.6:
        content, what = mutated_json(generator, json.loads(whole))
    else:
        content, what = mutated_bytes(generator, whole)
    path.write_bytes(content)
    is_accepted = path.name == "state.json" and generator.random() < 0.4
    if is_accepted:  # as `verify --accept` does: what the file says counts now
        write_inventory(checkpoint)
    taken: list[tuple[int, bool]] = []

    def run() -> int:
        try:
            point = place.find()
        except UserError as error:
            for problem in error.problems:
                report_error(problem)
            return error.exit_code
        if point is not None:
            taken.append((point.step, point.state.loop.step == point.step))
        for warning in place.warnings:
            report_error(warning)
        return 0

    def difference(output: Output) -> str | None:
        if taken in ([], [(OLDER, True)]):  # none where it is another experiment's now
            return None if place.warnings else f"taken is {taken}, in silence"
        if taken != [(NEWER, True)]:
            return f"taken is {taken}"
        if content == whole or is_accepted or path.name == "files.json":
            return None
        # What is not compared before a resume is compared while it is read.
        return "the changed file is taken" if path.name == "state.json" else None

    return Case(f"{path.relative_to(checkpoint)}{', accepted' if is_accepted else ''}: {what}", run, difference)


def test_small_files(tmp_path: Path) -> None:
    fuzz(small_files, tmp_path, some_are_refused=False)  # an older one is taken
