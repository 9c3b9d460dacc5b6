# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations of samples: written, read, cut, printed, and never a way into the terminal."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes, ToolUse, conversation_of, times_of
from nemo_rl_moe.runs.folder.sample_text import ShownSample, TextLimits, as_text, sample_lines
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.folder.saved_samples import (
    LONGEST_TEXT,
    MOST_TURNS,
    PROMPTS_OF_A_STEP,
    NewestConversation,
    read_samples,
    shortened,
)
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.support.grpo_fakes import trajectory

HOSTILE = "</pre><script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\r\u202eabc\u2066\x9b31m\u2028[bold]x[/bold]\udc80"
CALL = ToolUse("call00000", "add", '{"a": 1}')
TURNS = (
    ConversationTurn("user", "1+1?", 0, (0, 9)),
    ConversationTurn("assistant", "I call.", 0, (9, 20), is_sampled=True, calls=(CALL,)),
    ConversationTurn("tool", "2", 0, (20, 30), name="add", call_id="call00000"),
    ConversationTurn("assistant", "Two.", 0, (30, 34), is_sampled=True),
)
TIMES = RolloutTimes(4.0, ((0.0, 1.0), (2.0, 3.0)), ((1.0, 1.5),))


def with_turns(turns: tuple[ConversationTurn, ...] = TURNS, **changes: Any) -> Trajectory:
    return replace(trajectory(sample_id="f:1"), conversation=turns, times=TIMES, **changes)


def write(folder: Path, split: str, *found: Trajectory, num_to_save: int | None = None) -> list[str]:
    """Write samples of a step, and return what the console shows."""
    stream = io.StringIO()
    with SampleLog(folder, ConsoleLogger(total_steps=1, live="never", stream=stream), 9, num_to_save) as log:
        log.write(1, split, found)
    return stream.getvalue().split("\n")


def saved(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_line_has_the_turns_and_what_was_trained_on(tmp_path: Path) -> None:
    write(tmp_path, "train", with_turns())
    (line,) = saved(tmp_path)
    assert line["conversation"][1] == {
        "role": "assistant",
        "text": "I call.",
        "sequence": 0,
        "tokens": [9, 20],
        "sampled": True,
        "trained": True,
        "calls": [{"id": "call00000", "name": "add", "arguments": '{"a": 1}', "outcome": "ok"}],
    }
    assert [turn["trained"] for turn in line["conversation"]] == [False, True, False, True]
    assert line["conversation"][2]["call_id"] == "call00000"
    assert line["times"] == {"seconds": 4.0, "generation": [[0.0, 1.0], [2.0, 3.0]], "tools": [[1.0, 1.5]]}
    assert "left_out" not in line


def test_nothing_is_trained_on_in_a_validation_or_where_it_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "val", with_turns())
    write(tmp_path, "train", with_turns(left_out="timeout: it broke", fault=Fault.TIMEOUT, metrics={"a": 1.0}))
    for line in saved(tmp_path):
        assert [turn["sampled"] for turn in line["conversation"]] == [False, True, False, True]
        assert not any(turn["trained"] for turn in line["conversation"])
    assert saved(tmp_path)[1]["left_out"] == "timeout: it broke"


def test_a_prompt_and_a_response_are_no_conversation(tmp_path: Path) -> None:
    write(tmp_path, "train", with_turns((TURNS[0], replace(TURNS[3], tokens=(9, 12)))))
    assert not {"conversation", "times"} & saved(tmp_path)[0].keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.update(conversation="text"),
        lambda line: line.update(conversation=[["role"]]),
        lambda line: line["conversation"][0].pop("text"),
        lambda line: line["conversation"][0].update(tokens=[1]),
        lambda line: line["conversation"][0].update(sequence=-1),
        lambda line: line["conversation"][1]["calls"][0].update(outcome="<script>"),
        lambda line: line["times"].update(seconds="long"),
        lambda line: line["times"].update(generation=[[1]]),
    ],
)
def test_a_damaged_conversation_is_no_sample(change: Any, tmp_path: Path) -> None:
    write(tmp_path, "train", with_turns())
    (line,) = saved(tmp_path)
    change(line)
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    notes: list[str] = []
    assert read_samples(tmp_path, notes) == []
    assert notes == [f"{tmp_path / 'samples.jsonl'}: lines that are no samples: 1"]


