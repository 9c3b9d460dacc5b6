# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that nobody means are refused, and those that somebody trains with are not."""

from typing import get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.validation import expected, field_at, known_keys
from tests.unit.config.conftest import refused

M = "policy.megatron_cfg"
ANY_SIZE = {
    # In the units of the estimator, of the load or of log-probabilities; a value that is never reached is no harm.
    "grpo.advantage_clip_low",
    "grpo.advantage_clip_high",
    "logger.alerts.excess_cv",
    "logger.alerts.overload_factor",
    "policy.generation.refit_check.max_logprob_gap",
    # A negative value has a meaning of its own.
    f"{M}.moe_expert_capacity_factor",
    f"{M}.moe_expert_rank_capacity_factor",
    f"{M}.moe_paged_stash_buffer_size_factor_cuda",
    f"{M}.moe_router_force_biased",
}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (f"{M}.optimizer.adam_eps", "1e30", "a number above 0 and up to 1"),
        (f"{M}.optimizer.adam_eps", "0", "a number above 0 and up to 1"),
        (f"{M}.optimizer.adam_beta1", "1.0", "a number from 0 up and below 1"),
        (f"{M}.optimizer.weight_decay", "1e9", "a number from 0 to 10"),
        (f"{M}.optimizer.lr", "11", "a number above 0 and up to 10"),
        ("policy.max_grad_norm", "1e30", "a number above 0 and up to 1000000000 or null"),
        (f"{M}.moe_aux_loss_coeff", "1e6", "a number from 0 to 1000 or a list of numbers"),
        (f"{M}.moe_router_bias_update_rate", "-1", "a number from 0 to 1"),
        (f"{M}.moe_router_topk_scaling_factor", "-2.0", "a number above 0 and up to 1000 or null"),
        (f"{M}.moe_ffn_hidden_size", "-4", "a whole number above 0 or null"),
        (f"{M}.moe_layer_freq", "[1,2]", "a whole number above 0 or a list of whole numbers"),
        (f"{M}.distributed_timeout_minutes", "1000000000000", "a whole number above 0 and up to 1000000"),
        ("policy.generation.temperature", "1e-9", "a number from 0.01 to 100"),
        ("policy.generation.temperature", "1e30", "a number from 0.01 to 100"),
        ("grpo.val_temperature", "1e30", "a number from 0 to 100"),
        ("grpo.seed", "18446744073709551616", "a whole number from 0 to 4294967295"),
        ("grpo.rollouts.max_staleness", "1000000000000", "a whole number from 0 to 1000"),
        ("grpo.rollouts.target_lag", "1000000000000", "a whole number from 0 to 1000 or null"),
        ("loss_fn.reference_policy_kl_penalty", "1e30", "a number from 0 to 1000"),
        ("loss_fn.entropy_bonus", "1e30", "a number from 0 to 1000"),
        ("loss_fn.ratio_clip_max", "1e30", "a number from 0 to 1000000000"),
        ("loss_fn.importance_sampling_ratio_max", "1e30", "a number above 0 and up to 1000000000"),
        ("env.reward.num_workers", "1000000000", "a whole number above 0 and up to 4096"),
        ("cluster.cpu_workers_per_node", "1000000000", "a whole number above 0 and up to 4096"),
        ("cluster.gpus_per_node", "1000000000", "a whole number from 0 to 1024"),
        ("logger.alerts.missing_routes_share", "1.5", "a number above 0 and up to 1 or null"),
    ],
)
def test_what_nobody_means(name: str, value: str, words: str) -> None:
    (line,) = (
        problem
        for problem in refused(load_any_config, "grpo_tiny_moe.yaml", [f"+{name}={value}"], check_paths=False)
        if problem.startswith(f"{name}: ")
    )
    assert line.startswith(f"{name}: got ")
    assert line.endswith(f"expected {words}")


@pytest.mark.parametrize(
    "override",
    [
        f"{M}.optimizer.adam_eps=1",
        f"{M}.optimizer.adam_eps=1e-15",
        f"{M}.optimizer.adam_beta1=0",
        f"{M}.optimizer.weight_decay=0",
        f"{M}.optimizer.weight_decay=1.0",
        "policy.max_grad_norm=1e9",
        "policy.generation.temperature=0.01",
        "policy.generation.temperature=10",
        "grpo.val_temperature=100",
        "grpo.seed=4294967295",
        "loss_fn.reference_policy_kl_penalty=5",
        "loss_fn.importance_sampling_ratio_max=1e9",
        "loss_fn.ratio_clip_max=100",
        f"+{M}.moe_router_topk_scaling_factor=2.5",
        f"+{M}.moe_expert_capacity_factor=-1.0",
        f"+{M}.moe_layer_freq=[0,1]",
        f"+{M}.moe_router_bias_update_rate=0",
    ],
)
def test_what_somebody_trains_with(override: str) -> None:
    load_any_config("grpo_tiny_moe.yaml", [override], check_paths=False)


def test_every_number_that_is_no_count_has_both_ends() -> None:
    """A new one gets bounds, or a place in the list above with its reason."""
    without = set()
    for algorithm in ALGORITHMS.values():
        for key in known_keys(algorithm.config_class):
            _, field = field_at(algorithm.config_class, key.split("."))
            assert field is not None
            words = expected(field)
            if words.startswith("a number") and not _has_both_ends(field.annotation, field.metadata):
                without.add(key)
    assert without == ANY_SIZE


def _has_both_ends(annotation: object, metadata: list[object]) -> bool:
    """True where each kind of number in a type has a lower and an upper end."""
    kinds = {type(item) for item in metadata}
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if annotation is float or not inner:
        return bool(kinds & {Ge, Gt}) and bool(kinds & {Le, Lt})
    if hasattr(annotation, "__metadata__"):
        flat = [item for entry in annotation.__metadata__ for item in getattr(entry, "metadata", [entry])]
        return _has_both_ends(inner[0], [*metadata, *flat])
    return all(_has_both_ends(part, metadata) for part in inner)
