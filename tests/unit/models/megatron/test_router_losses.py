# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the router losses alone, against float64: in every layout, however the batch is cut and padded."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.layers.router_losses import SequencesOfTokens
from nemo_rl_moe.routing.metrics.router_losses import (
    balancing_sum,
    load_of_sequences,
    load_of_tokens,
    router_scores,
    sequence_balancing_sum,
    z_loss_sum,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import some_of
from tests.support.router_loss_runs import (
    ALL_KINDS,
    LOGGED,
    LOSSES,
    Found,
    LossRun,
    Rules,
    joined,
    largest_difference,
    reference_losses,
    run_losses,
)
from tests.support.tiny_model import layout, parallel_job, tiny_grpo_policy, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step

MODEL = {"mlp_only_layers": [1]}
EVEN = ((0, 1), (2, 3), (4, 5), (6, 7))
UNEVEN = ((0, 1, 2), (3,), (4, 5), (6, 7))
FILLED = ((0, 1, 2), (3, 8), (9,), (4, 5), (6, 7), (10,), (11,), (12,))
BATCHING: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "padded": (EVEN, {}),
    "uneven": (UNEVEN, {}),
    "fillers": (FILLED, {}),
    "packed": (UNEVEN, {"sequence_packing__enabled": True}),
    "packed_fillers": (FILLED, {"sequence_packing__enabled": True}),
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, data-parallel ranks, sizes
    "one": (1, 1, {}),
    "dp2": (2, 2, {}),
    "dp4": (4, 4, {}),
    "tp2": (2, 1, layout(tp=2)),
    "pp2": (2, 1, layout(pp=2)),
    "vpp2": (2, 1, layout(pp=2, vpp=2)),
    "ep2": (2, 2, layout(ep=2)),
    "tp2_pp2": (4, 1, layout(tp=2, pp=2)),
}
RECOMPUTATION = ("none", "full")
PLAIN = {
    "activation_checkpointing": "none",
    "distributed_data_parallel_config__use_distributed_optimizer": False,
    "track_moe_metrics": False,
    "moe_per_layer_logging": False,
}
# Of float32 passes beside float64 losses, the largest share measured is 2e-6.
CLOSE = 1e-5


def policy_for(num_ranks: int, **changes: Any) -> PolicyConfig:
    return tiny_policy(num_ranks, **{**PLAIN, **ALL_KINDS, "moe_z_loss_coeff": 1.0, **changes})


def without_losses(**changes: Any) -> PolicyConfig:
    return tiny_policy(1, **{**PLAIN, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, **changes})


@cache
def expected(microbatches: tuple[tuple[int, ...], ...], data_parallel_size: int) -> Found:
    run = LossRun(without_losses(), microbatches, MODEL)
    (found,) = run_ranks(reference_losses, 1, run, Rules(topk=2), data_parallel_size)
    return found


def assert_same(found: Found, wanted: Found, losses: tuple[str, ...] = LOSSES) -> None:
    for name in losses:
        share, parameter = largest_difference(found.gradients[name], wanted.gradients[name])
        assert share < CLOSE, (name, parameter, share)
        for key, value in wanted.logged[name].items():
            assert found.logged[name][key] == pytest.approx(value, rel=1e-5), key
        others = [LOGGED[other] for other in losses if other != name]
        assert not any(found.logged[name].get(key, 0.0) for key in others)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("where", "batching", "recomputation"), some_of(list(product(LAYOUTS, BATCHING, RECOMPUTATION)), 9, most=35)
)
def test_gradients_and_logs_of_router_losses(where: str, batching: str, recomputation: str) -> None:
    num_ranks, data_parallel_size, sizes = LAYOUTS[where]
    microbatches, changes = BATCHING[batching]
    policy = policy_for(num_ranks, **sizes, **changes, activation_checkpointing=recomputation)
    found = joined(run_ranks(run_losses, num_ranks, LossRun(policy, microbatches, MODEL)), LOSSES)
    assert_same(found, expected(microbatches, data_parallel_size))


# Scores, groups, bias, shared experts, dense layers


FAMILIES: dict[str, tuple[Rules, bool]] = {  # rules, whether there is an expert bias
    "deepseek_v2": (Rules(topk=3), False),  # the first layer is dense, shared experts
    "deepseek_v2_groups": (Rules(topk=4, groups=(4, 2)), False),
    "deepseek_v3": (Rules(topk=3, sigmoid=True), True),  # groups limit the choice, not what counts
    "deepseek_v3_moonlight": (Rules(topk=3, sigmoid=True), True),
    "qwen2_moe_dense_layers_normalized_weights": (Rules(topk=3), False),
}
FAMILY_LAYOUTS = ("one", "dp2", "tp2", "pp2", "ep2")


@cache
def expected_of_family(family: str, data_parallel_size: int) -> Found:
    rules, with_bias = FAMILIES[family]
    run = LossRun(without_losses(), UNEVEN, family, with_bias=with_bias)
    (found,) = run_ranks(reference_losses, 1, run, rules, data_parallel_size)
    return found


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("family", "where", "batching"), some_of(list(product(FAMILIES, FAMILY_LAYOUTS, ("uneven", "packed"))), 3, most=23)
)
def test_families(family: str, where: str, batching: str) -> None:
    num_ranks, data_parallel_size, sizes = LAYOUTS[where]
    _, changes = BATCHING[batching]
    policy = policy_for(num_ranks, **sizes, **changes)
    run = LossRun(policy, UNEVEN, family, with_bias=FAMILIES[family][1])
    assert_same(joined(run_ranks(run_losses, num_ranks, run), LOSSES), expected_of_family(family, data_parallel_size))


