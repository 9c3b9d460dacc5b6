# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe watch` as its user has it: in a terminal, over a run that goes on."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.routing.metrics.load_arrays import utilization
from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.functional import sft_runs
from tests.support.made_runs import make_run, random_counts
from tests.unit.runs.report.test_watch_state import CONFIG, metrics_of, sick_counts, write_step

OWN_SCREEN, OWN_SCREEN_LEFT, CURSOR_BACK = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
SEQUENCES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program in a terminal of its own.

    Args:
        command: What runs there.
        width: Characters of a line.
        height: Lines.
        variables: Of the environment, beside those of this process.
    """

    def __init__(self, command: list[str], width: int, height: int, variables: dict[str, str]):
        self._own, other = pty.openpty()
        self.resize(width, height)
        environment = {
            name: value
            for name, value in sft_runs.environment().items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        }
        environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONUTF8": "1"} | variables
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            # A shell that runs the tests in its background has interrupts ignored, and so has what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(other)
        self.output = b""

    def resize(self, width: int, height: int) -> None:
        """Change the size as a user does with the window."""
        self._height = height
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    @property
    def screen(self) -> list[str]:
        """The lines that were sampled last; none while they are being sampled."""
        sampled = self.output[: self.output.rfind(CURSOR_BACK)] if OWN_SCREEN_LEFT in self.output else self.output
        last = sampled.split(b"\x1b[H")[-1]
        lines = [line.rstrip() for line in SEQUENCES.sub(b"", last).decode(errors="replace").split("\r\n")]
        return lines if len(lines) == self._height else []

    def wait_for(self, is_so: Callable[[list[str]], bool]) -> list[str]:
        """Reads until the screen is as it should be, and returns it."""
        until = time.monotonic() + 280
        while not is_so(self.screen):
            assert time.monotonic() < until, "\n".join(self.screen)
            assert self.process.poll() is None, self.output.decode(errors="replace")
            self._read(0.2)
        return self.screen

    def end(self, number: int) -> int:
        """Sends a signal, reads the rest, and returns the exit code."""
        self.process.send_signal(number)
        while self._read(10):
            pass
        return self.process.wait(timeout=200)

    def close(self) -> None:
        """Ends what is left."""
        self.process.kill()
        self.process.wait()
        os.close(self._own)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._own], [], [], seconds)[0]:
            return False
        try:
            found = os.read(self._own, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.output += found
        return bool(found)


@contextmanager
def watching(folder: Path, width: int = 100, height: int = 40, **variables: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "watch", str(folder), "--interval", "0.1"]
    terminal = Terminal(command, width, height, variables)
    try:
        yield terminal
    finally:
        terminal.close()


def has(words: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(words in line for line in lines)


def test_follows_a_run_from_before_its_first_step_through_a_resumption(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "exp_001"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    with watching(folder) as terminal:
        terminal.wait_for(has("nothing has been written yet; waiting for the first step"))
        (folder / "run.json").unlink()
        folder.rmdir()
        make_run(folder, {}, config=CONFIG)
        counts = sick_counts()
        for step in range(1, 4):
            write_step(folder, step, metrics_of(step), counts[step - 1])
        screen = terminal.wait_for(has("expert load, step 3:"))
        assert screen[0].startswith("logs/exp_001  sft  step 3/30  2 s/step")
        assert "- no findings" in screen
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "time": 0, "metr')
        for step in range(4, 9):
            # The half of a line is completed by a new beginning, as a resumed run does.
            if step == 4:
                rewind_run_folder(folder, 3)
            write_step(folder, step, metrics_of(step), counts[step - 1])
        screen = terminal.wait_for(has("expert load, step 8:"))
        assert "- layer 1: 1 of 8 experts dead since step 5; beyond sampling noise" in screen
        assert any("   dead" in line for line in screen)
        rewind_run_folder(folder, 4)
        screen = terminal.wait_for(has("expert load, step 4:"))
        assert "step 4/30" in screen[0]
        assert "- no findings" in screen
        assert terminal.end(signal.SIGINT) == 0
        assert terminal.output.count(OWN_SCREEN) == terminal.output.count(OWN_SCREEN_LEFT) == 1
        # The last frame stays in the terminal.
        rest = terminal.output.split(OWN_SCREEN_LEFT)[1].decode()
        assert "step 4/30" in rest
        assert "Traceback" not in rest


def test_fits_itself_to_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: metrics_of(1)}, random_counts(1, 40, 128, 400), config=CONFIG)
    with watching(run, 60, 20) as terminal:
        terminal.wait_for(has("- no findings"))
        for width, height in ((60, 20), (110, 50), (44, 18)):
            terminal.resize(width, height)
            rows = terminal.wait_for(has("no findings"))
            assert max(map(len, rows)) <= width
            assert any(row.startswith("each cell: the value farthest from 1 of ") for row in rows)
        assert terminal.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert OWN_SCREEN_LEFT in terminal.output


@pytest.mark.full
def test_no_color_is_respected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: metrics_of(1)}, random_counts(1, 2, 128, 9000), config=CONFIG)
    with watching(run, NO_COLOR="1") as terminal:
        screen = terminal.wait_for(has("- no findings"))
        assert sum("......" in line for line in screen) == 2
        assert not re.search(rb"\x1b\[[0-9;]*(3[0-7]|38|4[0-7]|48)[;m]", terminal.output)
    with watching(run) as terminal:
        terminal.wait_for(has("- no findings"))
        assert b";48;2;" in terminal.output


def test_what_a_folder_holds_cannot_reach_the_terminal(tmp_path: Path) -> None:
    hostile = "[bold]\x1b]0;owned\x07\x1b[2J"
    run = make_run(
        tmp_path / f"logs{hostile}" / "exp_001",
        {1: metrics_of(1) | {hostile: 1.0}},
        random_counts(1, 2, 8, 400),
        config=CONFIG | {hostile: hostile},
        in_force={f"moe_router_force_{hostile}": hostile, "moe_router_topk": 2},
    )
    (run / "effective_moe_configuration.json").chmod(0o644)
    with watching(run, 160) as terminal:
        screen = terminal.wait_for(has("forced routing: moe_router_force_[bold]\\x1b]0;owned\\x07\\x1b[2J is "))
        assert screen[0].startswith("logs[bold]\\x1b]0;owned\\x07\\x1b[2J/exp_001")
        assert terminal.end(signal.SIGINT) == 0
        assert b"\x1b]0;owned" not in terminal.output
        assert b"\x07" not in terminal.output
        assert b"\x1b[2J" not in terminal.output.split(OWN_SCREEN)[1]


@pytest.mark.slow
def test_a_real_run_is_watched_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    num_steps, batch_size = 12, 16
    data = sft_runs.make_additions(tmp_path / "data", num_steps * batch_size, batch_size)
    only_jsonl: dict[str, Any] = dict(sft_runs.only_jsonl())
    overrides = sft_runs.settings(
        tmp_path,
        data,
        sft__max_num_steps=num_steps,
        sft__val_period=0,
        policy__train_global_batch_size=batch_size,
        policy__train_micro_batch_size=8,
        policy__megatron_cfg__expert_model_parallel_size=2,
        policy__megatron_cfg__moe_router_force_hot_rank=1,
        policy__megatron_cfg__scheduler__lr_warmup_iters=0,
        checkpointing__enabled=False,
        logger__alerts__dead_expert_steps=5,
        logger__alerts__sustained_steps=5,
        **only_jsonl,
    )
    with (tmp_path / "log").open("w") as log:
        training = subprocess.Popen(
            sft_runs.sft_command(overrides), stdout=log, stderr=log, env=sft_runs.environment(), cwd=tmp_path
        )
        try:
            until = time.monotonic() + 200
            run = tmp_path / "logs/exp_001"
            metrics = run / METRICS_FILE_NAME
            while not metrics.exists() or not metrics.stat().st_size:
                assert training.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.02)
            training.send_signal(signal.SIGSTOP)  # the run would be over before a busy machine has started the watch
            with watching(run) as terminal:
                early = terminal.wait_for(lambda lines: bool(re.search(r"step \d+/12", "\n".join(lines))))
                assert not has("all steps done")(early)
                training.send_signal(signal.SIGCONT)
                screen = terminal.wait_for(lambda lines: has("all steps done")(lines) and has("step 12:")(lines))
                assert terminal.end(signal.SIGINT) == 0
            assert training.wait(timeout=280) == 0
        finally:
            training.kill()
            training.wait()
    assert "- layer 0: 4 of 8 experts dead since step 1; beyond sampling noise (likewise layers 1, 2, 3)" in screen
    load = read_expert_load(run)
    assert load.steps[-1] == num_steps
    for layer, shares in zip(load.layers, utilization(load.counts[-1]), strict=True):
        (row,) = (line.split() for line in screen if re.match(rf" +{layer} +(dead|\d\.\d\d)", line))
        assert row[1:] == ["dead" if share == 0 else f"{share:.2f}" for share in shares]
    assert np.count_nonzero(load.counts[-1]) == len(load.layers) * 4
