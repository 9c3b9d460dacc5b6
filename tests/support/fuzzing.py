# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seeded cases of hostile input, each with one judgement: a clear error, or a right result; soon, and in little memory.

A case is made from its seed alone and runs in a process that runs many of them, one after another. What hangs, dies or
fills the memory costs that process, and the next case gets a new one. `FUZZ_SCALE=10` makes ten times as many cases;
`FUZZ_FIRST=300` makes others, from that seed on; `FUZZ_SEED=17` repeats one alone and leaves its files.
"""

import copy
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import EXIT_BAD_INPUT

DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
ODD_TEXTS = (
    "",
    " ",
    "NaN",
    "null",
    "1e400",
    "\x1b]0;title\x07\x1b[2J\r",
    "\u202eabc\u2028",
    "a\0b",
    "x" * 10_000,
    "\u00e9\U0001f600",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "${x}",
    "</script><script>alert(1)</script>",
    "{{ 7 * 7 }}",
)
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1.5, -0.0, 1e308, 5e-324, math.inf, math.nan)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_TEXTS,
    *ODD_NUMBERS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": [1, {"c": None}]}},
    list(range(3_000)),
    DEEP,
)

Place = tuple[Any, ...]


def places(tree: Any, at: Place = ()) -> list[Place]:
    """Return the keys and indices that lead to every value in a nested one, itself first; not to what is nested very
    deeply.
    """
    if len(at) > 50:
        return [at]
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, value in entries for place in places(value, (*at, key)))]


def value_at(tree: Any, place: Place) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def near(generator: random.Random, value: Any) -> Any:
    """Return a value of the same type, where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return generator.choice([value + 1, value - 1, -value, value * 2, value * 10**6, value + 0.5, str(value)])
    if isinstance(value, float):
        return generator.choice([-value, value * 1e300, 0.0, int(value) if math.isfinite(value) else 0, str(value)])
    if isinstance(value, str):
        odd = generator.choice(ODD_TEXTS)
        return generator.choice([value[:-1], value + odd, odd + value, value.upper(), [value], {value: value}])
    if isinstance(value, list):
        return generator.choice([value[:-1], value + value, value[::-1], [value], dict(enumerate(map(str, value)))])
    return generator.choice([list(value), [value], {}]) if isinstance(value, dict) else generator.choice(ODD_VALUES)


def mutated_tree(generator: random.Random, tree: Any, num_changes: int = 1) -> tuple[Any, str]:
    """Return a nested value with changes in it, and the changes in words. The root itself changes seldom."""
    tree = copy.deepcopy(tree)
    reported = []
    for _ in range(num_changes):
        inner = places(tree)[1:]
        if not inner or generator.random() < 0.02:
            return (tree := generator.choice(ODD_VALUES)), f"all of it = {tree!r:.100}"
        place = generator.choice(inner)
        above, key = value_at(tree, place[:-1]), place[-1]
        how = generator.choice(["odd", "odd", "near", "near", "gone", "renamed", "added", "swapped"])
        if how == "odd":
            above[key] = copy.deepcopy(generator.choice(ODD_VALUES))
        elif how == "near":
            above[key] = near(generator, above[key])
        elif how == "gone":
            del above[key]
        elif how == "swapped":
            other = generator.choice(inner)
            above[key] = copy.deepcopy(value_at(tree, other))
        elif isinstance(above, dict):
            new = generator.choice(["x" * 5_000, "", "\x1b[31m", f"{key}_", f"{key}"[:-1], "__proto__", "a.b"])
            above[new] = above.pop(key) if how == "renamed" else generator.choice(ODD_VALUES)
        else:
            above.insert(key, generator.choice(ODD_VALUES))
        reported.append(f"{'.'.join(str(part)[:40] for part in place)}: {how}")
    return tree, "; ".join(reported)


def _flip(generator: random.Random, content: bytearray) -> None:
    for _ in range(generator.choice([1, 1, 3, 30])):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)


def _cut(generator: random.Random, content: bytearray) -> None:
    del content[generator.randrange(len(content)) :]