@pytest.mark.megatron
@pytest.mark.full
def test_groups_of_a_family_without_groups_of_its_own() -> None:
    # Megatron-Core adds up as many scores of a group as a token takes of it.
    groups, rules = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, Rules(2, groups=(2, 1), best_of_group=2)
    (wanted,) = run_ranks(reference_losses, 1, LossRun(without_losses(**groups), UNEVEN), rules, 1)
    found = joined(run_ranks(run_losses, 1, LossRun(policy_for(1, **groups), UNEVEN)), LOSSES)
    assert_same(found, wanted)
    (without_groups,) = run_ranks(reference_losses, 1, LossRun(without_losses(**groups), UNEVEN), Rules(topk=2), 1)
    assert largest_difference(found.gradients["aux_loss"], without_groups.gradients["aux_loss"])[0] > 0.1


# Replay


@cache
def expected_under_replay(counted: str, data_parallel_size: int) -> Found:
    changes = {**PLAIN, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    policy = tiny_grpo_policy(1, **changes, routing_replay="rollout", routing_replay_load=counted)
    run = LossRun(policy, UNEVEN, with_routes=True)
    (found,) = run_ranks(reference_losses, 1, run, Rules(topk=2), data_parallel_size, counted)
    return found


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("counted", "where", "batching"),
    some_of(list(product(("live", "replayed"), ("one", "tp2", "pp2", "ep2"), ("uneven", "packed"))), 2),
)
def test_replayed_experts_count_where_the_configuration_says_so(counted: str, where: str, batching: str) -> None:
    num_ranks, data_parallel_size, sizes = LAYOUTS[where]
    _, changes = BATCHING[batching]
    policy = tiny_grpo_policy(
        num_ranks,
        **{**PLAIN, **ALL_KINDS, **sizes, **changes},
        moe_z_loss_coeff=1.0,
        routing_replay="rollout",
        routing_replay_load=counted,
    )
    run = LossRun(policy, UNEVEN, with_routes=True)
    assert_same(
        joined(run_ranks(run_losses, num_ranks, run), LOSSES), expected_under_replay(counted, data_parallel_size)
    )


# Noise


def losses_of_passes(policy: PolicyConfig) -> tuple[list[float], float]:
    """Return the loss of two evaluations and of a training pass, all with the same weights."""
    with parallel_job(policy):
        settings = RunSettings(policy)
        trainer = build_trainer(settings.policy, settings.model)
        shard = shard_of_step(trainer, settings, 0)
        evaluated = [trainer.evaluate(shard, sft_loss)["loss"].reduce() for _ in range(2)]
        return evaluated, trainer.train([shard], sft_loss).global_loss


NOISE: dict[str, dict[str, Any]] = {
    "jitter": {"moe_input_jitter_eps": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.5, "moe_token_dispatcher_type": "alltoall"},
    "padded capacity": {
        "moe_expert_capacity_factor": 0.5,
        "moe_token_dispatcher_type": "alltoall",
        "moe_pad_expert_input_to_capacity": True,
    },
}


@pytest.mark.megatron
@pytest.mark.parametrize("name", NOISE)
def test_noise_acts_in_training_passes_alone(name: str) -> None:
    ((plain, trained),) = run_ranks(losses_of_passes, 1, tiny_policy(1))
    assert plain == pytest.approx([trained] * 2, rel=1e-6)
    ((evaluated, with_noise),) = run_ranks(losses_of_passes, 1, tiny_policy(1, **NOISE[name]))
    assert evaluated == pytest.approx(plain, rel=1e-6)
    assert abs(with_noise - trained) > 1e-5


# Ranks that share sequences


def test_sums_of_ranks_that_share_sequences_are_those_of_one_rank() -> None:
    """Context parallelism needs an attention that CPUs lack: its ranks hold columns of every sequence."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 8, generator=generator, requires_grad=True)
    sequence = torch.tensor([0] * 9 + [-1] * 3 + [1] * 5 + [2] * 4 + [-1] * 3)
    assignments = torch.zeros(24, 8).scatter_(1, logits.topk(2).indices, 1.0)

    def sums(parts: list[list[int]]) -> list[torch.Tensor]:
        of_ranks = [SequencesOfTokens.of(sequence[part], 3) for part in parts]
        load = sum(load_of_tokens(assignments[part], each.is_token) for part, each in zip(parts, of_ranks, strict=True))
        rows = sum(
            load_of_sequences(assignments[part], each.sequence, 3) for part, each in zip(parts, of_ranks, strict=True)
        )
        totals = [torch.zeros(()) for _ in range(3)]
        for part, each in zip(parts, of_ranks, strict=True):
            scores = router_scores(logits[part], "softmax")
            totals[0] = totals[0] + balancing_sum(scores, each.is_token, load)
            totals[1] = totals[1] + sequence_balancing_sum(scores, each.sequence, rows, topk=2)
            totals[2] = totals[2] + z_loss_sum(logits[part], each.is_token)
        return totals

    alone, shared = sums([list(range(24))]), sums([[*range(6), *range(18, 24)], list(range(6, 18))])
    for one, both in zip(alone, shared, strict=True):
        torch.testing.assert_close(both, one)
        gradients = [torch.autograd.grad(total, logits, retain_graph=True)[0] for total in (one, both)]
        torch.testing.assert_close(gradients[1], gradients[0])
