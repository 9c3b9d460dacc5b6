# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools in their processes: whatever one call does, it costs that call alone, and nothing of it stays."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import usable_cores
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.results import ToolResult
from nemo_rl_moe.tools.worker_pool import ToolWorkers
from tests.support.grpo_inputs import cluster_config

NAMES = ("add", "look_up", "say", "fail", "sleep", "block", "die", "fill", "variable", "started_with", "start_child")
NAMES = (*NAMES, "waits", "waits_long")
REFERENCES = [f"tests.support.tool_functions:{name}" for name in NAMES] + ["tests.support.tool_types:order"]
METHODS = ("count", "total", "end_process")
SETTINGS = {"look_up": {"dictionary": "words.txt"}}
LIMIT_S = 60.0
"""Of calls that end by themselves."""
SHORT_S = 1.0
"""Of calls that do not."""
MOST_CHARACTERS = 100


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[RayCluster]:
    """A Ray whose every place is reserved for policy workers, in an environment with a secret."""
    os.environ["MY_API_KEY"] = "hunter2"
    running = RayCluster(cluster_config(1, 0, usable_cores()))
    yield running
    running.shutdown()
    del os.environ["MY_API_KEY"]


@pytest.fixture(scope="module")
def workers() -> Iterator[ToolWorkers]:
    with started(2) as running:
        yield running


def started(num_workers: int) -> ToolWorkers:
    return ToolWorkers(REFERENCES, SETTINGS, num_workers=num_workers, memory_mb=200, most_characters=MOST_CHARACTERS)


def results(workers: ToolWorkers, *calls: tuple[str, dict[str, Any], float]) -> list[ToolResult]:
    """Return the results of calls that run at the same time."""

    async def run() -> list[ToolResult]:
        async with workers.calls({}) as call:
            return await asyncio.gather(*(call(*each) for each in calls))

    return asyncio.run(run())


def process_ids(workers: ToolWorkers) -> list[int]:
    return [ray.get(actor.place.remote()).process.pid for actor in workers._pools[0]._actors.values()]


def test_results_are_texts(workers: ToolWorkers) -> None:
    assert results(
        workers,
        ("add", {"a": 1, "b": 2}, LIMIT_S),
        ("look_up", {"word": "é"}, LIMIT_S),
        ("say", {"text": "a\ud800"}, LIMIT_S),
        *(("add", {"a": number}, LIMIT_S) for number in range(10)),
    ) == [
        ToolResult("3"),
        ToolResult('{"word": "é", "language": "en", "dictionary": "words.txt", "limit": 3}'),
        ToolResult("a?"),
        *(ToolResult(str(number + 1)) for number in range(10)),
    ]


def test_a_long_result_is_cut_and_says_so(workers: ToolWorkers) -> None:
    exact, over = results(
        workers, ("say", {"text": "x" * MOST_CHARACTERS}, LIMIT_S), ("say", {"text": "x" * 10_000}, LIMIT_S)
    )
    assert exact == ToolResult("x" * MOST_CHARACTERS)
    assert over == ToolResult(f"{'x' * 100}\n[cut: the first 100 of 10,000 characters]", is_cut=True)


def test_a_call_that_fails_costs_itself_alone(workers: ToolWorkers) -> None:
    before = process_ids(workers)
    raised, filled, added = results(
        workers,
        ("fail", {"text": "no such\nword"}, LIMIT_S),
        ("fill", {"megabytes": 5_000}, LIMIT_S),
        ("add", {"a": 1}, 60),
    )
    assert raised == ToolResult("error: RuntimeError: no such", Fault.ERROR)
    assert filled == ToolResult("error: MemoryError", Fault.ERROR)
    assert added == ToolResult("2")
    assert process_ids(workers) == before


def test_a_call_that_takes_too_long_is_ended_and_others_go_on(workers: ToolWorkers) -> None:
    slept, blocked, added, again = results(
        workers,
        ("sleep", {"seconds": 10_000.0}, SHORT_S),
        ("block", {"seconds": 10_000.0}, SHORT_S),
        ("add", {"a": 1}, LIMIT_S),
        ("add", {"a": 2}, LIMIT_S),
    )
    late = ToolResult("error: the tool gave no result within 1 s", Fault.TIMEOUT)
    assert [slept, blocked, added, again] == [late, late, ToolResult("2"), ToolResult("3")]


def test_a_process_that_ends_is_replaced(workers: ToolWorkers) -> None:
    died, added = results(workers, ("die", {"code": 3}, LIMIT_S), ("add", {"a": 1}, LIMIT_S))
    assert died.fault is Fault.DIED
    assert died.text.startswith("error: the process of the tool ended: ")
    assert "\n" not in died.text
    assert added == ToolResult("2")
    assert results(workers, *[("add", {"a": 1}, LIMIT_S)] * 4) == [ToolResult("2")] * 4


