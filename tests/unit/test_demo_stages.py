# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Demos that are asked to stop: their stages end in order, nothing of them is left, and no other stage begins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from examples.real_demo.results import read_run
from examples.studies.programs import run_programs
from nemo_rl_moe.errors import DataError
from tests.conftest import REPOSITORY_ROOT

STAGE = """\
#!{python}
import os, signal, sys, time
from pathlib import Path
folder = Path({folder!r})
def stop(number, frame):
    time.sleep(1.5)  # longer than subprocess.call waits after an interrupt
    (folder / "checkpoint").write_text("")
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, stop)
with (folder / "started").open("a") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep(60)
"""
# A hangup is not ignored, as it is if the tests run under nohup.
DEMO = """\
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.executable = sys.argv[1]
from {module} import main
sys.exit(main(sys.argv[2:]))
"""
DEMOS = ("real_demo", "tools_demo")


class Demo:
    """A demo in a session of its own, whose stages are a program that takes its time to stop."""

    def __init__(self, name: str, folder: Path):
        stage = folder / "stage"
        stage.write_text(STAGE.format(python=sys.executable, folder=str(folder)))
        stage.chmod(0o755)
        words = ["--output", str(folder / "demo")]
        if name == "tools_demo":
            (folder / "data").mkdir()
            (folder / "data" / "manifest.json").write_text("{}")
            words += ["--data", str(folder / "data")]
        code = DEMO.format(module=f"examples.{name}.__main__")
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(stage), *words],
            cwd=REPOSITORY_ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stages(self) -> list[int]:
        """Wait for the first stage; return the ids of all that have begun."""
        path = self._folder / "started"
        while not path.exists() or not path.read_text():
            assert self.process.poll() is None
            time.sleep(0.05)
        return [int(line) for line in path.read_text().split()]

    def end(self) -> tuple[int, str]:
        """Return the exit code, and the error output."""
        _, printed = self.process.communicate(timeout=60)
        return self.process.returncode, printed


@pytest.fixture(params=DEMOS)
def demo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Demo]:
    running = Demo(request.param, tmp_path)
    yield running
    for pid in [running.process.pid, *running.stages()]:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def to_all(demo: Demo, number: int) -> None:
    os.killpg(demo.process.pid, number)  # as the terminal does


def to_demo(demo: Demo, number: int) -> None:
    os.kill(demo.process.pid, number)


def to_stage(demo: Demo, number: int) -> None:
    os.kill(demo.stages()[0], number)


@pytest.mark.parametrize(
    ("send", "number", "expected"),
    [
        (to_all, signal.SIGINT, 130),
        (to_demo, signal.SIGINT, 130),
        (to_demo, signal.SIGTERM, 143),
        (to_all, signal.SIGHUP, 143),
        (to_stage, signal.SIGTERM, 130),
    ],
)
def test_stopped_stage_writes_its_checkpoint_and_is_the_last(
    demo: Demo, send: Callable[[Demo, int], None], number: int, expected: int, tmp_path: Path
) -> None:
    demo.stages()
    send(demo, number)
    code, printed = demo.end()
    assert (tmp_path / "checkpoint").is_file()
    (stage,) = demo.stages()
    assert not psutil.pid_exists(stage)
    assert code == expected, printed
    assert len(printed.splitlines()) == 1, printed
    assert "the same command continues" in printed


def test_killed_demo_leaves_no_stage(demo: Demo, tmp_path: Path) -> None:
    (stage,) = demo.stages()
    demo.process.kill()
    while psutil.pid_exists(stage):
        time.sleep(0.05)
    assert (tmp_path / "checkpoint").is_file()


def test_worst_exit_code_of_programs_counts() -> None:
    def ends(how: str) -> list[str]:
        return [sys.executable, "-c", f"import os; {how}"]

    assert run_programs([ends("os._exit(0)"), ends("os._exit(0)")]) == 0
    assert run_programs([ends("os._exit(0)"), ends("os._exit(3)"), ends("os._exit(2)")]) == 3
    assert run_programs([ends("os.kill(os.getpid(), 9)"), ends("os._exit(1)")]) == 137


@pytest.mark.parametrize("name", DEMOS)
def test_complete_run_without_its_logs_is_an_error_without_a_traceback(name: str, tmp_path: Path) -> None:
    for run in ("sft-0", "grpo-0", "tool-0", "no_tool-0"):
        (tmp_path / "demo" / run / "final").mkdir(parents=True)
        (tmp_path / "demo" / run / "final" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    words = [sys.executable, "-m", f"examples.{name}", "--output", str(tmp_path / "demo")]
    words += ["--data", str(tmp_path / "data")] if name == "tools_demo" else []
    done = subprocess.run(words, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no samples of a run of this demo" in done.stderr


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples\.jsonl: no samples"):
        read_run(tmp_path / "none")
