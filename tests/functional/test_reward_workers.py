# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in their workers: whatever one response does, the others get their scores, and soon."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray

from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import usable_cores
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rewards.worker_pool import RewardWorkers
from tests.support.grpo_inputs import cluster_config, environment_section

TIMEOUT_S = 1.5


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[RayCluster]:
    """A Ray whose every place is reserved for policy workers."""
    running = RayCluster(cluster_config(1, 0, usable_cores()))
    yield running
    running.shutdown()


@pytest.fixture(scope="module")
def reward_function() -> Iterator[RewardWorkers]:
    with workers_of(num_workers=2) as running:
        yield running


KEYS = {
    "callable": {"function": "tests.support.rewards_of_tests:score"},
    "reasoning_gym": {"task": "basic_arithmetic"},
}


def workers_of(
    kind: str = "callable", *, reward_weights: Mapping[str, float] | None = None, **keys: object
) -> RewardWorkers:
    own = {"kind": kind, "num_workers": 1, "timeout_s": TIMEOUT_S, **KEYS.get(kind, {}), **keys}
    env = environment_section(own, reward_weights=reward_weights)
    assert isinstance(env.reward, WorkerRewardConfig)
    return RewardWorkers(env.reward, env)


def items_of(responses: Sequence[str]) -> list[ScoringItem]:
    return [ScoringItem(f"line {i}", "?", response, False, {}) for i, response in enumerate(responses)]


def processes(reward_function: RewardWorkers) -> list[int]:
    return [ray.get(actor.place.remote()).process.pid for actor in reward_function._pool._actors.values()]


def test_two_threads_get_the_scores_of_their_own(reward_function):
    """Asynchronous rollouts score in a thread of their own, while a validation does in the main one."""
    responses = [["0.25", "0.5"] * 8, ["1", "2", "3"] * 5]
    expected = [[score.reward for score in reward_function.score(items_of(each))] for each in responses]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            found = pool.map(lambda each: reward_function.score(items_of(each)), responses)
            assert [[score.reward for score in scores] for scores in found] == expected


def test_only_the_guilty_fail(reward_function):
    reported = {
        "raise": (Fault.ERROR, "ValueError: no such tile"),
        "raise unprintable": (Fault.ERROR, "UnprintableError"),
        "sys.exit": (Fault.ERROR, "SystemExit: enough"),
        "recurse": (Fault.ERROR, "RecursionError: maximum recursion depth exceeded"),
        "nan": (Fault.ERROR, "ValueError: the reward is nan, expected a number from -1,000,000 to 1,000,000"),
        "inf": (Fault.ERROR, "ValueError: the reward is -inf, expected a number from -1,000,000 to 1,000,000"),
        "huge": (Fault.ERROR, "ValueError: the reward is 1e+308, expected a number from -1,000,000 to 1,000,000"),
        "patched nan": (Fault.ERROR, "ValueError: the reward is nan, expected a number from -1,000,000 to 1,000,000"),
        "word": (Fault.ERROR, "TypeError: env.reward.function returned '1.0' (str), expected a number, or a dict"),
        "none": (Fault.ERROR, "TypeError: env.reward.function returned None"),
        "wrong pair": (Fault.ERROR, "TypeError: env.reward.function returned (1.0, 1) (tuple)"),
        "triple": (Fault.ERROR, "TypeError: env.reward.function returned (1.0, True, 'x') (tuple)"),
        "sleep": (Fault.TIMEOUT, f"took longer than {TIMEOUT_S:g} s"),
        "regex": (Fault.TIMEOUT, f"took longer than {TIMEOUT_S:g} s"),
        "swallow": (Fault.TIMEOUT, f"took longer than {TIMEOUT_S:g} s"),
        "replace": (Fault.TIMEOUT, f"took longer than {TIMEOUT_S:g} s"),
    }
    responses = [word for failure in reported for word in ("0.25", failure, "1.0")]
    before = processes(reward_function)
    scores = reward_function.score(items_of(responses))
    check(scores, responses, reported)
    assert processes(reward_function) == before, "such failures cost no worker"


@pytest.mark.slow
def test_responses_that_take_their_worker_with_them(reward_function):
    took_too_long = (Fault.TIMEOUT, f"took longer than {TIMEOUT_S:g} s and could not be interrupted")
    reported = {
        "hang in c": took_too_long,
        "ignore": took_too_long,
        "cancel": took_too_long,
        "os._exit": (Fault.DIED, "its worker died: Worker exit type: SYSTEM_ERROR"),
        "segfault": (Fault.DIED, "its worker died: Worker exit type: SYSTEM_ERROR"),
    }
    responses = [
        "1.0",
        "hang in c",
        "raise",
        "ignore",
        "cancel",
        "os._exit",
        "0.5",
        "half right",
        "segfault",
        *["1"] * 20,
    ]
    scores = reward_function.score(items_of(responses))
    check(scores, responses, {**reported, "raise": (Fault.ERROR, "ValueError: no such tile")})
    assert scores[7] == Score(0.5, is_correct=True)

    again = ["0.5", "1.0", "0.25"]
    check(reward_function.score(items_of(again)), again, {})


