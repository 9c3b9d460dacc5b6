# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A campaign of combined features reports each case, whatever becomes of its process, and goes on with the others."""

import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest

from tests.functional.pairs import __main__ as pairs
from tests.functional.pairs.cases import Case


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_case_has_a_result(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PROGRAM", "tests.support.small_programs")
    monkeypatch.setattr(pairs, "END_LIMIT_S", 0.5)
    names = ["first", "fails", "second", "exits", "third", "leaves", "last"]
    monkeypatch.setattr(pairs, "CASES_A_PROCESS", 3)
    options = Namespace(jobs=jobs, output=tmp_path, seed=0)
    pairs.Campaign(options, [Case(name, {}) for name in names]).run()
    results = pairs.read_results(tmp_path / pairs.RESULTS)
    assert set(results) == set(names)
    found = {name: result.faults for name, result in results.items() if result.faults}
    assert found.pop("fails") == ("step 1: a token is lost",)
    assert found.pop("exits") == ("exit code 7",)
    # What stays is found when its process has ended, and said of the last case.
    ((left,),) = found.values()
    assert left.startswith("left behind: processes [")
    (process_id,) = (int(word) for word in left.removeprefix("left behind: processes [").rstrip("]").split(", "))
    deadline = time.monotonic() + 60
    while _command(process_id):
        assert time.monotonic() < deadline, "it was killed"
        time.sleep(0.05)


def _command(process_id: int) -> bytes:
    """Return the command of a process; empty of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    return b""


def test_a_case_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PROGRAM", "tests.support.small_programs")
    monkeypatch.setattr(pairs, "CASE_LIMIT_S", 0.5)
    pairs.Campaign(Namespace(jobs=1, output=tmp_path, seed=0), [Case("hangs", {})]).run()
    (result,) = pairs.read_results(tmp_path / pairs.RESULTS).values()
    assert result.faults == ("no end within 0.5 s",)
