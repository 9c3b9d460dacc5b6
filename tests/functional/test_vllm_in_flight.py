# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines whose weights change while they generate, and a run that trains meanwhile."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.distributed.stored_rows import fetch_rows
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from nemo_rl_moe.rollouts.loops import LoopThread
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, run_kills, sft_runs
from tests.support.vllm_engines import Trainer, generated_across_an_update, requests, start_engine, vllm_tests

pytestmark = vllm_tests()

LONG = SamplingParameters(max_new_tokens=90)
NUM_REQUESTS, ENOUGH_STEPS = 48, 15


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def engine(vllm_cluster: RayCluster, trainer: Trainer) -> Iterator[VllmEngine]:
    engine = start_engine(vllm_cluster, trainer, captures_routes=True, max_tokens=128)
    trainer.refit(engine)
    yield engine
    engine.shutdown()


def test_sequences_go_on_under_new_weights_as_an_engine_that_had_no_others(
    engine: VllmEngine, trainer: Trainer
) -> None:
    """A17, A22: no key or value of the weights before is left, and no request is lost."""
    before = trainer.version
    asked = requests(NUM_REQUESTS, LONG)
    old = Trainer(trainer.folder.with_name("old"))  # the same random weights, moved as often
    while old.version < before:
        old.move()
    found = generated_across_an_update(engine, trainer, asked, ENOUGH_STEPS)
    versions = [np.asarray(sequence.weight_version) for sequence in found]
    assert any(set(each) == {before, before + 1} for each in versions), "some were broken off"
    for request, sequence, of_tokens in zip(asked, found, versions, strict=True):
        tokens = [*request.token_ids, *sequence.token_ids.tolist()]
        assert len(sequence.token_ids) == LONG.max_new_tokens
        assert (np.diff(of_tokens) >= 0).all()
        scores = {before: old.scores([tokens])[0], before + 1: trainer.scores([tokens])[0]}
        expected = np.choose(of_tokens - before, [scores[version][-len(of_tokens) :] for version in sorted(scores)])
        np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-5)


def test_routes_of_sequences_that_were_broken_off_are_contiguous(engine: VllmEngine, trainer: Trainer) -> None:
    """A18: a row for each token but the last one, none of them twice."""
    asked = requests(NUM_REQUESTS, LONG)
    for request, sequence in zip(asked, generated_across_an_update(engine, trainer, asked, ENOUGH_STEPS), strict=True):
        length = len(request.token_ids) + len(sequence.token_ids)
        assert sequence.routed_experts is not None
        assert sequence.routed_experts.end == length - 1
        assert [piece.start for piece in sequence.routed_experts.pieces[1:]] == [
            piece.end for piece in sequence.routed_experts.pieces[:-1]
        ]
        rows = fetch_rows([sequence.routed_experts], length, -1, fetch_objects, (3, 2), "int16")[0]
        assert (rows[:-1] >= 0).all()


def test_a_pause_leaves_requests_that_come_later_as_they_are(engine: VllmEngine, trainer: Trainer) -> None:
    thread = LoopThread()
    try:
        thread.run(engine.pause())
        (found,) = thread.run(_answers(engine, requests(1, LONG)))
        assert not found.is_partial
        assert len(found.token_ids) == LONG.max_new_tokens
    finally:
        thread.close()


async def _answers(engine: VllmEngine, asked: list[GenerationRequest]) -> list[GeneratedSequence]:
    return list(await asyncio.gather(*(engine.generate(request) for request in asked)))


def test_a_run_trains_while_vllm_generates(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 20)
    overrides = grpo_runs.settings(
        tmp_path,
        data,
        grpo__max_num_steps=5,
        policy__megatron_cfg__optimizer__lr=1e-3,
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:share_of_digits",
        **sft_runs.only_jsonl(),
    )
    words = grpo_runs.command(overrides, grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_async.yaml"))
    with run_kills.running(words, tmp_path, None) as run:
        assert run.wait_for_end(400.0) == 0, run.printed + run.errors
    run_folder = sft_runs.only_run_folder(tmp_path)
    steps = {record.step: record.metrics for record in read_metrics(run_folder / METRICS_FILE_NAME)}
    assert [step.version for step in read_schedule(run_folder / SCHEDULE_FILE)] == [0, 1, 2, 3, 4]
    assert steps[1]["train/staleness/max"] == 0
    assert steps[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert {steps[step]["train/staleness/max"] for step in range(2, 6)} == {1.0}
    for step in range(1, 6):
        assert steps[step]["train/refit/logprob_gap"] < 2e-5
        assert steps[step]["train/refit/checks_failed"] == 0
    assert steps[3]["train/token_mult_prob_error"] > 1 + 1e-4, "old tokens are those of other weights"
