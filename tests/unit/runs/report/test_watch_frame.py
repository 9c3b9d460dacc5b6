# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.routing.findings.tracker import Finding
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes, ToolUse
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.run_data import RunData
from nemo_rl_moe.runs.folder.sample_text import ShownSample
from nemo_rl_moe.runs.report.run_findings import Episodes
from nemo_rl_moe.runs.report.watch_frame import Room, finding_lines, frame, packed, status
from nemo_rl_moe.runs.report.watch_state import WatchedRun

HOSTILE = "[bold red]\x1b[2J\x1b]0;owned\x07\r\n\u202e[/] :boom: \udc80"
PLAIN = Room(width=100, height=None, in_color=False, is_unicode=True)


def finding(text: str, kind: Any = "imbalance", layer: int | None = 0, is_over: bool = False) -> Finding:
    return Finding(kind, layer, 3, 9, is_over, text)


def watched(planned: int | None = 40, **changes: Any) -> WatchedRun:
    """A run at step 4 of some, the last record of which was written at 1008."""
    described = RunData(Path("/logs/sft/exp_007"), {}, None, config={"sft": {"max_num_steps": planned}})
    run = WatchedRun(
        described,
        step=4,
        first_time=1000.0,
        last_time=1008.0,
        tokens_per_second=12345.6,
        series={
            "train/grad_norm": [(1, 0.5), (2, 10.0)],
            "train/loss": [(1, 4.0), (2, 2.0), (3, math.nan), (4, 0.5)],
            "train/moe/cv_excess_mean": [(4, 0.25)],
        },
        load=ExpertLoadHistory(np.array([4]), np.arange(2), np.array([[[10, 30], [20, 20]]])),
        recent=deque([(2, 1002.0), (3, 1005.0), (4, 1008.0)]),
    )
    return replace(run, **changes)


def text_of(run: WatchedRun, now: float = 1009.0, room: Room = PLAIN) -> list[str]:
    return [line.plain for line in frame(run, now, room)]


def test_an_asynchronous_run_shows_staleness_and_who_waits() -> None:
    shares = {"train/staleness/mean": 1.5, "train/rollouts/idle_share/trainer": 0.25}
    lines = text_of(watched(series={key: [(4, value)] for key, value in shares.items()}))
    assert [line.split()[0] for line in lines if line.endswith(("1.5 to 1.5", "0.25 to 0.25"))] == [
        "staleness",
        "waiting",
    ]


def test_a_frame() -> None:
    assert text_of(watched(episodes=[Episodes(finding("layer 0: uneven"), 1, 3)])) == [
        "sft/exp_007  sft  step 4/40  3 s/step  training 12,346 tok/s  elapsed 0:08  eta 1:48  writing",
        "",
        f"loss      █▄!▁{' ' * 52}       0.5  0.5 to 4",
        f"cv excess ▅{' ' * 55}      0.25  0.25 to 0.25",
        f"grad norm ▁█{' ' * 54}        10  0.5 to 10",
        "",
        "expert load, step 4: layers down, experts 0-1 across",
        "  0   0.50   1.50",
        "  1   1.00   1.00",
        "dead: 0 of 4; busiest: 1.50 x fair, layer 0 expert 1",
        "",
        "- layer 0: uneven",
    ]


def test_routing_has_a_line() -> None:
    routing = {"train/moe/routing/agreement": 1.0, "train/moe/routing/live_agreement": 0.99512}
    (line,) = [line for line in text_of(watched(routing=routing)) if line.startswith("routing")]
    assert line == "routing   agreement 1.0000, by itself 0.9951, no wrong routes"
    (line,) = [line for line in text_of(watched(routing=routing, num_wrong_steps=2)) if line.startswith("routing")]
    assert line.endswith(", wrong routes in 2 steps")
    assert not any(line.startswith("routing") for line in text_of(watched()))


def test_a_narrow_frame_without_findings() -> None:
    lines = text_of(watched(load=None), room=replace(PLAIN, width=60))
    assert lines == [
        "sft/exp_007  sft  step 4/40  3 s/step  training 12,346 tok/s",
        "elapsed 0:08  eta 1:48  writing",
        "",
        f"loss      █▄!▁{' ' * 36}       0.5",
        f"cv excess ▅{' ' * 39}      0.25",
        f"grad norm ▁█{' ' * 38}        10",
        "",
        "- no findings",
    ]


def test_nothing_written_yet() -> None:
    lines = text_of(WatchedRun(RunData(Path("/logs/sft/exp_001"), {}, None)))
    assert lines == ["sft/exp_001", "nothing has been written yet; waiting for the first step"]


@pytest.mark.parametrize(
    ("planned", "age", "expected"),
    [
        (40, 0, "writing"),
        (40, -5, "writing"),  # a clock that is ahead
        (40, 30, "writing"),
        (40, 31, "quiet for 0:31"),
        (None, 3700, "quiet for 1:01:40"),
        (4, 0, "all steps done"),
    ],
)
def test_whether_it_still_writes(planned: int | None, age: float, expected: str) -> None:
    assert status(watched(planned), 1008.0 + age) == expected


def test_slow_steps_are_not_quiet() -> None:
    slow = watched(recent=deque([(3, 100.0), (4, 1008.0)]))
    assert status(slow, 1008.0 + 9000) == "writing"


