# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines that die, freeze, or cannot start: every request is answered once, and nothing is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.weight_sync.folder import SHARED_MEMORY
from tests.support.vllm_engines import FREE, Trainer, check_of, generated, requests, start_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm"),
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    mine = f"nemo_rl_moe-weights-*-{os.getpid()}-*"
    assert not list(SHARED_MEMORY.glob(mine))


def assert_ended(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid in process_ids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.1)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_others_take_over_what_an_engine_had(
    vllm_cluster: RayCluster, trainer: Trainer, signal_number: signal.Signals
) -> None:
    told: list[str] = []
    engine = start_engine(vllm_cluster, trainer, num_engines=2, stall_timeout_s=4.0, warn=told.append)
    try:
        trainer.refit(engine)
        # They end one after the other: some are answered before the engine dies, others not.
        asked = [
            replace(request, sampling=replace(FREE, max_new_tokens=8 + 3 * index))
            for index, request in enumerate(requests(24))
        ]
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        victim, other = engine.process_ids()
        answers = engine.generate(asked)
        found = [next(answers)]
        os.kill(victim, signal_number)
        found += list(answers)
        assert sorted(index for index, _ in found) == list(range(24)), "each once"
        assert {index: sequence.token_ids.tolist() for index, sequence in found} == dict(enumerate(expected))
        (line,) = told
        assert "vLLM engine 0" in line
        assert "the other 1 take over what it had" in line
        trainer.move()
        trainer.refit(engine)
        assert len(engine.process_ids()) == 2, "another one takes its place"
        check_of(engine, trainer).after_refit(engine)
        processes = [victim, *engine.process_ids()]
        assert other in processes
    finally:
        engine.shutdown()
    assert_ended(processes)


def test_the_only_engine_dies_and_the_run_goes_on(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    told: list[str] = []
    engine = start_engine(vllm_cluster, trainer, warn=told.append)
    try:
        trainer.refit(engine)
        asked = requests(6, replace(FREE, max_new_tokens=80))
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert [sequence.token_ids.tolist() for sequence in generated(engine, asked)] == expected
        assert "engines are started anew" in told[0]
    finally:
        engine.shutdown()


def test_an_engine_that_dies_while_it_has_nothing_to_do_is_replaced(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    """While the trainer works, before it gets weights; and after that, before it is checked."""
    told: list[str] = []
    engine = start_engine(vllm_cluster, trainer, warn=told.append)
    try:
        trainer.refit(engine)
        trainer.move()
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        trainer.refit(engine)
        check = check_of(engine, trainer)
        assert check.after_refit(engine).largest < 2e-5
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert check.after_refit(engine).largest < 2e-5
        assert told == ["vLLM engine 0 died; another one takes its place"] * 2
        assert check.num_failed == 0
    finally:
        engine.shutdown()


def test_an_engine_that_freezes_before_it_is_checked_is_replaced(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    told: list[str] = []
    engine = start_engine(vllm_cluster, trainer, stall_timeout_s=10.0, warn=told.append)
    try:
        trainer.refit(engine)
        os.kill(engine.process_ids()[0], signal.SIGSTOP)
        assert check_of(engine, trainer).after_refit(engine).largest < 2e-5
        assert told == ["vLLM engine 0 does not answer; another one takes its place"]
    finally:
        engine.shutdown()


def test_an_engine_that_cannot_start_is_one_line(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    started = time.monotonic()
    with pytest.raises(GenerationError, match="vLLM engine 0 of 1 cannot start: ") as error:
        start_engine(vllm_cluster, trainer, max_tokens=10**6)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 120
