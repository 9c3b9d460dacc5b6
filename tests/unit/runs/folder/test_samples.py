# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses in the run's folder and on the console."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.support.grpo_fakes import trajectory


class Log:
    def __init__(self, folder: Path, num_to_print: int = 9, num_to_save: int | None = None):
        self._folder, self._stream = folder, io.StringIO()
        console = ConsoleLogger(total_steps=1, live="never", stream=self._stream)
        self.log = SampleLog(folder, console, num_to_print, num_to_save)

    @property
    def saved(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "samples.jsonl").read_text("utf-8").splitlines()]

    @property
    def printed(self) -> list[str]:
        return self._stream.getvalue().splitlines()


def of_prompts(count: int, responses: int) -> list[Trajectory]:
    return [
        trajectory(sample_id=f"s{prompt}", prompt_text=f"q{prompt}", text=f"a{prompt}.{response}")
        for prompt in range(count)
        for response in range(responses)
    ]


def test_what_is_saved(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.log.write(
        3,
        "train",
        [
            trajectory(
                [10, 11], [5, 6, 1], reward=1.5, is_correct=True, text="606", sample_id="f:1", prompt_text="228+378="
            ),
            trajectory(is_truncated=True, fault=Fault.TIMEOUT, text="a\nb"),
            trajectory(reward=1.25, rewards={"accuracy": 1.0, "format": 0.5}),
        ],
    )
    first, second, third = log.saved
    assert first == {
        "step": 3,
        "split": "train",
        "sample_id": "f:1",
        "prompt": "228+378=",
        "response": "606",
        "num_tokens": 3,
        "is_truncated": False,
        "reward": 1.5,
        "is_correct": True,
        "fault": None,
        "weight_version": 0,
    }
    assert (second["is_truncated"], second["fault"], second["response"]) == (True, "timeout: it broke", "a\nb")
    assert (third["reward"], third["rewards"]) == (1.25, {"accuracy": 1.0, "format": 0.5})


def test_steps_follow_each_other_and_can_be_read_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with log.log:
        for step, split in ((0, "val"), (1, "train"), (1, "val")):
            log.log.write(step, split, of_prompts(1, 1))
            assert (log.saved[-1]["step"], log.saved[-1]["split"]) == (step, split)
    assert len(log.saved) == 3


@pytest.mark.parametrize(("limit", "expected"), [(None, 6), (0, 0), (4, 4), (99, 6)])
def test_how_many_are_saved_of_each_step(limit: int | None, expected: int, tmp_path: Path) -> None:
    log = Log(tmp_path, num_to_save=limit)
    for split in ("train", "val"):
        log.log.write(1, split, of_prompts(3, 2))
    assert [record["split"] for record in log.saved] == ["train"] * expected + ["val"] * expected


@pytest.mark.parametrize("text", ["\u2028 \x85 \x1b[2J", 'quote " and \\', "emoji \U0001f600", "line\r\nline", ""])
def test_any_text_stays_one_line_and_comes_back(text: str, tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.log.write(1, "val", [trajectory(text=text, prompt_text=text)])
    assert len((tmp_path / "samples.jsonl").read_bytes().split(b"\n")) == 2
    (record,) = log.saved
    assert record["response"] == record["prompt"] == text
    assert len(log.printed) == 1


@pytest.mark.parametrize("number", [0, 2])
def test_validations_print_one_response_to_each_of_the_first_prompts(tmp_path: Path, number: int) -> None:
    log = Log(tmp_path, num_to_print=number)
    log.log.write(1, "val", of_prompts(3, 4))
    assert log.printed == ["  wrong      q0  ->  a0.0", "  wrong      q1  ->  a1.0"][:number]
    log.log.write(2, "train", of_prompts(3, 4))
    assert len(log.printed) == number, "training steps print nothing"


def test_verdicts(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.log.write(
        1,
        "val",
        [
            trajectory(sample_id="a", is_correct=True, is_truncated=True),
            trajectory(sample_id="b", is_truncated=True),
            trajectory(sample_id="c", reward=0.5),
        ],
    )
    assert log.printed == [f"  {verdict:11}prompt  ->  text" for verdict in ("right", "truncated", "wrong")]


def test_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.log.write(1, "val", [trajectory(prompt_text="a\nb", text="\x1b[31mred\r[bold]x[/bold]")])
    assert log.printed == ["  wrong      a\\nb  ->  \\x1b[31mred\\r[bold]x[/bold]"]


def test_long_texts_are_cut_on_the_console_alone(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.log.write(1, "val", [trajectory(text="x" * 401, prompt_text="y" * 400)])
    assert log.printed == [f"  wrong      {'y' * 400}  ->  {'x' * 400} [...]"]
    assert log.saved[0]["response"] == "x" * 401


def test_a_full_disk_warns_once_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    log = Log(tmp_path)
    with log.log:
        for step in range(3):
            log.log.write(step, "val", of_prompts(1, 1))
    warnings = [line for line in log.printed if "samples.jsonl" in line]
    assert warnings[1:] == ["warning: samples.jsonl lacks 3 lines that could not be written"]
    assert "cannot be written, its lines are kept until it can be: " in warnings[0]
    assert log.printed.count("  wrong      q0  ->  a0.0") == 3