def test_lines_without_conversations_are_read_as_ever(tmp_path: Path) -> None:
    old = {"step": 1, "split": "val", "sample_id": "f:1", "prompt": "q", "response": "a", "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps(old) + "\n")
    (found,) = read_samples(tmp_path, [])
    assert (found["response"], "conversation" in found) == ("a", False)
    assert NewestConversation(tmp_path).read() is None


def test_a_page_gets_long_conversations_cut_with_a_count(tmp_path: Path) -> None:
    turns = (replace(TURNS[2], text="x" * (LONGEST_TEXT + 500)),) * (MOST_TURNS + 7)
    write(tmp_path, "train", with_turns(turns))
    (found,) = shortened(read_samples(tmp_path, []), 100)
    conversation = found["conversation"]
    assert (len(conversation["turns"]), conversation["num_hidden"]) == (MOST_TURNS, 7)
    assert conversation["turns"][0]["text"] == "x" * 100
    assert conversation["turns"][0]["num_hidden"] == LONGEST_TEXT + 400


def test_one_that_is_left_out_is_among_those_of_a_page(tmp_path: Path) -> None:
    found = [replace(with_turns(), sample_id=f"f:{number}") for number in range(PROMPTS_OF_A_STEP + 2)]
    write(tmp_path, "train", *found, replace(with_turns(), sample_id="f:0", left_out="it broke"))
    assert [one.get("left_out") for one in read_samples(tmp_path, [])] == [None] * PROMPTS_OF_A_STEP + ["it broke"]


def test_one_that_is_left_out_is_shown_beside_another_of_its_prompt(tmp_path: Path) -> None:
    write(tmp_path, "train", with_turns(), with_turns(left_out="it broke"), with_turns(left_out="it broke too"))
    assert [one.get("left_out") for one in read_samples(tmp_path, [])] == [None, "it broke"]


def test_failed_ones_are_kept_beyond_the_number_that_is_saved(tmp_path: Path) -> None:
    left_out = replace(with_turns(), fault=Fault.DIED, fault_message="gone", left_out="died: gone")
    write(tmp_path, "train", with_turns(), with_turns(), left_out, num_to_save=1)
    assert [line["fault"] for line in saved(tmp_path)] == [None, "died: gone"]


def test_the_console_shows_roles_calls_results_and_times(tmp_path: Path) -> None:
    legend, head, *turns, times, _ = write(tmp_path, "val", with_turns())
    assert legend == "  conversations: * trained on, > written by the model and not trained on"
    assert head == "  wrong      f:1: reward 0, 2 responses, 1 call, 2 sampled tokens"
    assert turns == [
        "    user       1+1?",
        "  > assistant  I call.",
        '      call     add {"a": 1}  ok',
        "    tool add   2",
        "  > assistant  Two.",
    ]
    bar = "[########====....########........]"
    assert times == f"    time       {bar} 4 s: # generation 2 s, = tools 0.5 s, . waiting 1.5 s"


def shown(**changes: Any) -> ShownSample:
    values: dict[str, Any] = {"step": 1, "split": "train", "sample_id": "f:1", "prompt": "q", "response": "a"}
    return ShownSample(**values | {"reward": "1", "verdict": "right", "num_tokens": 15, "turns": TURNS} | changes)


def test_trained_tokens_are_marked_and_long_texts_are_cut_with_a_count() -> None:
    turns = (*TURNS[:1], replace(TURNS[1], is_trained=True), replace(TURNS[2], text="y\n" * 40 + "z" * 5000))
    lines = as_text(sample_lines(shown(turns=turns), TextLimits(characters=20, lines=3))).split("\n")
    assert "15 sampled tokens, 11 trained on" in lines[0]
    assert lines[2] == "  * assistant  I call."
    assert lines[-3:] == ["    tool add   y", f"{'':15}y", f"{'':15}y  [+5,075 characters]"]


def test_what_is_not_read_and_what_begins_anew_is_said() -> None:
    turns = (*TURNS[:2], replace(TURNS[2], sequence=1), replace(TURNS[2], sequence=None, tokens=(0, 0)))
    lines = as_text(sample_lines(shown(turns=turns))).split("\n")
    assert lines[4] == "    -- sequence 2, which does not continue the turns above --"
    assert lines[6] == "    tool add   2  [not read by the model]"


def test_a_left_out_sample_says_why() -> None:
    lines = as_text(sample_lines(shown(left_out="timeout: it took long", verdict="timeout: it took long"))).split("\n")
    assert lines[0].startswith("  failed     f:1: ")
    assert lines[0].endswith("(left out: timeout: it took long)")
    (line,) = sample_lines(shown(left_out="truncated", turns=()))
    assert line[0][0] == "  right      q  ->  a  (left out: truncated)"


def test_texts_cannot_steer_the_terminal_or_fake_a_turn(tmp_path: Path) -> None:
    call = ToolUse("1", HOSTILE, f'{HOSTILE}\n  * assistant  "', "wrong")
    text = f"{HOSTILE}\n  * assistant  I was trained on this\n\x1b[31m"
    turns = (*TURNS[:1], replace(TURNS[1], text=text, calls=(call,)), replace(TURNS[2], text=text, name=HOSTILE))
    found = with_turns(turns, fault=Fault.ERROR, fault_message=HOSTILE, left_out=HOSTILE)
    lines = write(tmp_path, "val", found)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("  * ") for line in lines)
    assert any("\\x1b[2J\\x1b]0;owned\\x07\\r\\u202eabc\\u2066\\x9b31m" in line for line in lines)


def test_the_newest_conversation_is_of_the_last_step(tmp_path: Path) -> None:
    newest = NewestConversation(tmp_path)
    assert newest.read() is None
    write(tmp_path, "train", with_turns(), replace(with_turns(), sample_id="f:2"))
    write(tmp_path, "val", replace(with_turns(), sample_id="f:3"))
    found = newest.read()
    assert found is not None
    assert (found.sample_id, found.turns[1].is_trained, found.times) == ("f:1", True, TIMES)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"conversation": 1}\n{"step": 2, "conversation"')
    assert newest.read() == found


def test_read_parts_have_to_be_what_is_written() -> None:
    assert times_of({"seconds": 1}) == RolloutTimes(1.0)
    assert conversation_of([]) == []
    for value in (None, {"seconds": -1}, {"seconds": float("inf")}, {"seconds": True}):
        with pytest.raises(ValueError, match="no "):
            times_of(value)
