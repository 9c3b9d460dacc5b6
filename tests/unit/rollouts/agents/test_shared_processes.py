# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Several agents that are coroutines in one process."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from nemo_rl_moe.config.environments.agent import AgentConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.agent import check_agent
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.agents import worker_pool
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker import AgentProgram
from nemo_rl_moe.rollouts.agents.worker_pool import AgentEnd, AgentRun, AgentWorkers
from tests.support.grpo_inputs import environment_section

MEETS = "tests.support.agents_of_tests:meets_others"
LIMIT_S = 60


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[AgentWorkers]:
    """One process for three agents."""
    program = AgentProgram(MEETS, (), memory_mb=4000, agents_per_worker=3)
    with AgentWorkers(program, 1, tmp_path / "agents.log") as running:
        yield running


def begin(workers: AgentWorkers, what: str) -> tuple[AgentRun, "Future[AgentEnd]"]:
    run = workers.lease().result(LIMIT_S)
    return run, run.start(AgentTask(what, {"what": what}, [], "http://127.0.0.1/v1", "key", "model"))


def test_agents_run_together_and_one_that_fails_or_is_cancelled_costs_itself_alone(workers: AgentWorkers) -> None:
    runs = [begin(workers, what) for what in ("meet", "wait", "raise")]
    assert runs[2][1].result(LIMIT_S).message.startswith("ValueError: asked to raise (agents_of_tests.py:")
    assert runs[1][0]._begun is not None
    runs[1][0]._begun.result(LIMIT_S)
    fourth = workers.lease()
    assert not fourth.done(), "three places"
    runs[1][0].close()  # the one that waits for ever
    runs[2][0].close()
    fifth = workers.lease()
    for leased in (fourth, fifth):
        run = leased.result(LIMIT_S)
        runs.append((run, run.start(AgentTask("later", {"what": "meet"}, [], "", "", ""))))
    scores = [runs[number][1].result(LIMIT_S).score for number in (0, 3, 4)]
    assert len({score.reward for score in scores if score is not None}) == 1, "one process"
    for run, _ in runs:
        run.close()


def test_one_that_blocks_costs_the_others_of_its_process(
    workers: AgentWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "CANCEL_LIMIT_S", 0.5)
    (waiting, waits), (blocking, _) = begin(workers, "wait"), begin(workers, "block")
    assert blocking._begun is not None
    blocking._begun.result(LIMIT_S)
    blocking.close()
    assert waits.result(LIMIT_S).fault is Fault.DIED
    waiting.close()
    runs = [begin(workers, "meet") for _ in range(3)]
    scores = [end.result(LIMIT_S).score for _, end in runs]
    assert None not in scores, "another process has taken its place"
    for run, _ in runs:
        run.close()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("tests.support.agents_of_tests:agent", "a function that is no `async def`"),
        (["python3", "agent.py"], "a command"),
    ],
)
def test_code_that_is_no_coroutine_has_a_process_of_its_own(program: str | list[str], kind: str) -> None:
    env = environment_section(
        {"kind": "exact"}, driver={"kind": "agent", "program": program, "limits": {"agents_per_worker": 4}}
    )
    assert isinstance(env.driver, AgentConfig)
    with pytest.raises(ConfigurationError, match=r"agents_per_worker: got 4, expected 1, as .* is " + kind):
        check_agent(env.driver)
