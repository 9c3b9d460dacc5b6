# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can cause, the exit code of each, and how an error is printed."""

import json
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nemo_rl_moe.masking import masked_text

EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 1
EXIT_DIVERGED = 3
EXIT_NOT_CHECKED = 4
EXIT_SIGNAL_BASE = 128


def exit_code_of_signal(number: int) -> int:
    """Return the exit code of a program that a signal has ended, as shells have it: 130 for SIGINT, 143 for SIGTERM."""
    return EXIT_SIGNAL_BASE + number


class UserError(Exception):
    """An error in the user's input; shown without a stack trace, exit code 2.

    Args:
        problems: One self-contained line each.

    Attributes:
        is_reported: They have been printed.
    """

    exit_code = EXIT_BAD_INPUT
    is_reported = False

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(printable("\n".join(self.problems)))  # whoever prints it: problems quote strangers' files


class ConfigurationError(UserError):
    """A key, a type, a value or a combination in the configuration is wrong."""


class DataError(UserError):
    """A data file is missing, or one of its lines cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is damaged, is refused, or does not fit the run."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are not what was written; an older one may be whole."""


class DamageFoundError(UserError):
    """Files that were looked at are not what was written. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class RoutesAuditError(UserError):
    """Routed experts that were looked at cannot be right. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class NotCheckedError(UserError):
    """An audit could not make a comparison that it was required to make. Exit code 4."""

    exit_code = EXIT_NOT_CHECKED


class CheckpointSaveError(CheckpointError):
    """The last checkpoint of a run could not be saved. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class WorkerDiedError(RuntimeError):
    """A worker process ended or raised; carries the worker's own error text. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class UserCodeError(RuntimeError):
    """Code that the configuration names raised in a run, or returned what cannot be used. Exit code 1.

    Args:
        problem: One line with the key, its value, the error, and the line of the user's file.
        trace: The traceback, which is shown below.
    """

    exit_code = EXIT_RUN_FAILED

    def __init__(self, problem: str, trace: str = ""):
        super().__init__(f"{problem}\n{trace}".rstrip())
        self.problem, self.trace = problem, trace


class RewardWorkersFailedError(WorkerDiedError):
    """The reward workers could score no response; carries the error text of the first. Exit code 1."""


class WeightSyncError(RuntimeError):
    """Weights did not arrive whole at a generation engine. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class ReceiverLostError(WeightSyncError):
    """A process that received weights died or froze; what the others have is a mixture. Exit code 1."""


class GenerationError(RuntimeError):
    """A generation engine cannot start, or fails again and again. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class RoutingAnomalyError(RuntimeError):
    """Routed experts that training has replayed are not those of their layers, tokens or sequences. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class TrainingDivergedError(RuntimeError):
    """Too many consecutive updates had a NaN or infinite loss or gradient. Exit code 3.

    Args:
        message: What happened, and where a run can go on.
        sample_ids: Samples of the last step.
    """

    exit_code = EXIT_DIVERGED

    def __init__(self, message: str, sample_ids: Sequence[str] = ()):
        super().__init__(message)
        self.sample_ids = list(sample_ids)


def printable(text: str, kept: str = "\n\t") -> str:
    """Make a text printable: control characters are written out, passwords in addresses are masked.

    Args:
        kept: Characters that stay.
    """
    text = masked_text(text)
    if text.isprintable():
        return text
    return "".join(c if c in kept or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


LONGEST_REPORTED = 3_000
"""Characters of a line of an error that are shown: keys, names and values may be as long as a file."""


def report_error(problem: object) -> None:
    """Print an error that ends the program to standard error as `error: ...`."""
    lines = [_cut(line) for line in printable(str(problem)).split("\n")]
    print("error: " + "\n".join(lines), file=sys.stderr, flush=True)


def report_problems(error: UserError) -> None:
    """Print the problems of an error, unless they have been printed."""
    if not error.is_reported:
        for problem in error.problems:
            report_error(problem)
    error.is_reported = True


def _cut(line: str) -> str:
    if len(line) <= LONGEST_REPORTED:
        return line
    return f"{line[: LONGEST_REPORTED // 2]} [... {len(line):,} characters ...] {line[-LONGEST_REPORTED // 4 :]}"


def escape_log_messages() -> None:
    """Make library messages in `logging` pass `printable`: they quote untrusted files."""
    make = logging.getLogRecordFactory()
    if getattr(make, "escapes", False):
        return

    def make_printable(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        with suppress(Exception):  # the library's own mistake; `logging` reports it
            record.msg, record.args = _cut(printable(record.getMessage())), ()
        return record

    make_printable.escapes = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_printable)


LONGEST_LINE = 300
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def counted(number: int, noun: str, zero: str = "0") -> str:
    """Return a number with its noun: `1 example`, `2,000 examples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if number else f"{zero} {noun}s"


def json_problem(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a JSON text, for words that name the place: some of Python's end in "at" already."""
    return error.msg.removesuffix(" at").removesuffix(": ")


def without_addresses(text: str) -> str:
    """Return a text whose objects have no addresses: `<function score>`."""
    return _ADDRESS.sub("", text)


def encodable(text: str) -> str:
    """Return a text that can be written in UTF-8: half a surrogate pair becomes its escape, such as `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Return type and first line of an error of a library, whose text may itself be broken."""
    name = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return name
    return without_addresses(f"{name}: {lines[0]}")[:LONGEST_LINE] if lines else name