def test_secrets_of_the_environment_are_hidden(workers: ToolWorkers) -> None:
    (started_with,) = results(workers, ("started_with", {"text": "hunter2"}, LIMIT_S))
    assert started_with == ToolResult("false")
    (started_with,) = results(workers, ("started_with", {"text": "PATH="}, LIMIT_S))
    assert started_with == ToolResult("true")
    found = results(workers, *[("variable", {"name": "MY_API_KEY"}, LIMIT_S)] * 2, ("variable", {"name": "HOME"}, 60))
    assert [result.text for result in found] == ["not set", "not set", os.environ.get("HOME", "not set")]


def test_coroutines_are_awaited_and_ended(workers: ToolWorkers) -> None:
    before = process_ids(workers)
    late = ToolResult("error: the tool gave no result within 1 s", Fault.TIMEOUT)
    assert results(workers, *[("waits", {"a": 1}, LIMIT_S)] * 2) == [ToolResult("1")] * 2
    assert results(workers, *[("waits_long", {"a": 1}, SHORT_S)] * 2) == [late] * 2
    ended = results(workers, *[("variable", {"name": "WAITS_LONG"}, LIMIT_S)] * 4)
    assert ended[0] == ToolResult("has ended")
    assert process_ids(workers) == before


def test_code_of_the_user_that_checks_arguments_runs_with_the_tool(workers: ToolWorkers) -> None:
    right, wrong = results(
        workers,
        ("order", {"items": [{"name": "tea", "count": "2"}], "speed": "fast"}, LIMIT_S),
        ("order", {"items": [{"name": "boom"}]}, LIMIT_S),
    )
    assert right == ToolResult("2 tea, FAST, False")
    assert wrong.is_wrong
    assert wrong.text.startswith("error: the argument items is [{")


def test_each_trajectory_has_its_own_state_which_is_closed_at_its_end(tmp_path: Path) -> None:
    file, warnings = tmp_path / "ends", list[str]()
    workers = ToolWorkers(
        [f"tests.support.tool_types:Counter.{name}" for name in METHODS],
        {"Counter": {"first": 1, "file": str(file)}},
        num_workers=2,
        memory_mb=200,
        most_characters=MOST_CHARACTERS,
        methods=METHODS,
        warn=warnings.append,
    )

    async def trajectory(start: int, *calls: tuple[str, dict[str, Any]]) -> list[str]:
        async with workers.calls({"start": start}) as call:
            return [(await call(*each, LIMIT_S)).text for each in calls]

    async def run() -> list[list[str]]:
        count = ("count", {"by": 2})
        return await asyncio.gather(*(trajectory(10 * number, count, count, ("total", {})) for number in range(4)))

    lost = "error: RuntimeError: the state of the tool is lost, because its process has ended"
    with workers:
        assert asyncio.run(run()) == [[str(10 * number + each) for each in (3, 5, 5)] for number in range(4)]
        assert asyncio.run(trajectory(-1, ("total", {}))) == ["error: ValueError: no negative start"]
        died, *after = asyncio.run(trajectory(0, ("end_process", {}), ("total", {}), ("count", {})))
        assert died.startswith("error: the process of the tool ended: ")
        assert after == [lost, lost]
        for _ in range(2):
            assert asyncio.run(trajectory(200, ("total", {}))) == ["201"]
    assert sorted(map(int, file.read_text().split())) == [5, 15, 25, 35]
    reported = "error: ValueError: too high; further failures are not reported"
    assert warnings == [f"the state of a tool could not be closed: {reported}"]


@pytest.mark.full
def test_nothing_is_left_behind() -> None:
    with started(1) as workers:
        (worker,) = process_ids(workers)
        (child,) = results(workers, ("start_child", {"option": "x"}, LIMIT_S))
        processes = [psutil.Process(worker), psutil.Process(int(child.text))]
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.full
def test_calls_that_run_while_all_is_stopped_end() -> None:
    workers = started(1)

    async def run() -> None:
        async with workers.calls({}) as called:
            call = asyncio.ensure_future(called("sleep", {"seconds": 10_000.0}, 10_000.0))
            waiting = asyncio.ensure_future(called("add", {"a": 1}, LIMIT_S))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(workers.shutdown)
        with pytest.raises(WorkerDiedError, match="the tool workers have been stopped"):
            await call
        with pytest.raises((WorkerDiedError, asyncio.CancelledError)):
            await waiting

    asyncio.run(run())


@pytest.mark.full
def test_a_worker_that_is_killed_from_outside_is_replaced() -> None:
    with started(1) as workers:
        os.kill(process_ids(workers)[0], signal.SIGKILL)
        results(workers, ("add", {"a": 1}, LIMIT_S))
        assert results(workers, ("add", {"a": 1}, LIMIT_S)) == [ToolResult("2")]


def test_tools_that_cannot_be_loaded_end_the_start() -> None:
    with pytest.raises(WorkerDiedError, match=r"env\.driver\.parameters\.look_up\.dictionary: is missing"):
        ToolWorkers(REFERENCES, {}, num_workers=1, memory_mb=200, most_characters=100)
