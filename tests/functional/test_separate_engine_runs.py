# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with Megatron-Core workers beside the trainer as engine: those of the trainer's own; workers that die."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.models.policy.separate_engine import SeparateEngine
from tests.functional import grpo_runs, sft_runs
from tests.functional.separate_engines import ROUNDING, SAMPLED, configuration, requests, sequences, started
from tests.support.loggers import read_jsonl
from tests.support.tiny_model import tiny_batch

pytestmark = pytest.mark.shared_ray


def while_it_generates(engine: SeparateEngine, policy: MegatronPolicy) -> None:
    sequences(engine, requests(SAMPLED))


def while_it_receives(engine: SeparateEngine, policy: MegatronPolicy) -> None:
    refit(engine, policy)


@pytest.mark.full
@pytest.mark.parametrize("when", [while_it_generates, while_it_receives])
def test_a_worker_that_dies_ends_the_engine_with_its_name(
    when: Callable[[SeparateEngine, MegatronPolicy], None], tmp_path: Path
) -> None:
    with started(configuration(tmp_path, 1)) as (policy, engine, copies):
        refit(engine, policy)
        (process_id,) = copies.process_ids
        os.kill(process_id, signal.SIGKILL)
        words = rf"^generation engine megatron_separate: worker rank 0 \(pid {process_id}\) died in `"
        with pytest.raises(GenerationError, match=words):
            when(engine, policy)
        batch = tiny_batch(4, vocabulary_size=45)
        assert policy.train(batch, sft_loss).weight_version == 1, "the trainer is as it was"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run the same short recipe with either engine; return the run folders."""
    folder = tmp_path_factory.mktemp("engines")
    data = grpo_runs.make_prompts(folder / "data", 40)
    found = {}
    for backend, roles in (("megatron", []), ("megatron_separate", [f"+cluster.roles.{GENERATION_ROLE}={{}}"])):
        overrides = grpo_runs.settings(
            folder / backend,
            data,
            policy__generation__backend=backend,
            policy__megatron_cfg__optimizer__lr=0.003,
            env__reward__kind="callable",
            env__reward__function="tests.functional.grpo_runs:share_of_digits",
            **sft_runs.only_jsonl(),
        )
        grpo_runs.run_here([*overrides, *roles], folder / backend)
        found[backend] = sft_runs.only_run_folder(folder / backend)
    return found


def samples(run_folder: Path) -> list[dict[str, Any]]:
    return sft_runs.samples_of(run_folder)


def test_a_run_is_that_of_the_trainers_engine_to_the_bit(runs: dict[str, Path]) -> None:
    """With as many copies as data-parallel ranks, batches are the same, and so are the sums."""
    own, other = (read_jsonl(runs[name] / "metrics.jsonl") for name in ("megatron", "megatron_separate"))
    keys = {key for key in own if not key.startswith("timing/")}
    assert {"train/loss", "train/grad_norm", "val/reward", "train/token_mult_prob_error"} <= keys
    assert {value for _, value in own["train/grad_norm"]} != {0.0}
    assert {key: other[key] for key in keys} == {key: own[key] for key in keys}
    assert samples(runs["megatron_separate"]) == samples(runs["megatron"])


def test_each_refit_of_a_run_is_checked_tensor_by_tensor(runs: dict[str, Path]) -> None:
    history = read_jsonl(runs["megatron_separate"] / "metrics.jsonl")
    assert history["train/refit/weights_compared"] == [(step, 1.0) for step in (1, 2, 3)], "all of them"
    assert {value for _, value in history["train/refit/checks_failed"]} == {0.0}
    assert max(value for _, value in history["train/refit/logprob_gap"]) < ROUNDING
    assert {value for _, value in history["train/moe/routing/rows_missing_share"]} == {0.0}