def test_a_step_beyond_the_plan_has_no_total() -> None:
    assert "step 4  " in text_of(watched(planned=3))[0]


def test_findings_of_a_kind_share_a_line() -> None:
    episodes = [Episodes(finding(f"layer {layer}: uneven", layer=layer), 1, 3) for layer in range(12)]
    episodes[0] = replace(episodes[0], number=3, first_step=2)
    over = Episodes(finding("layer 5: dead", "dead_experts", 5, is_over=True), 1, 3)
    assert finding_lines([*episodes, over]) == [
        "layer 0: uneven (3 times since step 2) (likewise layers 1, 2, 3, 4, 5, 6, 7, 8, 3 more)",
        "over: layer 5: dead, until step 9",
    ]
    assert finding_lines(episodes[1:3]) == ["layer 1: uneven (likewise layer 2)"]


def test_packed() -> None:
    assert packed(["abc", "de", "f", "ghij"], 7) == ["abc  de", "f  ghij"]
    assert packed(["longer than that", "a"], 7) == ["longer than that", "a"]
    assert packed([], 7) == []


def test_text_from_a_run_is_shown_and_nothing_else() -> None:
    described = RunData(Path(f"/logs/{HOSTILE.replace('/', '')}"), {}, None, config={"sft": {}})
    run = watched(described=described, notes=[HOSTILE], episodes=[Episodes(finding(HOSTILE), 1, 3)])
    lines = text_of(run, room=replace(PLAIN, width=200))
    assert all(line.isprintable() for line in lines)
    shown = "[bold red]\\x1b[2J\\x1b]0;owned\\x07\\r\\n\\u202e[/] :boom: \\udc80"
    assert f"- {shown}" in lines
    assert f"- note: {shown}" in lines
    assert shown.replace("/", "") in lines[0]


@given(
    st.integers(1, 30), st.integers(1, 140), st.integers(20, 200), st.integers(1, 60), st.booleans(), st.integers(0, 40)
)
def test_a_frame_fits_the_terminal(
    layers: int, experts: int, width: int, height: int, in_color: bool, num_findings: int
) -> None:
    load = ExpertLoadHistory(np.array([4]), np.arange(layers), np.ones((1, layers, experts), dtype=np.int64))
    episodes = [Episodes(finding("words " * 30, kind=f"kind {n}"), 1, 3) for n in range(num_findings)]
    run = watched(load=load, episodes=episodes, notes=["n" * 300])
    lines = frame(run, 1009.0, Room(width, height, in_color, True))
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


def test_without_block_characters_it_is_ascii() -> None:
    lines = frame(watched(), 1009.0, replace(PLAIN, width=40, in_color=True, is_unicode=False))
    assert all(line.plain.isascii() for line in lines)


def test_many_findings_leave_room_for_the_load() -> None:
    episodes = [Episodes(finding(f"number {n}", kind=f"kind {n}"), 1, 3) for n in range(30)]
    lines = text_of(watched(episodes=episodes), room=replace(PLAIN, height=24))
    assert "expert load, step 4: layers down, experts 0-1 across" in lines
    assert lines[-1] == "and 25 more lines"


def conversation(text: str = "I call.") -> ShownSample:
    turns = (
        ConversationTurn("user", text, 0, (0, 9)),
        ConversationTurn(
            "assistant", text, 0, (9, 20), is_sampled=True, is_trained=True, calls=(ToolUse("1", text, "{}"),)
        ),
        ConversationTurn("tool", text, None, (0, 0), name=text),
    )
    times = RolloutTimes(4.0, ((0.0, 2.0),), ((2.0, 3.0),))
    return ShownSample(4, "train", text, "q", "a", "1", "right", num_tokens=11, turns=turns, times=times)


def test_the_newest_conversation_stands_below() -> None:
    lines = text_of(watched(conversation=conversation()))
    assert lines[lines.index("- no findings") + 2 :] == [
        "conversation, step 4, train: * trained on, > written by the model and not trained on",
        "  right      I call.: reward 1, 1 response, 1 call, 11 sampled tokens, 11 trained on",
        "    user       I call.",
        "  * assistant  I call.",
        "      call     I call. {}  ok",
        "    tool I call. I call.  [not read by the model]",
        "    time       [################========........] 4 s: # generation 2 s, = tools 1 s, . waiting 1 s",
    ]


def test_a_conversation_has_the_lines_that_are_left() -> None:
    run = watched(conversation=conversation())
    whole = text_of(run)
    seen = set()
    for height in range(5, len(whole) + 3):
        room = replace(PLAIN, height=height)
        lines, without = text_of(run, room=room), text_of(watched(), room=room)
        assert lines[: len(without)] == without
        assert len(lines) <= height
        if lines == without:
            seen.add("none")
        elif lines == whole:
            seen.add("all")
        else:
            seen.add("some")
            assert lines[-1].startswith("    time ")
            assert "more lines" in "".join(lines[len(without) :])
    assert seen == {"none", "some", "all"}


def test_a_conversation_cannot_steer_the_terminal() -> None:
    lines = text_of(watched(conversation=conversation(HOSTILE * 9)))
    assert all(line.isprintable() and len(line) <= PLAIN.width for line in lines)
    assert any("\\x1b[2J" in line for line in lines)
