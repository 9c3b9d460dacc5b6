# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports with conversations, opened in a real browser: what is shown is what was said, and none of it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes, ToolUse
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.functional.browser import OpenPage, open_page
from tests.support.grpo_fakes import trajectory
from tests.support.made_runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MARKUP = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)><b>"
HOSTILE = f"{MARKUP}\x1b[2J\u202eabc\u2066"
SHOWN = f"{MARKUP}\\u001b[2J\\u202eabc\\u2066"
TURNS = (
    ConversationTurn("user", "1+1?", 0, (0, 9)),
    ConversationTurn("assistant", "I call.", 0, (9, 20), is_sampled=True, calls=(ToolUse("1", "add", '{"a": 1}'),)),
    ConversationTurn("tool", "2", 0, (20, 30), name="add", call_id="1"),
    ConversationTurn("assistant", "Two.", 0, (30, 34), is_sampled=True),
)
TIMES = RolloutTimes(4.0, ((0.0, 1.0), (2.0, 3.0)), ((1.0, 1.5),))


def open_run(browser: Any, folder: Path, *turns: tuple[ConversationTurn, ...], **changes: Any) -> OpenPage:
    run = make_run(folder / "run", {1: {"train/reward": 1.0}})
    found = [
        replace(trajectory(sample_id=f"f:{number}"), conversation=each, times=TIMES, **changes)
        for number, each in enumerate(turns)
    ]
    with SampleLog(run, ConsoleLogger(total_steps=1, live="never"), 0, None) as log:
        log.write(1, "train", found)
    assert cli.main(["report", str(run), "--output", str(folder / "report.html")]) == 0
    return open_page(browser, folder / "report.html")


def test_a_conversation_is_shown_by_role_with_what_was_trained_on(browser: Any, tmp_path: Path) -> None:
    opened = open_run(browser, tmp_path, TURNS, (*TURNS[:2], replace(TURNS[2], sequence=None, text="y" * 5000)))
    page = opened.page
    first = page.locator("details.conversation[open]")
    assert first.locator(".who b").all_inner_texts() == ["user", "assistant", "tool add", "assistant"]
    assert first.locator(".said pre").all_inner_texts() == ["1+1?", "I call.", "2", "Two."]
    assert first.locator(".trained .badge.good").all_inner_texts() == ["11 tokens trained on", "4 tokens trained on"]
    assert first.locator(".call code").all_inner_texts() == ['add {"a": 1}']
    assert first.locator(".call .badge").all_inner_texts() == ["ok"]
    assert "0.50 s" in first.locator(".call").inner_text()
    other = page.locator("details.conversation").nth(1)
    other.locator("summary").click()
    assert other.get_by_text("not read by the model").is_visible()
    assert other.get_by_text("[3,000 more characters]").is_visible()
    # Of 4 seconds the model writes two and the tool runs half of one.
    bar = page.locator(".rollout_bar").first
    width = bar.bounding_box()["width"]
    parts = {kind: bar.locator(f".{kind}") for kind in ("generation", "tools", "waiting")}
    assert {kind: part.count() for kind, part in parts.items()} == {"generation": 2, "tools": 1, "waiting": 1}
    assert parts["tools"].bounding_box()["width"] / width == pytest.approx(0.125, abs=0.01)
    assert (opened.requests, opened.problems) == ([], [])
    page.close()


def test_one_that_is_left_out_says_why(browser: Any, tmp_path: Path) -> None:
    cause = "timeout: it took long (env.on_failure: leave_out)"
    opened = open_run(browser, tmp_path, TURNS, left_out=cause, fault=Fault.TIMEOUT, fault_message="it took long")
    shown = opened.page.locator("details.conversation")
    assert shown.locator(".badge").all_inner_texts()[:2] == ["failed", "left out"]
    assert shown.locator(".notes").inner_text() == f"Not trained on: {cause}"
    assert shown.locator(".trained").count() == 0
    opened.page.close()


def test_what_a_conversation_holds_is_text(browser: Any, tmp_path: Path) -> None:
    call = ToolUse(HOSTILE, HOSTILE, HOSTILE, "wrong")
    turns = (
        *(replace(TURNS[0], role=HOSTILE, text=HOSTILE), replace(TURNS[1], text=HOSTILE, calls=(call,))),
        *(replace(TURNS[2], text=HOSTILE, name=HOSTILE), replace(TURNS[3], sequence=1)),
    )
    opened = open_run(browser, tmp_path, turns, sample_id=HOSTILE, left_out=HOSTILE)
    page = opened.page
    assert page.locator(".said pre").all_inner_texts() == [SHOWN] * 3 + ["Two."]
    assert page.locator(".call code").inner_text() == f"{SHOWN} {SHOWN}"
    assert page.locator(".who b").first.inner_text() == SHOWN
    page.wait_for_timeout(300)
    assert page.locator("main img, main b b, iframe, object, embed").count() == 0
    assert (opened.dialogs, opened.requests, opened.problems) == ([], [], [])
    page.close()
