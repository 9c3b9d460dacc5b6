# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the user sees, with and without a terminal."""

import io
import re

import pytest

from nemo_rl_moe.runs.loggers.console import ConsoleLogger, TimeLeft, clock_text, train_line, validation_line

STEP = {
    "train/loss": 1.23449,
    "train/grad_norm": 0.93,
    "train/lr": 3e-3,
    "train/moe/load_balancing_loss": 1.0123,
    "train/moe/load_balancing_loss_layer_1": 1.0,
    "timing/train/tokens_per_second": 9812.3,
}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def test_plain_line_a_step() -> None:
    stream, clock = io.StringIO(), Clock()
    console = ConsoleLogger(200, stream=stream, clock=clock)
    console.log_step(11, STEP)
    clock.now += 63 / 188
    console.log_step(12, STEP)
    console.close()
    line = "loss 1.2345  grad_norm 0.93  load_balancing_loss 1.012  lr 3.0e-03  9,812 tok/s"
    assert stream.getvalue() == f"step 11/200  {line}\nstep 12/200  {line}  eta 1:03\n"


def test_a_line_of_a_step_fits_and_keeps_the_most_important() -> None:
    rates = {"train/grad_norm": 1.234, "train/lr": 3e-6, "train/moe/load_balancing_loss": 1.012}
    metrics = {"train/loss": 0.0123, "train/reward": 0.6641, "train/accuracy": 0.6641, **rates}
    metrics |= {"timing/train/tokens_per_second": 12_345.0, "train/refit/logprob_gap": 2e-6}
    begin = "step 1234/2000  loss 0.0123  reward 0.6641"
    line = train_line(1234, 2000, metrics, 3600.0)
    assert line == f"{begin}  grad_norm 1.23  load_balancing_loss 1.012  12,345 tok/s  eta 1:00:00"
    graded = train_line(1234, 2000, metrics | {"train/accuracy": 0.5}, 3600.0)
    assert graded == f"{begin}  accuracy 0.5000  grad_norm 1.23  12,345 tok/s  eta 1:00:00"
    idle = {"train/rollouts/idle_share/trainer": 0.0037, "train/rollouts/idle_share/engines": 0.4666}
    ahead = train_line(1234, 2000, metrics | idle | {"train/staleness/mean": 1.25, "train/staleness/max": 2.0}, 3600.0)
    assert ahead == f"{begin}  staleness 1.2  trainer_idle 0%  engines_idle 47%  12,345 tok/s  eta 1:00:00"
    assert max(map(len, (line, graded, ahead))) <= 120


def test_a_step_reports_of_its_critic_and_its_teacher() -> None:
    critic = {"train/critic/value_loss": 0.125, "train/critic/explained_variance": -0.25, "train/critic/grad_norm": 2.0}
    metrics = {"train/loss": 0.5, "train/grad_norm": 3.0, **critic}
    expected = "step 1/2  loss 0.5000  value_loss 0.1250  explained_variance -0.250  grad_norm 3"
    assert train_line(1, 2, metrics, None) == expected
    alone = "step 1/2  value_loss 0.1250  explained_variance -0.250"
    assert train_line(1, 2, critic, None) == alone, "of a step in which the policy does not train"
    assert train_line(1, 2, {"train/teacher_kl": 0.75}, None) == "step 1/2  teacher_kl 0.7500"


