# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A console that goes away, or that lacks a character, does not end a run."""

import io
import os
import subprocess
import sys

import pytest

from nemo_rl_moe.runs.loggers.console import ConsoleLogger

GONE = "warning: the console is gone ([Errno 32] Broken pipe); the run continues without it\n"


@pytest.mark.parametrize("live", ["never", "always"])
def test_a_pipe_whose_reader_has_ended(live: str, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = ConsoleLogger(3, live, stream)  # type: ignore[arg-type]
        console.message("one")
        with console.phase("two") as progress:
            progress(0.5)
        console.log_step(1, {"train/loss": 1.0})
        console.warn("three")
        console.close()
    assert capsys.readouterr().err == GONE, "said once, also when the stream is closed"


@pytest.mark.parametrize(
    ("last_line", "errors", "said", "returncode"),
    [
        pytest.param("print('more', flush=True)", subprocess.PIPE, GONE, 0, id="standard output"),
        pytest.param("sys.exit(7)", subprocess.STDOUT, None, 7, id="both outputs in one pipe"),
    ],
)
def test_outputs_of_a_process_whose_reader_has_ended(
    last_line: str, errors: int, said: str | None, returncode: int
) -> None:
    """Nor does the interpreter complain at its end."""
    code = (
        "import sys\n"
        "from nemo_rl_moe.runs.loggers.console import ConsoleLogger\n"
        "console = ConsoleLogger(3)\n"
        "sys.stdin.readline()\n"
        "for _ in range(3): console.message('x' * 100_000)\n"
        f"{last_line}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert (process.stderr and process.stderr.read()) == said
    assert process.returncode == returncode


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"l\xe4uf \u30c7 \U0001f642"), ("utf-8", "läuf デ 🙂")])
def test_a_character_that_the_console_lacks_is_shown_as_its_escape(encoding: str, shown: str) -> None:
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding=encoding)
    ConsoleLogger(3, stream=stream).message("läuf デ 🙂")
    stream.flush()
    assert content.getvalue().decode(encoding) == f"{shown}\n"


def test_a_command_prints_what_the_console_lacks() -> None:
    code = "import sys; from nemo_rl_moe import cli; sys.argv = ['nemo-rl-moe', '--version']\ntry: cli.main()\n"
    code += "except SystemExit: print('\\xe4')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == r"\xe4"
