# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router losses of a rank's routers, in place of Megatron-Core's: shares of the mean over the global batch.

A share is this rank's part of a sum over the tokens or sequences of the global batch. Shares add up over microbatches
and ranks, as those of the algorithm's loss do, so that padding, packing and layout change nothing.
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
        tokens: Without padding, over all ranks.
        sequences: With at least one token, over all ranks.
        num_microbatches: Of each data-parallel rank.
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
        """Return the number of terms that a loss is the mean of."""
        return max(self.sequences if name == NAME_OF_BALANCING_TYPE["seq_aux_loss"] else self.tokens, 1)


@dataclass(frozen=True)
class SequencesOfTokens:
    """Sequence of each token that a rank's routers see in a microbatch.

    Attributes:
        sequence: `[tokens]`, in the routers' order; -1 on padding.
        is_token: `[tokens]`, 1 for tokens, 0 for padding.
    """

    sequence: Tensor
    is_token: Tensor
    num_sequences: int

    @classmethod
    def of(cls, sequence: Tensor, num_sequences: int) -> "SequencesOfTokens":
        return cls(sequence, (sequence >= 0).float(), num_sequences)


class RouterLosses:
    """The router losses of a rank's chunks.

    Attributes:
        is_on: A loss is enabled.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig):
        self.is_on = bool(config.num_moe_experts) and bool(auxiliary_loss_names(config))
        self.update = self.step = BatchSize(0, 0, 1)
        self._of_chunks: dict[int, SequencesOfTokens] = {}
        self._of_routers = [
            _LossesOfRouter(self, number, router)
            for number, chunk in enumerate(chunks if self.is_on else ())
            for _, router in routers_of(chunk.decoder)
        ]

    def start_step(self, shards: Sequence[GlobalBatchShard]) -> None:
        """Take the size of all global batches of a step, over which logged losses are means."""
        self.step = BatchSize.of(shards)

    def start_update(self, shard: GlobalBatchShard) -> None:
        """Take the size of the next global batch, over which the losses that train are means."""
        self.update = BatchSize.of([shard])
        for losses in self._of_routers:
            losses.load_so_far = None

    def set_tokens(self, chunk: int, tokens: SequencesOfTokens) -> None:
        """Set the microbatch that runs through a chunk next, forward or again in the backward pass."""
        self._of_chunks[chunk] = tokens

    def tokens(self, chunk: int) -> SequencesOfTokens:
        return self._of_chunks[chunk]


class _LossesOfRouter:
    """The losses of one router, called by its `routing`."""

    def __init__(self, losses: RouterLosses, chunk: int, router: Any):
        self._losses, self._chunk, self._router = losses, chunk, router
        self.load_so_far: Tensor | None = None
        router.apply_z_loss = self.attach_z_loss
        router._apply_aux_loss = self.attach_balancing_losses
        router._apply_seq_aux_loss = router._apply_global_aux_loss = _unchanged

    def attach_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits `[tokens, experts]`, whose backward pass adds the gradient of the z-loss."""
        coefficient = self._router.config.moe_z_loss_coeff
        if coefficient is None or not self._router.training or not torch.is_grad_enabled():
            return logits
        return self._attach(logits, Z_LOSS, coefficient, z_loss_sum(logits, self._tokens.is_token))

    def attach_balancing_losses(self, probs: Tensor, scores: Tensor, top_experts: Tensor, **_mask: Any) -> Tensor:
        """Return the probabilities, whose backward pass adds the gradients of all balancing losses.

        Args:
            scores: `[tokens, experts]`, of all experts.
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
        return self._losses.tokens(self._chunk)

    def _balancing_sum(self, name: str, scores: Tensor, assignments: Tensor) -> Tensor:
        router, tokens = self._router, self._tokens
        if name == NAME_OF_BALANCING_TYPE["seq_aux_loss"]:
            load = load_of_sequences(assignments, tokens.sequence, tokens.num_sequences)
            _add_up(load, router.tp_cp_group)
            return sequence_balancing_sum(scores, tokens.sequence, load, router.topk)
        load = load_of_tokens(assignments, tokens.is_token)
        if name != GLOBAL_BATCH_LOSS:
            _add_up(load, router.tp_cp_group)
        else:
            _add_up(load, router.tp_dp_cp_group)
            if self.load_so_far is not None:
                load += self.load_so_far
            self.load_so_far = load
        return balancing_sum(scores, tokens.is_token, load)

    def _attach(self, values: Tensor, name: str, coefficient: float, share: Tensor) -> Tensor:
        """Return the values, whose backward pass adds the gradient of a loss."""
        # share: This rank's sum of the loss over this microbatch.
        update, step = self._losses.update, self._losses.step
        # The schedule divides by the number of microbatches and the gradient reduction by the data-parallel size.
        scale = update.num_microbatches * parallel_state.get_data_parallel_world_size()
        logged = step.num_microbatches / (step.terms(name) * recorded_share(name))
        record_auxiliary_loss(name, share.detach() * logged, self._router.layer_number, self._router.config)
        return MoEAuxLossAutoScaler.apply(values, share * (coefficient * scale / update.terms(name)))


def counted_assignments(router: Any, top_experts: Tensor) -> Tensor:
    """Return `[tokens, experts]`, 1 if a token of a router's last pass counts for an expert in its balancing losses.

    A token counts for the experts that it goes to. With an expert bias it counts for the experts of highest score
    without the bias (DeepSeek-V3, equation 18): a bias that balances the load would otherwise leave no gradient. Of
    replayed experts, the configuration says whether they count.

    Args:
        top_experts: `[tokens, experts]`, True for the experts of highest score.
    """
    choice = router.router_replay
    counted = getattr(choice, "counted", None)
    if counted is None or (router.enable_expert_bias and not getattr(choice, "counts_replayed", False)):
        return top_experts.float()
    return experts_as_map(counted, top_experts.shape[-1]).float()


def _unchanged(probs: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
    """Replace the further balancing losses of `TopKRouter`, which `attach_balancing_losses` has attached."""
    return probs


def _add_up(load: Tensor, group: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(load, group=group)


def recorded_share(name: str) -> float:
    """Return the weight of one rank's recorded loss in the sum over all ranks.

    `RouterLosses` records what Megatron-Core's own routers do in other loops. For the micro-batch and sequence losses
    it is this rank's part of a sum over the tensor and context ranks, for the global-batch loss its part of a sum over
    the data-parallel ranks too, for the z-loss the mean over its own tokens. Reported is the mean over data-parallel
    ranks.
    """
    if name == GLOBAL_BATCH_LOSS:
        return 1.0
    data_parallel_size: int = parallel_state.get_data_parallel_world_size()
    if name == Z_LOSS:
        return 1.0 / (data_parallel_size * parallel_state.get_tensor_and_context_parallel_group().size())
    return 1.0 / data_parallel_size