def test_validation_has_its_own_line_after_the_step() -> None:
    stream = io.StringIO()
    console = ConsoleLogger(200, stream=stream)
    console.log_step(0, {"val/loss": 6.1, "val/accuracy": 0.002})
    console.log_step(50, {"train/loss": 0.5, "val/loss": 0.81, "val/accuracy": 0.74})
    console.log_step(60, {"val/reward": 0.28, "val/accuracy": 0.0})
    console.log_step(61, {"timing/train/step_seconds": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 0  validation: loss 6.1  accuracy 0.002",
        "step 50/200  loss 0.5000",
        "step 50  validation: loss 0.81  accuracy 0.74",
        "step 60  validation: reward 0.28  accuracy 0",
    ]


def test_long_lines_are_not_wrapped_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    console = ConsoleLogger(1, stream=stream)
    console.log_step(1, STEP)
    console.message("word " * 50)
    assert len(stream.getvalue().splitlines()) == 2


def test_text_from_elsewhere_is_shown_as_it_is() -> None:
    for live in ("never", "always"):
        stream = io.StringIO()
        console = ConsoleLogger(1, live, stream)
        console.message("[bold]x[/bold] [/nope] :smile: \x1b[2J\r end")
        console.warn("[red]disk[/red]")
        with console.phase("[green]load[/green]"):
            pass
        console.close()
        text = ESCAPES.sub("", stream.getvalue())
        assert r"[bold]x[/bold] [/nope] :smile: \x1b[2J\r end" in text
        assert "warning: [red]disk[/red]\n" in text
        assert "[green]load[/green] ..." in text
        assert "\x1b[2J" not in stream.getvalue()


def test_phase_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    console = ConsoleLogger(1, stream=stream, clock=clock)
    with console.phase("starting workers"):
        clock.now += 3.2
    with pytest.raises(ValueError, match="x"), console.phase("loading"):
        clock.now += 1
        raise ValueError("x")
    assert stream.getvalue().splitlines() == [
        "starting workers ...",
        "starting workers: done in 3.2 s",
        "loading ...",
        "loading: failed after 1.0 s",
    ]


def test_live_line_renews_itself_and_leaves_the_last_step() -> None:
    stream = io.StringIO()
    console = ConsoleLogger(3, "always", stream)
    with console.phase("starting workers"):
        pass
    for step in (1, 2, 3):
        console.log_step(
            step, {"train/loss": float(step), "train/reward": 0.5} | ({"val/loss": 9.0} if step == 2 else {})
        )
    console.message("saved")
    console.close()
    raw = stream.getvalue()
    assert "\x1b[2K" in raw  # the live line is erased and drawn again
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") >= 1  # the cursor comes back
    lines = [line.strip() for line in ESCAPES.sub("", raw).replace("\r", "\n").splitlines()]
    standing = [line for line in lines if line and "━" not in line and not line.endswith("...")]
    assert re.match(r"starting workers: done in \d", standing[0])
    assert standing[1:] == ["step 2  validation: loss 9", "saved", "step 3/3  loss 3.0000  reward 0.5000  eta 0:00"]
    assert all(any(f"step {step}/3" in line and "━" in line for line in lines) for step in (1, 2, 3))


def test_live_line_on_a_narrow_terminal_still_ends_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream, clock = io.StringIO(), Clock()
    console = ConsoleLogger(10, "always", stream, clock)
    console.log_step(1, STEP)
    clock.now += 7
    console.log_step(2, STEP)
    drawn = ESCAPES.sub("", stream.getvalue())
    console.close()
    assert "eta 0:56" in re.sub(r"\s+", " ", drawn)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "is_live"),
    [(io.StringIO(), "xterm", False), (Terminal(), "xterm", True), (Terminal(), "dumb", False)],
)
def test_auto_is_live_in_a_terminal_that_can_renew_a_line(
    stream: io.StringIO, term: str, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    console = ConsoleLogger(2, stream=stream)
    console.log_step(1, {"train/loss": 1.0})
    console.close()
    assert ("\x1b[2K" in stream.getvalue()) is is_live
    assert is_live or stream.getvalue() == "step 1/2  loss 1.0000\n"


def test_values_that_are_not_finite_are_shown() -> None:
    metrics = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/epoch": 2.0}
    assert train_line(1, 2, metrics, None) == "step 1/2  epoch 2  loss nan  grad_norm inf"
    assert validation_line(1, metrics) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (62.6, "1:03"), (59.7, "1:00"), (7500, "2:05:00")])
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_time_left_forgets_a_slow_start() -> None:
    left = TimeLeft(100)
    assert left.update(1, 0.0) is None
    assert left.update(2, 50.0) == 98 * 50
    for step in range(3, 30):
        estimate = left.update(step, 50.0 + step)
    assert estimate == pytest.approx(71.0)
