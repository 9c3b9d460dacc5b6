# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines that die, freeze, or cannot start: every request is answered once, and nothing is left behind."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.errors import GenerationError
from tests.support.scripted_rollouts import generate_all
from tests.support.vllm_engines import FREE, Trainer, check_of, generated, requests, start_engine, vllm_tests

pytestmark = [*vllm_tests(), pytest.mark.slow]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    mine = f"nemo_rl_moe-weights-*-{os.getpid()}-*"
    assert not list(SHARED_MEMORY.glob(mine))


def assert_ended(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 200
    while left := [pid for pid in process_ids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.1)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_others_take_over_what_an_engine_had(
    vllm_cluster: RayCluster, trainer: Trainer, signal_number: signal.Signals
) -> None:
    reported: list[str] = []
    engine = start_engine(vllm_cluster, trainer, num_engines=2, stall_timeout_s=4.0, warn=reported.append)
    try:
        trainer.refit(engine)
        # They end one after the other: some are answered before the engine dies, others not.
        asked = [
            replace(request, sampling=replace(FREE, max_new_tokens=8 + 3 * index))
            for index, request in enumerate(requests(24))
        ]
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        victim, other = engine.process_ids()
        answers = generate_all(engine, asked)
        found = [next(answers)]
        os.kill(victim, signal_number)
        found += list(answers)
        assert sorted(index for index, _ in found) == list(range(24)), "each once"
        assert {index: sequence.token_ids.tolist() for index, sequence in found} == dict(enumerate(expected))
        (line,) = reported
        assert "vLLM engine 0" in line
        assert "the other 1 take over its requests" in line
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
    reported: list[str] = []
    engine = start_engine(vllm_cluster, trainer, warn=reported.append)
    try:
        trainer.refit(engine)
        asked = requests(6, replace(FREE, max_new_tokens=80))
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert [sequence.token_ids.tolist() for sequence in generated(engine, asked)] == expected
        # Its death is seen before it is asked, or by those whose requests it had: either is reported.
        assert "vLLM engine 0 died" in reported[0]
    finally:
        engine.shutdown()


def test_an_engine_that_dies_while_it_has_nothing_to_do_is_replaced(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    """While the trainer works, before it gets weights; and after that, before it is checked."""
    reported: list[str] = []
    engine = start_engine(vllm_cluster, trainer, warn=reported.append)
    try:
        trainer.refit(engine)
        trainer.move()
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        trainer.refit(engine)
        check = check_of(engine, trainer)
        assert check.after_refit(engine).largest < 2e-5
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert check.after_refit(engine).largest < 2e-5
        assert reported == ["vLLM engine 0 died; another one takes its place"] * 2
        assert check.num_failed == 0
    finally:
        engine.shutdown()


def test_an_engine_that_freezes_before_it_is_checked_is_replaced(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    reported: list[str] = []
    engine = start_engine(vllm_cluster, trainer, stall_timeout_s=10.0, warn=reported.append)
    try:
        trainer.refit(engine)
        os.kill(engine.process_ids()[0], signal.SIGSTOP)
        assert check_of(engine, trainer).after_refit(engine).largest < 2e-5
        assert reported == ["vLLM engine 0 does not answer; another one takes its place"]
    finally:
        engine.shutdown()


def test_an_engine_outlives_a_batch_systems_request_to_stop(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    """All processes of a job get the signal; the driver ends the step, for which it needs the engine."""
    reported: list[str] = []
    engine = start_engine(vllm_cluster, trainer, warn=reported.append)
    try:
        (process_id,) = engine.process_ids()
        os.kill(process_id, signal.SIGTERM)
        trainer.refit(engine)
        own = f"nemo_rl_moe-vllm-*-{process_id}-*"
        assert list(Path(tempfile.gettempdir()).glob(f"{own}/vllm_dist_*")), "vLLM's files go with the engine's"
        asked = requests(4, replace(FREE, max_new_tokens=60))
        answers = generate_all(engine, asked)
        found = [next(answers)]
        os.kill(process_id, signal.SIGTERM)
        assert len([*found, *answers]) == 4
        assert engine.process_ids() == [process_id]
        assert reported == []
    finally:
        engine.shutdown()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_engines_of_a_transfer_that_one_of_them_does_not_survive_get_the_weights_anew(
    vllm_cluster: RayCluster, trainer: Trainer, signal_number: signal.Signals
) -> None:
    reported: list[str] = []
    patience_s = 8.0
    engine = start_engine(vllm_cluster, trainer, num_engines=2, stall_timeout_s=patience_s, warn=reported.append)
    try:
        trainer.refit(engine)
        trainer.move()
        former = engine.process_ids()
        faulty = Faulty(former[1], signal_number)
        trainer.refit(engine, faulty.in_the_middle)
        assert not set(engine.process_ids()) & set(former), "neither has a mixture"
        assert len(engine.process_ids()) == 2
        assert check_of(engine, trainer).after_refit(engine).largest < 2e-5
        asked = requests(6)
        for request, sequence in zip(asked, generated(engine, asked), strict=True):
            assert sequence.weight_version == trainer.version
            (expected,) = trainer.scores([[*request.token_ids, *sequence.token_ids.tolist()]])
            np.testing.assert_allclose(sequence.logprobs, expected[len(request.token_ids) - 1 :], atol=5e-6)
        (line,) = reported
        assert line.startswith("vLLM engine 1 ")
        assert line.endswith(" while it received weights; all engines are started anew")
        processes = [*former, *engine.process_ids()]
    finally:
        engine.shutdown()
    assert_ended(processes)


class Faulty:
    """A process that a signal strikes once, when half of the tensors have been sent."""

    def __init__(self, process_id: int, signal_number: signal.Signals):
        self._process_id, self._signal_number = process_id, signal_number
        self._at: float | None = None

    def in_the_middle(self, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        name = list(tensors)[len(tensors) // 2]
        striking = tensors[name].as_subclass(StrikingTensor)
        striking.faulty = self
        return {**tensors, name: striking}

    def strike(self) -> None:
        if self._at is None:
            self._at = time.monotonic()
            os.kill(self._process_id, self._signal_number)
            deadline = self._at + 200.0
            gone = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, None)
            while state_of(self._process_id) not in gone:
                assert time.monotonic() < deadline
                time.sleep(0.001)


class StrikingTensor(Tensor):
    """A tensor that has the process faulty when it is taken to be sent; what is made of it is as usual."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    faulty: Faulty

    @property
    def nbytes(self) -> int:
        self.faulty.strike()
        return self.numel() * self.element_size()


def state_of(process_id: int) -> str | None:
    """State of a process; None where it is gone."""
    try:
        return str(psutil.Process(process_id).status())
    except psutil.NoSuchProcess:
        return None


def test_an_engine_that_cannot_start_is_one_line(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    with pytest.raises(GenerationError, match="vLLM engine 0 of 1 cannot start: ") as error:
        start_engine(vllm_cluster, trainer, max_tokens=10**6)
    assert "\n" not in str(error.value)
