# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO runs with rollouts by vLLM, as a user starts them: one left alone, and two that are harmed and equal it."""

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import grpo_runs, run_kills, sft_runs
from tests.support.rewards_of_tests import MARK
from tests.support.vllm_engines import vllm_tests

pytestmark = vllm_tests(900)

NUM_STEPS = 4
LIMIT_S = 400.0


def command(folder: Path, data: Path, *more: str) -> list[str]:
    """A run of some seconds a step that writes below `folder`, with further overrides."""
    overrides = grpo_runs.settings(
        folder,
        data,
        grpo__max_num_steps=NUM_STEPS,
        policy__megatron_cfg__optimizer__lr=1e-3,
        checkpointing__checkpoint_dir=folder / "checkpoints",
        checkpointing__save_period=1,
        env__reward__kind="callable",
        env__reward__function="tests.support.rewards_of_tests:share_of_digits",
        **sft_runs.only_jsonl(),
    )
    return grpo_runs.command([*overrides, *more], grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml"))


def run_to_its_end(folder: Path, data: Path, *more: str, environment: dict[str, str] | None = None) -> str:
    """Return what the run printed; check that nothing of it is left."""
    with run_kills.running(command(folder, data, *more), folder, environment) as run:
        assert run.wait_for_end(LIMIT_S) == 0, run.printed + run.errors
        run.wait_until_nothing_runs(20.0)
        assert not leftovers(run)
        return run.printed + run.errors


def leftovers(run: run_kills.Run) -> list[Path]:
    """Folders of transfers in shared memory, and of models for engines, that are the run's."""
    folders = [*SHARED_MEMORY.glob("nemo_rl_moe-weights-*"), *Path(tempfile.gettempdir()).glob("nemo_rl_moe-vllm-*")]
    return [folder for folder in folders if int(folder.name.split("-")[-2]) in run.process_ids]


def untimed(folder: Path) -> dict[int, dict[str, Any]]:
    """Every step's metrics but for how long things took."""
    records = read_metrics(sft_runs.only_run_folder(folder) / "metrics.jsonl")
    steps = {
        each.step: {key: value for key, value in each.metrics.items() if not key.startswith("timing/")}
        for each in records
    }
    assert len(steps) == len(records), "no step twice"
    return steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("prompts"), 40)


@pytest.fixture(scope="module")
def unharmed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("unharmed")
    run_to_its_end(folder, data)
    return folder


def test_the_metrics_say_that_the_weights_arrive(unharmed: Path) -> None:
    steps = untimed(unharmed)
    assert sorted(steps) == list(range(NUM_STEPS + 1))
    for step in range(1, NUM_STEPS + 1):
        metrics = steps[step]
        assert 0 <= metrics["train/refit/logprob_gap"] < 2e-5
        assert metrics["train/refit/checks_failed"] == 0
        assert metrics["train/refit/bytes"] > 10**5
        assert metrics["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert len({steps[step]["train/loss"] for step in range(1, NUM_STEPS + 1)}) == NUM_STEPS


def test_a_model_that_names_no_class_is_reported_before_anything_starts(data: Path, tmp_path: Path) -> None:
    model = sft_runs.make_model_folder(tmp_path / "model", architectures=None)
    with run_kills.running(command(tmp_path, data, f"policy.model_name={model}"), tmp_path) as run:
        assert run.wait_for_end(LIMIT_S) == 2
        assert run.errors == (
            f"error: policy.model_name: {model}: config.json: architectures: is missing, expected"
            ' ["Qwen3MoeForCausalLM"], the class that vLLM is to build (policy.generation.backend: vllm)\n'
        )
        assert "starting" not in run.printed


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(unharmed: Path, data: Path, tmp_path: Path) -> None:
    with run_kills.running(command(tmp_path, data), tmp_path) as run:
        run.wait_for_text("step 2/", LIMIT_S)
        for process in run.family():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        run.wait_until_nothing_runs(30.0)
        killed = run
    printed = run_to_its_end(tmp_path, data)
    assert "going on from " in printed
    assert not leftovers(killed), "the run that goes on has removed them"
    assert untimed(tmp_path) == untimed(unharmed)


@pytest.mark.slow
def test_a_run_outlives_its_engine_and_counts_nothing_twice(unharmed: Path, data: Path, tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    printed = run_to_its_end(tmp_path, data, environment={MARK: str(mark)})
    assert mark.exists()
    assert "vLLM engine 0 died; " in printed
    assert untimed(tmp_path) == untimed(unharmed)


@pytest.mark.slow
def test_engines_with_places_of_their_own_get_their_weights_over_the_network(
    unharmed: Path, data: Path, tmp_path: Path
) -> None:
    places = "+cluster.roles.generation={cpu_workers_per_node: 2}"
    run_to_its_end(tmp_path, data, places, "policy.generation.weight_transport=gloo")
    # A response depends on its request alone, not on the engine.
    assert untimed(tmp_path) == untimed(unharmed)
