# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that a study or a demo starts and waits for, with requests to stop passed on."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.distributed.run_process import as_known, signal_when_parent_ends, stop_signals
from nemo_rl_moe.errors import exit_code_of_signal

INTERRUPTED = exit_code_of_signal(signal.SIGINT)


def run_programs(commands: Sequence[Sequence[str]]) -> int:
    """Run programs in parallel until the last one has ended.

    Requests to stop are passed on. The programs may take all the time that they need, for example for a checkpoint. If
    this process is killed, they get SIGTERM.

    Returns:
        The worst exit code: 128 plus the signal's number for a program that a signal ended, and for a request.
    """
    programs: list[subprocess.Popen[bytes]] = []
    requests: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        requests.append(number)
        for program in programs:
            program.send_signal(number)  # a run counts this and the terminal's signal as one request

    awaited = stop_signals()
    # Signals are blocked until all programs have started, so that each gets them.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    former = {number: signal.signal(number, pass_on) for number in awaited}

    def prepare() -> None:
        signal_when_parent_ends(signal.SIGTERM)
        for number in awaited:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)

    try:
        programs += [subprocess.Popen(command, preexec_fn=prepare) for command in commands]
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        codes = [program.wait() for program in programs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        for number, handler in former.items():
            signal.signal(number, handler)
    return max(
        *(code if code >= 0 else 128 - code for code in codes),
        *(exit_code_of_signal(as_known(number)) for number in requests[:1]),
        0,
    )


def run_stage(name: str, words: Sequence[str], result: Path | None = None) -> None:
    """Run a Python program as a stage of a demo, whose output the user sees.

    Args:
        name: Name of the demo, which begins its lines.
        words: Arguments of `python`.
        result: File that a complete stage writes. Needed since a run that was asked to stop ends without an error.

    Raises:
        SystemExit: The stage failed, or the demo or the stage was stopped. With the exit code.
    """
    shown = shlex.join(words[1:]).replace("nemo_rl_moe.cli", "nemo-rl-moe", 1)
    print(f"[{name}] {shown}", flush=True)
    code = run_programs([[sys.executable, *words]])
    if code == 0 and result is not None and not result.is_file():
        code = INTERRUPTED
    if code in (INTERRUPTED, exit_code_of_signal(signal.SIGTERM)):
        print(f"[{name}] stopped; the same command continues", file=sys.stderr, flush=True)
    if code:
        raise SystemExit(code)
