# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO on a fake card that the trainer shares with vLLM for CUDA: `make test-fake-card-vllm`.

Kernels of vLLM that the host computes give real tokens, log-probabilities and routes.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.fake_card.environment import REPOSITORY, card_environment, shared_folder
from tests.fake_card.ledger import LedgerHistory, shares
from tests.fake_card.test_kit import run_kit_check
from tests.functional import grpo_runs, sft_runs
from tests.gpu import vllm_check

pytestmark = pytest.mark.timeout(3000)  # on a busy machine

CARD_GB, ENGINE_SHARE = "0.6", 0.85
"""A card that an awake engine nearly fills."""
MOST_ERROR = 1.01
"""Of probabilities of two engines in bfloat16. With vLLM's build for CPUs it is 1.005."""
_ENGINE = (b"ray::VllmWorker", b"VLLM::Worker")


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        steps: Metrics of each step.
        states: Bytes of the trainer and of the engine on the card, in order.
    """

    printed: str
    steps: Sequence[Mapping[str, float]]
    states: Sequence[tuple[int, int]]


def _engine_of(folder: Path) -> int | None:
    """Return the process of the engine on a card."""
    for process in shares(folder):
        try:
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(_ENGINE):
                return process
        except OSError:
            continue
    return None


@contextmanager
def _run(
    folder: Path, *changes: str, num_cards: int = 1, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Path, LedgerHistory]]:
    settings = [
        *(each for each in vllm_check.overrides(folder, rehearse=False) if "gpu_memory_utilization" not in each),
        f"policy.generation.vllm.gpu_memory_utilization={ENGINE_SHARE}",
        *changes,
    ]
    command = grpo_runs.command(settings, vllm_check.exemplar(rehearse=False))
    with shared_folder() as shared:
        variables = card_environment(shared, num_cards, **{"FAKE_CARD_GB": CARD_GB, **environment})
        with (folder / "printed").open("w") as printed, LedgerHistory(shared) as history:
            command = [sys.executable, "-W", "ignore", *command[1:]]
            run = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=printed, stderr=printed, text=True)
            try:
                yield run, shared, history
                run.wait()
            finally:
                run.kill()
                run.wait()


def _ended(folder: Path, run: subprocess.Popen[str], history: LedgerHistory, engine: int) -> Ended:
    printed = (folder / "printed").read_text()
    assert run.returncode == 0, printed[-6000:]
    records = [record.metrics for record in read_metrics(sft_runs.only_run_folder(folder) / "metrics.jsonl")]
    states = [(sum(state.values()) - state.get(engine, 0), state.get(engine, 0)) for state in history.states]
    return Ended(printed, [metrics for metrics in records if "train/loss" in metrics], states)


def _wait_for_engine(run: subprocess.Popen[str], shared: Path) -> int:
    while (found := _engine_of(shared)) is None:
        assert run.poll() is None, "the run ended without an engine"
        time.sleep(0.05)
    return found


def _run_to_the_end(folder: Path, *changes: str, num_cards: int = 1, **environment: str) -> Ended:
    with _run(folder, *changes, num_cards=num_cards, **environment) as (run, shared, history):
        engine = _wait_for_engine(run, shared)
    return _ended(folder, run, history, engine)


def _held_by_engine_while_training(ended: Ended) -> int:
    """Return the most that the engine held when the trainer took more memory, from the first generation on."""
    most = max(engine for _, engine in ended.states)
    first = next(number for number, (_, engine) in enumerate(ended.states) if engine > 0.9 * most)
    grown = [
        engine
        for (before, _), (trainer, engine) in zip(ended.states[first:], ended.states[first + 1 :], strict=False)
        if trainer > before
    ]
    assert grown, "the trainer took no memory"
    return max(grown)


@pytest.mark.parametrize("name", ["vllm_routes_and_refit", "vllm_resume"])
def test_check_passes_with_the_settings_of_a_gpu(name: str, tmp_path: Path) -> None:
    (line,) = run_kit_check(name, tmp_path, FAKE_CARD_GB="2")
    assert all(error < MOST_ERROR for error in line["numbers"]["train/token_mult_prob_error"])


def test_the_engine_sleeps_while_the_trainer_trains(tmp_path: Path) -> None:
    ended = _run_to_the_end(tmp_path)
    assert len(ended.steps) == vllm_check.NUM_STEPS
    assert all(metrics["train/refit/checks_failed"] == 0 for metrics in ended.steps)
    most = max(engine for _, engine in ended.states)
    assert most > 0.8 * float(CARD_GB) * 1e9
    # What stays are tensors beside the weights and the cache.
    assert _held_by_engine_while_training(ended) < 0.1 * most


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_an_engine_of_two_cards_gets_the_weights_of_two_trainers(tmp_path: Path, *, expert_parallel: bool) -> None:
    engine = "policy.generation.vllm."
    changes = [f"{engine}tensor_parallel_size=2", f"{engine}expert_parallel={str(expert_parallel).lower()}"]
    ended = _run_to_the_end(tmp_path, "cluster.gpus_per_node=2", *changes, num_cards=2)
    assert len(ended.steps) == vllm_check.NUM_STEPS
    for metrics in ended.steps:
        assert metrics["train/refit/checks_failed"] == 0
        assert metrics["train/moe/routing/rows_missing_share"] == 0
        assert metrics["train/token_mult_prob_error"] < MOST_ERROR


def test_an_engine_on_a_card_of_its_own_gets_weights_over_nccl_while_it_generates(tmp_path: Path) -> None:
    changes = {
        "cluster.gpus_per_node": 1,
        "cluster.roles.generation.num_nodes": 1,
        "cluster.roles.generation.gpus_per_node": 1,
        "grpo.rollouts.mode": "asynchronous",
        "grpo.rollouts.max_staleness": 2,
        "grpo.use_dynamic_sampling": "false",
        "policy.generation.weight_transport": "nccl",
    }
    ended = _run_to_the_end(tmp_path, *(f"{key}={value}" for key, value in changes.items()), num_cards=2)
    assert [metrics["train/refit/checks_failed"] for metrics in ended.steps] == [0] * vllm_check.NUM_STEPS
    assert max(engine for _, engine in ended.states) == 0  # on the trainer's card
    # Later ones are of older weights.
    assert ended.steps[0]["train/token_mult_prob_error"] < MOST_ERROR


def test_an_engine_that_does_not_sleep_is_seen(tmp_path: Path) -> None:
    ended = _run_to_the_end(tmp_path, FAKE_CARD_FAULT="engines never sleep")
    assert _held_by_engine_while_training(ended) > 0.9 * max(engine for _, engine in ended.states)


def test_an_engine_that_is_killed_is_replaced_on_the_same_card(tmp_path: Path) -> None:
    with _run(tmp_path) as (run, shared, history):
        engine = _wait_for_engine(run, shared)
        while "step 1/" not in (tmp_path / "printed").read_text():
            assert run.poll() is None, (tmp_path / "printed").read_text()[-6000:]
            time.sleep(0.02)
        os.kill(engine, signal.SIGKILL)
        while (second := _engine_of(shared)) in (None, engine):
            assert run.poll() is None, (tmp_path / "printed").read_text()[-6000:]
            time.sleep(0.05)
    ended = _ended(tmp_path, run, history, engine)
    assert second is not None
    assert len(ended.steps) == vllm_check.NUM_STEPS
    assert "vLLM engine 0 died; engines are started anew" in ended.printed
    # Both never held memory at the same time: the card is too small for them.
    assert max(state.get(second, 0) for state in history.states) > 0.8 * float(CARD_GB) * 1e9
