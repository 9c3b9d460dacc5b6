# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's build for CPUs generates for a released model: the mismatch of log-probabilities, and of routed experts.

pytest -s -m world tests/world/test_real_vllm.py prints the table of docs/real-model.md.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.real_model import DENSE, MOE
from nemo_rl_moe.generation.vllm.releases import installed_release
from tests.support.loggers import MetricHistory
from tests.world.real_runs import run, train

pytestmark = [
    pytest.mark.skipif(not MOE.is_dir(), reason=f"{MOE} is not there: make real-model writes it"),
    pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm"),
    pytest.mark.timeout(1800),
]
NUM_STEPS = 2
ROUTING = "train/moe/routing/"


@dataclass(frozen=True)
class Case:
    """Number formats, and bounds that hold for each step.

    Attributes:
        trainer: Of the trainer.
        engine: Of the engine.
        router: Of the trainer's routers; null: that of the trainer. vLLM has those of Mixtral in the engine's.
        mean: Of absolute differences of the sampled tokens' log-probabilities, nats.
        agreement: Of the sets of experts, least.
    """

    trainer: str
    engine: str
    router: str | None
    mean: float
    agreement: float | None
    model: Path = MOE


CASES = {
    "all in float32": Case("float32", "float32", "fp32", 1e-4, 0.999),
    "engine in bfloat16": Case("float32", "bfloat16", "fp32", 0.4, 0.94),
    "trainer in bfloat16": Case("bfloat16", "float32", "fp32", 0.1, 0.96),
    "both in bfloat16": Case("bfloat16", "bfloat16", "fp32", 0.3, 0.94),
    "both in bfloat16, routers too": Case("bfloat16", "bfloat16", None, 0.4, 0.9),
    "dense, both in bfloat16": Case("bfloat16", "bfloat16", "fp32", 0.15, None, DENSE),
}
IN_FORCE = CASES["both in bfloat16"]


def settings(case: Case, **changes: Any) -> dict[str, Any]:
    has_experts = case.model == MOE
    return {
        "policy__model_name": case.model,
        "policy__precision": case.trainer,
        "policy__generation__backend": "vllm",
        "policy__generation__vllm__dtype": case.engine,
        "policy__generation__max_new_tokens": 16,
        "policy__max_total_sequence_length": 64,
        "policy__megatron_cfg__moe_router_dtype": case.router,
        "policy__megatron_cfg__routing_replay": "none",
        "policy__megatron_cfg__capture_routing": has_experts,
        "policy__megatron_cfg__track_moe_metrics": has_experts,
        "policy__megatron_cfg__moe_per_layer_logging": has_experts,
        "policy__train_global_batch_size": 32,
        "policy__logprob_batch_size": 16,
        "grpo__num_prompts_per_step": 8,
        "grpo__max_num_steps": NUM_STEPS,
        **changes,
    }


def values(history: MetricHistory, key: str) -> list[float]:
    return [value for _, value in history[key]]


def shown(name: str, history: MetricHistory) -> None:
    """Print the means of the steps as a row of the table."""

    def mean(key: str) -> float:
        return statistics.fmean(values(history, key))

    cells = [
        f"{mean('train/sampling_logp_difference'):.2g}",
        f"{max(values(history, 'train/sampling_logp_difference_max')):.2g}",
        f"{mean('train/gen_kl_error'):.1e}",
    ]
    if f"{ROUTING}live_agreement" in history:
        agreement, slots = mean(f"{ROUTING}live_agreement"), mean(f"{ROUTING}slot_agreement")
        layers = [key for key in history if key.startswith(f"{ROUTING}live_agreement_layer_")]
        worst = min(layers, key=mean)
        cells += [
            f"{agreement:.4f}",
            f"{mean(worst):.4f} (layer {worst.rpartition('_')[2]})",
            # Of two experts each: a set that differs has one of them in common, or none.
            f"{2 * (slots - agreement):.4f}",
            f"{mean(f'{ROUTING}tokens_differing_share'):.3f}",
        ]
    print(f"\n| {name} | {' | '.join(cells)} |")


def assert_within(case: Case, history: MetricHistory) -> None:
    assert max(values(history, "train/sampling_logp_difference")) < case.mean
    if case.agreement is not None:
        assert set(values(history, f"{ROUTING}rows_usable_share")) == {1.0}
        assert min(values(history, f"{ROUTING}live_agreement")) > case.agreement


@pytest.mark.parametrize("name", CASES)
def test_engine_and_trainer_agree_within_their_formats(name: str, tmp_path: Path) -> None:
    history = train(tmp_path, **settings(CASES[name]))
    shown(name, history)
    assert 0.0 not in values(history, "train/grad_norm"), "the second step has other weights"
    assert values(history, "train/refit/checks_failed") == [0.0] * NUM_STEPS
    assert_within(CASES[name], history)


def test_replay_takes_the_engines_experts(tmp_path: Path) -> None:
    history = train(tmp_path, **settings(IN_FORCE, policy__megatron_cfg__routing_replay="rollout"))
    shown("both in bfloat16, replay", history)
    assert values(history, f"{ROUTING}agreement") == [1.0] * NUM_STEPS
    assert_within(IN_FORCE, history)


@pytest.mark.parametrize("fault", ["other_rotation", "other_experts"])
def test_a_fault_of_the_engine_leaves_the_bounds(fault: str, tmp_path: Path) -> None:
    """Copies of an MLP are the same, so that log-probabilities do not tell which of them routers name."""
    without_check = {"policy__generation__refit_check__enabled": False, "grpo__max_num_steps": 1}
    planted = ("-m", "tests.world.planted_engine", fault)
    history = train(tmp_path, program=planted, **settings(IN_FORCE, **without_check))
    shown(fault, history)
    with pytest.raises(AssertionError):
        assert_within(IN_FORCE, history)


@pytest.mark.parametrize("fault", ["stale", "other_rotation"])
def test_the_refit_check_ends_a_run_with_a_fault(fault: str, tmp_path: Path) -> None:
    """It does not see `other_experts`: routers have too many inputs to be read out, and log-probabilities agree."""
    done = run(tmp_path, program=("-m", "tests.world.planted_engine", fault), **settings(IN_FORCE))
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    print(f"\n{fault}: {done.stderr.splitlines()[-1]}")
    assert "policy.generation.refit_check" in done.stderr
