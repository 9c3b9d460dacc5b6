# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer of a tiny model in its job, settings that many layouts are tried with, and batches for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch, per_sequence, per_token
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.tiny_model import MICROBATCHES, shard_of_rank, tiny_grpo_policy
from tests.support.training_run import Difference, RankRun, difference

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 8, 2
PACKED = {"sequence_packing__enabled": True}
CHUNKED = {"logprob_chunk_size": 7}
ZERO_1 = {"distributed_data_parallel_config__use_distributed_optimizer": True}
OVERLAP = {"distributed_data_parallel_config__overlap_grad_reduce": True}
EXPERT_BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
WITHOUT_LOSSES = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
UNTRACKED = {"track_moe_metrics": False, "moe_per_layer_logging": False}


def shard_for(
    trainer: Any, batch: TokenBatch, microbatches: Sequence[Sequence[int]] = MICROBATCHES
) -> GlobalBatchShard:
    """Return what this rank runs of a batch."""
    place = trainer.coordinates
    return shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, microbatches)


ADVANTAGES = (1.0, -0.5, 0.25, -1.5, 0.75, 0.5, -1.0, 0.5)


def with_advantages(batch: TokenBatch, advantages: Sequence[float] = ADVANTAGES) -> TokenBatch:
    logprobs = torch.full(batch.input_ids.shape, -3.0)
    return batch.with_columns(
        advantages=per_sequence(torch.tensor(advantages)), generation_logprobs=per_token(logprobs)
    )


def random_routes(batch: TokenBatch, seed: int = 11, num_experts: int = NUM_EXPERTS) -> Tensor:
    """Experts that no router would choose; -1 for the last token of each sequence and on padding."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*batch.input_ids.shape, NUM_LAYERS, num_experts, generator=generator)
    fed = torch.arange(batch.input_ids.shape[1]) < (batch.lengths - 1)[:, None]
    return scores.topk(TOPK, -1).indices.to(torch.int16).where(fed[:, :, None, None], -1)


def with_random_routes(batch: TokenBatch, seed: int = 11, num_experts: int = NUM_EXPERTS) -> TokenBatch:
    routes = random_routes(batch, seed, num_experts)
    return batch.with_columns(**{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)})


def replay_policy(world_size: int = 1, **changes: Any) -> Any:
    given = {"activation_checkpointing": "none", "routing_replay": "rollout", **changes}
    return tiny_grpo_policy(world_size, **given)


def load_counts(result: RankTrainResult) -> Any:
    """Return the assignments of each expert, `[layers, experts]`, on the rank that has them; None on others."""
    load = EXPERT_LOAD.of(result.artifacts)
    return None if load is None else load.counts.numpy().copy()


def policy_gradient_loss(*, prev_is_current: bool = True) -> PolicyGradientLoss:
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    return PolicyGradientLoss(config.loss_fn, prev_is_current=prev_is_current)


def assert_within(tolerance: Difference, runs: Sequence[RankRun], reference: RankRun) -> None:
    found = difference(runs, reference)
    for name, limit in vars(tolerance).items():
        assert getattr(found, name) <= limit, f"{name}: {found}"
