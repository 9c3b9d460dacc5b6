# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives and estimators that need a pass over all tokens of a step compute the same in every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.functional import grpo_runs, sft_runs
from tests.support.loggers import read_jsonl
from tests.support.quick_list import full, slow

pytestmark = pytest.mark.shared_ray

PARTS: dict[str, dict[str, Any]] = {
    "clip_cov": {
        "loss_fn__objective": "clip_cov",
        "loss_fn__cov_ratio": 0.5,
        "loss_fn__clip_cov_min": 0.02,
        "grpo__adv_estimator__name": "optimal_token_baseline",
        "grpo__adv_estimator__normalize_rewards": False,
        # One update a step: its pass is for the selection alone.
        "policy__logprob_batch_size": 2,
    },
    "kl_cov": {
        "loss_fn__objective": "kl_cov",
        "loss_fn__cov_ratio": 0.3,
        "policy__train_global_batch_size": 8,
        "grpo__adv_estimator__name": "maxrl",
        "grpo__adv_estimator__normalize_rewards": False,
        "grpo__zero_variance_filtering": True,
    },
    "dppo_kl": {
        "loss_fn__objective": "dppo_kl",
        "loss_fn__ratio_clip_max": 1e-4,
        "policy__train_global_batch_size": 8,
        "policy__megatron_cfg__optimizer__lr": 1e-3,
    },
    "gmpo": {
        "loss_fn__objective": "gmpo",
        "loss_fn__token_level_loss": False,
        "loss_fn__ratio_clip_max": 0.01,
        "policy__train_global_batch_size": 8,
        "policy__megatron_cfg__optimizer__lr": 1e-3,
    },
    "sapo": {"loss_fn__objective": "sapo", "policy__train_global_batch_size": 8},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2, packed": {"policy__sequence_packing__enabled": True, "policy__sequence_packing__train_mb_tokens": 100},
    "tp2": {
        "policy__megatron_cfg__tensor_model_parallel_size": 2,
        "policy__megatron_cfg__sequence_parallel": True,
    },
    "pp2": {"policy__megatron_cfg__pipeline_model_parallel_size": 2},
    "ep2": {"policy__megatron_cfg__expert_model_parallel_size": 2, "policy__train_micro_batch_size": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("data"), 40)


def first_step(folder: Path, data: Path, **changes: Any) -> dict[str, float]:
    """The metrics of the first step of a run."""
    (folder / "work").mkdir(parents=True)
    keys = {
        "grpo__max_num_steps": 1,
        "data__validation": None,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        # An auxiliary loss depends on microbatches.
        "policy__megatron_cfg__moe_router_load_balancing_type": "none",
        "policy__megatron_cfg__moe_aux_loss_coeff": 0.0,
    }
    overrides = grpo_runs.settings(folder, data, **keys, **sft_runs.only_jsonl(), **changes)
    overrides = [override for override in overrides if not override.startswith("data.validation.path=")]
    grpo_runs.run_here(overrides, folder / "work")
    history = read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")
    return {key: values[0][1] for key, values in history.items()}


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        ("kl_cov", "pp2"),
        full("clip_cov", "tp2"),
        full("kl_cov", "ep2"),
        slow("clip_cov", "dp2, packed"),
        slow("kl_cov", "tp2"),
        slow("clip_cov", "pp2"),
        slow("clip_cov", "ep2"),
        *(slow(part, layout) for part in ("dppo_kl", "gmpo", "sapo") for layout in ("tp2", "ep2")),
    ],
)
def test_a_step_is_the_same_in_every_layout(part: str, layout: str, tmp_path: Path, data: Path) -> None:
    plain = first_step(tmp_path / "plain", data, **PARTS[part])
    other = first_step(tmp_path / "other", data, **PARTS[part] | LAYOUTS[layout])
    if part.endswith("cov"):
        assert plain["train/selected_token_fraction"] == other["train/selected_token_fraction"] > 0
    keys = ["loss", "grad_norm", "probs_ratio", "clip_fraction_high", "clip_fraction_low", "num_valid_tokens"]
    keys += ["advantages/mean", "advantages/min", "advantages/max", "reward"]
    found, expected = ({key: metrics[f"train/{key}"] for key in keys} for metrics in (other, plain))
    assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)
    if part in ("dppo_kl", "gmpo"):
        assert expected["clip_fraction_high"] > 0
