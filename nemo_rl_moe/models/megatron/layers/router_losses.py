# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router losses as shares of the mean over the global batch. They replace Megatron-Core's router losses.

A share is this rank's part of a sum over the tokens or sequences of the global batch. Shares add up over microbatches
and ranks, as in the algorithm's loss, so padding, packing and layout do not change the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.megatron.model.releases import record_auxiliary_loss
from nemo_rl_moe.models.megatron.model.transformer_config import (
    GLOBAL_BATCH_LOSS,
    NAME_OF_BALANCING_TYPE,
    Z_LOSS,
    auxiliary_loss_names,
)
from nemo_rl_moe.routing.metrics.router_losses import (
    balancing_sum,
    load_of_sequences,
    load_of_tokens,
    sequence_balancing_sum,
    z_loss_sum,
)
from nemo_rl_moe.routing.replay import experts_as_map
from nemo_rl_moe.routing.routers import routers_of


@dataclass(frozen=True)
class BatchSize:
    """Size of one global batch or of several.

    Attributes:
        tokens: Number of tokens on all ranks, without padding.
        sequences: Number of sequences on all ranks with at least one token.
        num_microbatches: Number of microbatches of each data-parallel rank.
    """

    tokens: int
    sequences: int
    num_microbatches: int

    @classmethod
    def of(cls, shards: Sequence[GlobalBatchShard]) -> "BatchSize":
        return cls(
            tokens=sum(shard.global_tokens for shard in shards),
            sequences=sum(shard.global_rows for shard in shards),
            num_microbatches=sum(len(shard.microbatches) for shard in shards),
        )

    def terms(self, name: str) -> int:
        """Return the number of tokens or sequences over which the loss with this name is averaged."""
        return max(self.sequences if name == NAME_OF_BALANCING_TYPE["seq_aux_loss"] else self.tokens, 1)


@dataclass(frozen=True)
class SequencesOfTokens:
    """Sequence of each token that a rank's routers see in a microbatch.

    Attributes:
        sequence: `[tokens]`, index of each token's sequence, in the routers' order. -1 on padding.
        is_token: `[tokens]`, 1 for tokens, 0 for padding.
        copies: `[tokens]`, the routers' token for each of these tokens, if sequences share tokens. Otherwise None.
    """

    sequence: Tensor
    is_token: Tensor
    num_sequences: int
    copies: Tensor | None = None

    @classmethod
    def of(cls, sequence: Tensor, num_sequences: int, copies: Tensor | None = None) -> "SequencesOfTokens":
        return cls(sequence, (sequence >= 0).float(), num_sequences, copies)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return a router's values, `[its tokens, ...]`, for the tokens of the sequences, `[tokens, ...]`."""
        return values if self.copies is None else values[self.copies]