def _remove(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    del content[start : start + generator.choice([1, 1, 7, 100])]


def _zero(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    length = len(content[start : start + generator.choice([1, 8, 512])])
    content[start : start + length] = bytes(length)


def _repeat(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    piece = content[start : start + generator.choice([1, 10, 100])]
    content[start:start] = piece * generator.choice([1, 2, 50])


def _insert(generator: random.Random, content: bytearray) -> None:
    odd = (b"\0", b"\xff\xfe", b"\x1b[2J", b"\n", b"\r\n", b"\xed\xa0\x80", b'"', b"{", b"[" * 2_000, b"9" * 5_000)
    start = generator.randrange(len(content) + 1)
    content[start:start] = generator.choice(odd)


_CHANGES: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _cut, _remove, _zero, _repeat, _insert)


def mutated_bytes(generator: random.Random, content: bytes) -> tuple[bytes, str]:
    """Return the other bytes, and the change in words."""
    changed = bytearray(content or b"\0")
    reported = []
    for _ in range(generator.choice([1, 1, 1, 3])):
        change = generator.choice(_CHANGES)
        if changed:
            change(generator, changed)
            reported.append(change.__name__.strip("_"))
    return bytes(changed), f"{len(content)} bytes: {', '.join(reported)}"


def mutated_json(generator: random.Random, tree: Any) -> tuple[bytes, str]:
    """Return a JSON text of a changed value, now and then changed once more as a text."""
    tree, what = mutated_tree(generator, tree, generator.choice([1, 1, 1, 2, 4]))
    text = json.dumps(tree)
    how = generator.randrange(12)
    if how == 0:  # a key that stands there twice
        text, what = text.replace("{", '{"a": 1, "a": 2, ', 1), f"{what}; a key twice"
    elif how == 1:
        text, what = text.replace("1", "1" * 5_000, 1), f"{what}; 5,000 digits"
    elif how == 2:
        text, what = text.replace("null", "[" * 100_000, 1), f"{what}; 100,000 brackets"
    elif how == 3:
        content, more = mutated_bytes(generator, text.encode())
        return content, f"{what}; {more}"
    return text.encode(), what


NUM_CASES = 300
"""Of each fuzzer in an ordinary run."""
LIMIT_S = 50.0
"""Seconds of computing of a case."""
_FIRST_LIMIT_S = 60.0  # the first case of a process imports what the command needs
_BUSY = 12
"""Seconds of the clock for one of computing, where others take the cores; a case that only waits gets these."""
MOST_BYTES = 1 << 30
"""Resident memory of a case, beyond what its process has before it."""
LONGEST_LINE, LONGEST_TEXT = 3_000, 60_000
"""Characters of one line of an error, and of all of them: twenty bad lines may be shown."""
_CRASHES = ("Traceback (most recent call last)", "ends the process that renders it (exit code")
_MOST_SHOWN = 20
_LOOK_EVERY_S = 0.02
_PRELOADED = ["tests.support.rank_imports"]  # as ranks have it: a process of tests has one server


@dataclass(frozen=True)
class Output:
    code: int
    printed: str
    errors: str


def _nothing_wrong(output: Output) -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        what: What is odd about the input, for the message of a failure.
        run: Does it; returns the exit code.
        difference: What is wrong with the result of a run that ended with 0; None: nothing.
        refusal: What is wrong with the message of one that ended with 2; None: nothing.
    """

    what: str
    run: Callable[[], int]
    difference: Callable[[Output], str | None] = _nothing_wrong
    refusal: Callable[[Output], str | None] = _nothing_wrong


MakeCase = Callable[[random.Random, Path], Case]


def command(*words: str) -> Callable[[], int]:
    def run() -> int:
        try:
            return main(words)
        except SystemExit as ended:  # of argparse
            return int(ended.code or 0)

    return run


@dataclass
class Verdict:
    """Numbers of cases by their end, and the failures among them."""

    accepted: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


def fuzz(make_case: MakeCase, folder: Path, *, some_are_refused: bool = True) -> None:
    """Run cases; fails where one is judged wrong, or where all of them are accepted or all refused.

    Args:
        make_case: A function of a module; gets a generator that is seeded by the case, and an empty folder.
        folder: For the files of the cases; those of failures stay.
        some_are_refused: False where there is something else to take in place of what is odd.
    """
    one_seed = os.environ.get("FUZZ_SEED")
    first = int(os.environ.get("FUZZ_FIRST", "0"))
    num_cases = round(NUM_CASES * float(os.environ.get("FUZZ_SCALE", "1")))
    seeds = [int(one_seed)] if one_seed else range(first, first + num_cases)
    verdict = Verdict()
    started = time.monotonic()
    todo = list(reversed(seeds))
    while todo:
        _run_some(make_case, todo, folder, verdict)
    print(f"{make_case.__name__}: {verdict.accepted} accepted, {verdict.refused} refused, "
          f"{len(verdict.failures)} wrong, in {time.monotonic() - started:.0f} s")  # fmt: skip
    assert not verdict.failures, "\n\n".join(verdict.failures[:_MOST_SHOWN])
    if len(seeds) >= NUM_CASES:  # of a few cases all may end in one way
        assert verdict.accepted
        assert verdict.refused or not some_are_refused


def _run_some(make_case: MakeCase, todo: list[int], folder: Path, verdict: Verdict) -> None:
    """Take cases from the end of the list until there are none left or the process is lost."""
    process, connection = _start(make_case, folder)
    limit_s = _FIRST_LIMIT_S
    try:
        while todo:
            seed = todo.pop()
            connection.send(seed)
            problem = _watched(process, connection, limit_s)
            limit_s = LIMIT_S
            if problem is None:
                what, is_accepted, problem = _answer(process, connection, folder, seed)
                verdict.accepted += is_accepted and problem is None
                verdict.refused += not is_accepted and problem is None
            else:
                what = _what_it_was(folder, seed)
            if problem is not None:
                verdict.failures.append(_failure(make_case, seed, what, problem))
            elif "FUZZ_SEED" not in os.environ:
                shutil.rmtree(_folder_of(folder, seed), ignore_errors=True)
            if not process.is_alive():
                return
    finally:
        for child in _children(process):
            child.kill()
        process.kill()
        process.join()
        connection.close()


def _start(make_case: MakeCase, folder: Path) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make_case, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(process: BaseProcess, connection: Connection, folder: Path, seed: int) -> tuple[str, bool, str | None]:
    try:
        answer: tuple[str, bool, str | None] = connection.recv()
    except EOFError:
        process.join()
        return _what_it_was(folder, seed), False, f"ends the process with {process.exitcode}"
    return answer


def _watched(process: BaseProcess, connection: Connection, limit_s: float) -> str | None:
    """Wait for the answer; what the case has done instead, or None."""
    own = psutil.Process(process.pid)
    deadline = time.monotonic() + limit_s * _BUSY
    before, computed_s = own.memory_info().rss, _computing_s(own)
    try:
        while not connection.poll(_LOOK_EVERY_S):
            if own.memory_info().rss - before > MOST_BYTES and limit_s == LIMIT_S:
                return f"takes more than {MOST_BYTES >> 20} MB of memory"
            if _computing_s(own) - computed_s > limit_s or time.monotonic() > deadline:
                return f"takes longer than {limit_s:g} s"
            if not process.is_alive():
                return f"ends the process with {process.exitcode}"
    except psutil.NoSuchProcess:
        return "ends the process"
    finally:
        if process.is_alive() and not connection.poll():
            process.kill()
            process.join()
    return None


def _computing_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _children(process: BaseProcess) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _serve(make_case: MakeCase, folder: Path, connection: Connection) -> None:
    os.environ.update(HF_DATASETS_CACHE=str(folder / "datasets"), HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        connection.send(_judged(make_case, seed, _folder_of(folder, seed)))


def _folder_of(folder: Path, seed: int) -> Path:
    return folder / f"case_{seed}"


def _what_it_was(folder: Path, seed: int) -> str:
    note = _folder_of(folder, seed) / "what"
    return note.read_text() if note.is_file() else "the making of the case"


def _judged(make_case: MakeCase, seed: int, folder: Path) -> tuple[str, bool, str | None]:
    """Return what was odd, whether it was accepted, and what is wrong with the end of it."""
    folder.mkdir(parents=True)
    try:
        case = make_case(random.Random(seed), folder)
    except Exception:
        return "the making of the case", False, traceback.format_exc()
    (folder / "what").write_text(case.what, errors="backslashreplace")
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        try:
            with _written_to(printed.fileno(), errors.fileno()):
                code = case.run()
        except BaseException:
            return case.what, False, traceback.format_exc()
        texts = []
        for file in (printed, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    output = Output(code, *texts)
    problem = _problem_with(output)
    if problem is None:
        problem = case.difference(output) if code == 0 else case.refusal(output)
    return case.what, code == 0, problem


@contextmanager
def _written_to(printed: int, errors: int) -> Iterator[None]:
    """Context whose output of every kind, also of libraries and child processes, goes to two files."""
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(printed, 1)
        os.dup2(errors, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _problem_with(output: Output) -> str | None:
    for name, text in (("output", output.printed), ("errors", output.errors)):
        if odd := sorted({character for character in text if character not in "\n\t" and not character.isprintable()}):
            return f"control characters in the {name}: {odd}"
    if output.code not in (0, EXIT_BAD_INPUT):
        return f"exit code {output.code}: {output.errors}"
    if any(words in output.errors for words in _CRASHES):
        return output.errors
    if output.code == 0:
        return None
    lines = output.errors.splitlines()
    if not any("error: " in line for line in lines):
        return f"exit code {output.code} without an error: {output.errors!r}"
    if len(output.errors) > LONGEST_TEXT or max(map(len, lines)) > LONGEST_LINE:
        return f"an error of {len(output.errors):,} characters, its longest line {max(map(len, lines)):,}"
    return None


def _failure(make_case: MakeCase, seed: int, what: str, problem: str) -> str:
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    repeat = f"FUZZ_SEED={seed} python -m pytest -m slow -n 0 {test}"
    return f"{make_case.__name__}, seed {seed}: {what[:500]}: {problem[-3000:]}\nto repeat it alone: {repeat}"
