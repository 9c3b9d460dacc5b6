# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router settings that contradict each other or the algorithm, and what they are refused with."""

from collections.abc import Callable

import pytest

from nemo_rl_moe.config.loading import load_any_config, load_grpo_config
from tests.unit.config.conftest import problems_with

M = "policy.megatron_cfg"
WHY = "the algorithm compares a token's probability in several passes, and"
COMPARING = ("grpo_tiny_moe.yaml", "ppo_tiny_moe.yaml", "distillation_tiny_moe.yaml", "dpo_tiny_moe.yaml")
NOISE = {
    f"{M}.moe_input_jitter_eps=0.1": f"{M}.moe_input_jitter_eps: got 0.1, expected null: {WHY} noise at the router"
    " changes it from pass to pass; only SFT and reward models accept this setting",
    f"{M}.moe_expert_capacity_factor=1.5": f"{M}.moe_expert_capacity_factor: got 1.5, expected null: {WHY} dropped"
    " assignments make it depend on the other sequences of its microbatch; only SFT and reward models accept this"
    " setting",
    f"{M}.moe_router_load_balancing_type=sinkhorn": f"{M}.moe_router_load_balancing_type: got sinkhorn, expected"
    f" aux_loss, seq_aux_loss, global_aux_loss or none: {WHY} sinkhorn uses another routing rule in training than in"
    " other passes; only SFT and reward models accept this setting",
}


@pytest.mark.parametrize("exemplar", COMPARING)
@pytest.mark.parametrize("override", NOISE)
def test_noise_is_refused_where_probabilities_are_compared(exemplar: str, override: str) -> None:
    assert problems_with(load_any_config, exemplar)(override) == [NOISE[override]]


@pytest.mark.parametrize("exemplar", ["sft_tiny_moe.yaml", "rm_tiny_moe.yaml"])
@pytest.mark.parametrize("override", NOISE)
def test_noise_is_taken_where_nothing_is_compared(exemplar: str, override: str) -> None:
    load_any_config(exemplar, [override], check_paths=False)


def test_a_negative_capacity_is_none() -> None:
    load_grpo_config("grpo_tiny_moe.yaml", [f"{M}.moe_expert_capacity_factor=-1.0"], check_paths=False)


LISTS = {
    "[aux_loss, seq_aux_loss, aux_loss]": "got aux_loss 2 times, expected it once, with the sum of its coefficients",
    "[aux_loss, sinkhorn]": "got sinkhorn in a list, expected aux_loss, seq_aux_loss and global_aux_loss"
    " there; sinkhorn must be the only type",
}


@pytest.mark.parametrize("kinds", LISTS)
def test_a_list_holds_losses_alone_and_each_once(problems_of: Callable[..., list[str]], kinds: str) -> None:
    key, coefficients = f"{M}.moe_router_load_balancing_type", [0.1] * len(kinds.split(","))
    assert problems_of(f"{key}={kinds}", f"{M}.moe_aux_loss_coeff={coefficients}") == [f"{key}: {LISTS[kinds]}"]