def check(scores: Sequence[Score], responses: Sequence[str], reported: dict[str, tuple[Fault, str]]) -> None:
    assert len(scores) == len(responses)
    for response, score in zip(responses, scores, strict=True):
        if response in reported:
            fault, message = reported[response]
            assert (score.reward, score.is_correct, score.fault) == (0.0, False, fault), (response, score)
            assert score.message.startswith(message), response
            assert "\n" not in score.message
        elif response != "half right":
            reward = float(response)
            assert score == Score(reward, is_correct=reward >= 1.0), response


@pytest.mark.slow
def test_workers_killed_from_outside_between_batches(reward_function):
    for pid in processes(reward_function):
        os.kill(pid, signal.SIGKILL)
    responses = ["1.0", "0.5", "0.25"]
    check(reward_function.score(items_of(responses)), responses, {})
    for pid in processes(reward_function):
        os.kill(pid, signal.SIGKILL)
    check(reward_function.score(items_of(["1.0"])), ["1.0"], {})  # a share of one is not blamed at once


@pytest.mark.full
def test_worker_killed_from_outside_in_a_batch(reward_function):
    victim = processes(reward_function)[0]
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    scores = reward_function.score(items_of(["nap 0.1"] * 12))
    killer.join()
    assert scores == [Score(1.0, is_correct=True)] * 12
    assert victim not in processes(reward_function)


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_given_up(monkeypatch):
    monkeypatch.setattr("nemo_rl_moe.distributed.worker_pool.CALL_SLACK_S", 1.0)
    with workers_of() as reward_function:
        (victim,) = processes(reward_function)
        os.kill(victim, signal.SIGSTOP)
        check(reward_function.score(items_of(["1.0", "0.5"])), ["1.0", "0.5"], {})
        assert victim not in processes(reward_function)
        os.kill(victim, signal.SIGKILL)


def test_scoring_in_a_thread_ends_when_the_workers_are_stopped():
    with ThreadPoolExecutor(1) as thread, workers_of() as reward_function:
        scoring = thread.submit(reward_function.score, items_of(["nap 1.0"] * 500))
        while not reward_function._pool._idle.empty():  # the worker is idle until the thread has sent it the responses
            time.sleep(0.01)
        reward_function.shutdown()
        with pytest.raises(WorkerDiedError, match="the reward workers have been stopped"):
            scoring.result(120.0)


def test_scores_do_not_depend_on_the_sharing(reward_function):
    responses = [str(i / 8) for i in range(16)] + ["raise", "nan", "half right", "0.5"]
    whole = reward_function.score(items_of(responses))
    order = list(range(len(responses)))
    random.Random(0).shuffle(order)
    items = items_of(responses)
    shuffled = reward_function.score([items[index] for index in order])
    assert [shuffled[order.index(index)] for index in range(len(order))] == whole
    assert [score for item in items for score in reward_function.score([item])] == whole
    assert reward_function.score([]) == []


@pytest.mark.parametrize("name", ["math", pytest.param("reasoning_gym", marks=pytest.mark.full)])
def test_verifiers(name):
    record = {"question": "1+605=", "answer": "606", "metadata": {}}
    responses = ["<think>607</think>606", "<think>606</think>607", "</think> 606\n", "606", "<think>606"]
    items = [ScoringItem("", "1+605=", response, False, record) for response in responses]
    items.append(ScoringItem("", "1+605=", "606", True, record))
    with workers_of(name, answer_after="</think>", timeout_s=60.0) as reward_function:
        scores = reward_function.score(items)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert all(score.is_correct == bool(score.reward) and score.fault is None for score in scores)


def test_one_number_of_a_verifier_is_right_within_a_rollout_that_gives_several() -> None:
    with workers_of("math", timeout_s=60.0, reward_weights={"accuracy": 1.0, "format": 0.5}) as reward_function:
        (score,) = reward_function.score([ScoringItem("line 0", "?", "$606$", False, {"answer": "606"})])
    assert (score.reward, score.fault) == (1.0, None)


def test_an_environment_that_cannot_be_made():
    with pytest.raises(WorkerDiedError) as error:
        workers_of(num_workers=2, function="tests.support.rewards_of_tests:scor")
    assert "reward worker" in str(error.value)
    assert "raised ConfigurationError while starting:" in str(error.value)
    assert "has no scor; did you mean score?" in str(error.value)


def test_nothing_stays_behind():
    with workers_of(num_workers=2) as reward_function:
        pids = processes(reward_function)
        assert all(psutil.pid_exists(pid) for pid in pids)
    while any(psutil.pid_exists(pid) for pid in pids):  # until the test's own limit
        time.sleep(0.05)
    with pytest.raises(WorkerDiedError, match="have been stopped"):
        reward_function.score(items_of(["1.0"]))
    reward_function.shutdown()