class RouterLosses:
    """The router losses of a rank's chunks.

    Attributes:
        is_on: Whether a loss is enabled.
        update: Size of the current global batch. Training losses are means over this batch.
        step: Size of all global batches of a step. Logged losses are means over all of them.
        tokens: Index of a chunk -> sequence of each token in the microbatch that runs through the chunk.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig):
        self.is_on = bool(config.num_moe_experts) and bool(auxiliary_loss_names(config))
        self.update = self.step = BatchSize(0, 0, 1)
        self.tokens: dict[int, SequencesOfTokens] = {}
        self._of_routers = [
            _LossesOfRouter(self, number, router)
            for number, chunk in enumerate(chunks if self.is_on else ())
            for _, router in routers_of(chunk)
        ]

    def start_step(self, shards: Sequence[GlobalBatchShard]) -> None:
        self.step = BatchSize.of(shards)

    def start_update(self, shard: GlobalBatchShard) -> None:
        self.update = BatchSize.of([shard])
        for losses in self._of_routers:
            losses.load_so_far = None

    def set_tokens(self, chunk: int, tokens: SequencesOfTokens) -> None:
        """Set the microbatch that runs through a chunk next, in its forward pass or when it is recomputed."""
        self.tokens[chunk] = tokens


class _LossesOfRouter:
    """The losses of one router. Methods of this class replace the loss methods that the router's `routing` calls."""

    def __init__(self, losses: RouterLosses, chunk: int, router: Any):
        self._losses, self._chunk, self._router = losses, chunk, router
        self.load_so_far: Tensor | None = None
        router.apply_z_loss = self.attach_z_loss
        router._apply_aux_loss = self.attach_balancing_losses
        router._apply_seq_aux_loss = router._apply_global_aux_loss = _unchanged

    def attach_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits `[tokens, experts]` with the z-loss attached to their backward pass."""
        coefficient = self._router.config.moe_z_loss_coeff
        if coefficient is None or not self._router.training or not torch.is_grad_enabled():
            return logits
        return self._attach(
            logits, Z_LOSS, coefficient, z_loss_sum(self._tokens.of_tokens(logits), self._tokens.is_token)
        )

    def attach_balancing_losses(self, probs: Tensor, scores: Tensor, top_experts: Tensor, **_mask: Any) -> Tensor:
        """Return the probabilities with all balancing losses attached to their backward pass.

        Args:
            scores: Router scores `[tokens, experts]` from which the losses are computed.
            top_experts: `[tokens, experts]`, True for the experts of highest score.
        """
        assignments = counted_assignments(self._router, top_experts)
        for kind, name in NAME_OF_BALANCING_TYPE.items():
            coefficient = self._router.get_aux_loss_coeff(kind)
            if coefficient > 0:
                probs = self._attach(probs, name, coefficient, self._balancing_sum(name, scores, assignments))
        return probs

    @property
    def _tokens(self) -> SequencesOfTokens:
        return self._losses.tokens[self._chunk]

    def _balancing_sum(self, name: str, scores: Tensor, assignments: Tensor) -> Tensor:
        router, tokens = self._router, self._tokens
        scores, assignments = tokens.of_tokens(scores), tokens.of_tokens(assignments)
        if name == NAME_OF_BALANCING_TYPE["seq_aux_loss"]:
            load = load_of_sequences(assignments, tokens.sequence, tokens.num_sequences)
            load = sum_over_group(load, router.tp_cp_group)
            return sequence_balancing_sum(scores, tokens.sequence, load, router.topk)
        load = load_of_tokens(assignments, tokens.is_token)
        if name != GLOBAL_BATCH_LOSS:
            load = sum_over_group(load, router.tp_cp_group)
        else:
            load = sum_over_group(load, router.tp_dp_cp_group)
            if self.load_so_far is not None:
                load += self.load_so_far
            self.load_so_far = load
        return balancing_sum(scores, tokens.is_token, load)

    def _attach(self, values: Tensor, name: str, coefficient: float, share: Tensor) -> Tensor:
        """Return the values with a loss attached to their backward pass.

        Args:
            share: This rank's sum of the loss over the microbatch, before the coefficient and the mean.
        """
        update, step = self._losses.update, self._losses.step
        # The schedule divides by the number of microbatches, and the gradient reduction by the data-parallel size. This
        # factor undoes both divisions.
        scale = update.num_microbatches * parallel_state.get_data_parallel_world_size()
        if self._router.layer_number <= self._router.config.num_layers:  # metrics are of the decoder's layers
            logged = step.num_microbatches / (step.terms(name) * recorded_share(name))
            record_auxiliary_loss(name, share.detach() * logged, self._router.layer_number, self._router.config)
        return MoEAuxLossAutoScaler.apply(values, share * (coefficient * scale / update.terms(name)))


def counted_assignments(router: Any, top_experts: Tensor) -> Tensor:
    """Return `[tokens, experts]`, 1 if the balancing losses count a token of the last pass as load of an expert.

    A token is load of its chosen experts. With an expert bias, it is load of the experts with the highest scores
    without the bias (DeepSeek-V3, equation 18). Otherwise the losses would have no gradient once the bias balances the
    load. The configuration decides whether replayed experts count.

    Args:
        top_experts: `[tokens, experts]`, True for the experts of highest score.
    """
    choice = router.router_replay
    counted = getattr(choice, "counted", None)
    if counted is None or (router.enable_expert_bias and not getattr(choice, "counts_replayed", False)):
        return top_experts.float()
    return experts_as_map(counted, top_experts.shape[-1]).float()


def _unchanged(probs: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
    """Return the probabilities. Replaces two losses of `TopKRouter` that `attach_balancing_losses` includes."""
    return probs


def sum_over_group(load: Tensor, group: Any) -> Tensor:
    """Sum a load over the ranks of a group in place, and return it."""
    if group.size() > 1:
        dist.all_reduce(load, group=group)
    return load


def recorded_share(name: str) -> float:
    """Return the weight of one rank's recorded loss. The weighted sum over all ranks is the data-parallel mean.

    `RouterLosses` records the same values as Megatron-Core's routers do in other loops:

    - micro-batch and sequence losses: this rank's part of a sum over the tensor and context ranks
    - global-batch loss: this rank's part of a sum over the tensor, context and data-parallel ranks
    - z-loss: the mean over this rank's tokens
    """
    if name == GLOBAL_BATCH_LOSS:
        return 1.0
    data_parallel_size: int = parallel_state.get_data_parallel_world_size()
    if name == Z_LOSS:
        return 1.0 / (data_parallel_size * parallel_state.get_tensor_and_context_parallel_group().size())
    return 1.0 / data_parallel_size
