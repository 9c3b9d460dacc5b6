# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause, their exit codes, and how they are printed."""

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
    """Return the exit code by which a shell reports that a signal ended a program: 130 for SIGINT, 143 for SIGTERM."""
    return EXIT_SIGNAL_BASE + number


class UserError(Exception):
    """An error in the user's input, shown without a stack trace. Exit code 2.

    Args:
        problems: A line for each problem. Each line is clear without the others.

    Attributes:
        is_reported: Whether the problems have been printed.
    """

    exit_code = EXIT_BAD_INPUT
    is_reported = False

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(printable("\n".join(self.problems)))  # because problems quote untrusted files


class ConfigurationError(UserError):
    """A key, a type, a value or a combination in the configuration is wrong."""


class DataError(UserError):
    """A data file is missing, or one of its lines cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is damaged, not safe to load, or does not fit the run."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint have changed since they were written. An older checkpoint may be intact."""


class DamageFoundError(UserError):
    """`nemo-rl-moe verify` found files that have changed since they were written. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class RoutesAuditError(UserError):
    """`nemo-rl-moe audit` found routes that cannot be right. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class NotCheckedError(UserError):
    """An audit could not make a required comparison. Exit code 4."""

    exit_code = EXIT_NOT_CHECKED


class CheckpointSaveError(CheckpointError):
    """The last checkpoint of a run could not be saved. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class WorkerDiedError(RuntimeError):
    """A worker process ended or raised. The text contains the worker's error. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class UserCodeError(RuntimeError):
    """The user's code raised in a run, or returned an invalid value. Exit code 1.

    Args:
        problem: One line with the key, its value, the error, and the line of the user's file.
        trace: The traceback, shown below the problem.
    """

    exit_code = EXIT_RUN_FAILED

    def __init__(self, problem: str, trace: str = ""):
        super().__init__(f"{problem}\n{trace}".rstrip())
        self.problem, self.trace = problem, trace


class RewardWorkersFailedError(WorkerDiedError):
    """The reward workers could not score any response. The text contains the first worker's error. Exit code 1."""


class WeightSyncError(RuntimeError):
    """A generation engine did not receive all weights. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class ReceiverLostError(WeightSyncError):
    """A process died or froze while it received weights. The other processes have old and new weights mixed. Exit code
    1."""


class GenerationError(RuntimeError):
    """A generation engine cannot start, or fails repeatedly. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class RoutingAnomalyError(RuntimeError):
    """Training replayed experts that were captured for other layers, tokens or sequences. Exit code 1."""

    exit_code = EXIT_RUN_FAILED


class TrainingDivergedError(RuntimeError):
    """Too many consecutive updates had a NaN or infinite loss or gradient. Exit code 3.

    Args:
        message: Description, with the checkpoint from which a run can continue.
        sample_ids: Ids of the samples of the last step.
    """

    exit_code = EXIT_DIVERGED

    def __init__(self, message: str, sample_ids: Sequence[str] = ()):
        super().__init__(message)
        self.sample_ids = list(sample_ids)


def printable(text: str, kept: str = "\n\t") -> str:
    """Escape the control characters of a text, except `kept`, and mask passwords in URLs."""
    text = masked_text(text)
    if text.isprintable():
        return text
    return "".join(c if c in kept or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


LONGEST_REPORTED = 3_000
"""Maximum number of characters of an error line that are shown, since keys, names and values may be as long as a
file."""


def report_error(problem: object) -> None:
    """Print an error that ends the program as `error: ...` to standard error."""
    lines = [_cut(line) for line in printable(str(problem)).split("\n")]
    print("error: " + "\n".join(lines), file=sys.stderr, flush=True)


def report_problems(error: UserError) -> None:
    """Print the problems of an error, unless they have been printed before."""
    if not error.is_reported:
        for problem in error.problems:
            report_error(problem)
    error.is_reported = True


def _cut(line: str) -> str:
    if len(line) <= LONGEST_REPORTED:
        return line
    return f"{line[: LONGEST_REPORTED // 2]} [... {len(line):,} characters ...] {line[-LONGEST_REPORTED // 4 :]}"


def escape_log_messages() -> None:
    """From now on, apply `printable` to all messages of `logging`, since libraries quote untrusted files."""
    make = logging.getLogRecordFactory()
    if getattr(make, "escapes", False):
        return

    def make_printable(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        with suppress(Exception):  # `logging` itself reports such a mistake of the library
            record.msg, record.args = _cut(printable(record.getMessage())), ()
        return record

    make_printable.escapes = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_printable)


LONGEST_LINE = 300
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def counted(number: int, noun: str, zero: str = "0") -> str:
    """Return a number with its noun, such as `1 example` or `2,000 examples`. `zero` replaces the number 0."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if number else f"{zero} {noun}s"


def json_problem(error: json.JSONDecodeError) -> str:
    """Return Python's message about a JSON text, without a final "at", so that callers can append the position."""
    return error.msg.removesuffix(" at").removesuffix(": ")


def without_addresses(text: str) -> str:
    """Return a text without the memory addresses of objects, such as ` at 0x7f12` in `<function score at 0x7f12>`."""
    return _ADDRESS.sub("", text)


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode. Half of a surrogate pair is escaped, such as `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Return type and first line of a library's error, or only the type if its `str` raises."""
    name = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return name
    return without_addresses(f"{name}: {lines[0]}")[:LONGEST_LINE] if lines else name
