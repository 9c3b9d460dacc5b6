# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What DPO's settings are refused with."""

import pytest

from nemo_rl_moe.config.loading import load_dpo_config
from tests.unit.config.conftest import Problems, about_keys

REFUSED = {
    "dpo.preference_loss_type=apo": "got 'apo' (str), expected one of sigmoid, robust, hinge, ipo, apo_zero,",
    "dpo.reference_logprobs=before": "got 'before' (str), expected in_step or precompute",
    "dpo.reference_logprobs=beforehand": "got 'beforehand', which is now called precompute",
    "dpo.reference_policy_kl_penalty=0.0": "got 0.0 (float), expected a number above 0",
    "dpo.label_smoothing=0.5": "got 0.5 (float), expected a number from 0 up and below 0.5",
    "dpo.beta=0.1": "unknown key",
}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        *about_keys(REFUSED),
        (
            "dpo.preference_loss_weight=0.0",
            "dpo.preference_loss_weight and dpo.sft_loss_weight: both are 0, so that nothing would be trained",
        ),
    ],
)
def test_wrong_settings(dpo_problems_of: Problems, override: str, problem: str) -> None:
    assert dpo_problems_of(override)[0].startswith(problem)


@pytest.mark.parametrize("kind", ["ipo", "hinge", "apo_zero", "apo_down"])
def test_smoothing_needs_labels(dpo_problems_of: Problems, kind: str) -> None:
    assert dpo_problems_of(f"dpo.preference_loss_type={kind}", "dpo.label_smoothing=0.1") == [
        f"dpo.label_smoothing: got 0.1, expected 0 with dpo.preference_loss_type {kind}, which does not read it;"
        " sigmoid and robust do"
    ]
    load_dpo_config("dpo_tiny_moe.yaml", [f"dpo.preference_loss_type={kind}"], check_paths=False)


def test_robust_needs_smoothing(dpo_problems_of: Problems) -> None:
    assert dpo_problems_of("dpo.preference_loss_type=robust") == [
        "dpo.label_smoothing: got 0, expected a number above 0 with dpo.preference_loss_type robust, which without it"
        " is sigmoid"
    ]
    robust = ["dpo.preference_loss_type=robust", "dpo.label_smoothing=0.1"]
    load_dpo_config("dpo_tiny_moe.yaml", robust, check_paths=False)


@pytest.mark.parametrize("kind", ["sequence_packing", "dynamic_batching"])
def test_a_token_budget_holds_both_sequences_of_a_pair(dpo_problems_of: Problems, kind: str) -> None:
    assert dpo_problems_of(f"policy.{kind}.enabled=true", f"policy.{kind}.train_mb_tokens=127") == [
        f"policy.{kind}.train_mb_tokens: got 127, expected at least 2 x policy.max_total_sequence_length = 128,"
        " as the sequences of a pair run together"
    ]
    enough = [f"policy.{kind}.enabled=true", f"policy.{kind}.train_mb_tokens=128"]
    load_dpo_config("dpo_tiny_moe.yaml", enough, check_paths=False)


def test_missing_files_are_reported(dpo_problems_of: Problems) -> None:
    problems = dpo_problems_of("data.train.path=no/such.jsonl", "data.validation.path=nor/this.jsonl", check_paths=True)
    assert [problem.split(":")[0] for problem in problems if problem.startswith("data.")] == [
        "data.train.path",
        "data.validation.path",
    ]
