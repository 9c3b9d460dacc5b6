# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Expected gradient of the last router's losses, from their equations and coefficients.

Losses of later layers reach earlier routers through the model. The last router gets only the gradient of its own
losses, which can be computed from the router's input.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.megatron.layers.router_losses import counted_assignments, sum_over_group
from nemo_rl_moe.models.megatron.model.transformer_config import NAME_OF_BALANCING_TYPE
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, SequenceCut
from nemo_rl_moe.models.megatron.training.router_hooks import sequences_of_tokens
from nemo_rl_moe.routing.metrics.router_losses import (
    balancing_sum,
    load_of_sequences,
    load_of_tokens,
    router_scores,
    sequence_balancing_sum,
    z_loss_sum,
)
from nemo_rl_moe.routing.replay import experts_as_map


class ExpectedGradients(NamedTuple):
    """Gradients of a router's weight, `[experts, hidden]`.

    Attributes:
        uncancelled: Scale of the rounding errors in `balancing`: the gradient of the balancing losses as if no score
            fell when another score rises. In `balancing`, these terms cancel in part. If `balancing` is far
            shorter than `uncancelled`, it consists of rounding errors.
    """

    balancing: Tensor
    z_loss: Tensor
    uncancelled: Tensor


class RouterLossCheck:
    """Gradient that the model's last router should get from its losses.

    Args:
        router: The last router, or None on ranks without it.
    """

    def __init__(self, router: Any | None, config: TransformerConfig, cut: SequenceCut, device: torch.device):
        self._router, self._config, self._cut, self._device = router, config, cut, device
        self._topk = int(config.moe_router_topk)
        self._seen: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the router's inputs and counted experts of each microbatch while the context is open."""
        self._seen = []
        if self._router is None:
            yield
            return
        handle = self._router.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, router: Any, arguments: tuple[Tensor, ...], _outputs: Any) -> None:
        if not torch.is_grad_enabled():  # activation checkpointing repeats the pass with gradients
            return
        inputs = arguments[0].detach().flatten(0, 1)
        with torch.no_grad():
            scores = router_scores(self._logits(inputs, router.weight, torch.float32), router.score_function)
            top = experts_as_map(scores.topk(self._topk, dim=-1).indices, scores.shape[-1])
            self._seen.append((inputs, counted_assignments(router, top)))

    def _logits(self, inputs: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._router is not None
        bias = None if self._router.bias is None else self._router.bias.detach().to(dtype)
        return nn.functional.linear(inputs.to(dtype), weight.to(dtype), bias)

    def gradients(self, shard: GlobalBatchShard, microbatches: Sequence[ModelMicrobatch]) -> ExpectedGradients:
        """Return this rank's parts of the gradients. Every rank calls it.

        The parts of all ranks add up to the gradient of the recorded microbatches, scaled to a full global batch.
        """
        tokens, sequences = self._totals(shard)
        shape = (self._config.num_moe_experts, self._config.hidden_size)
        found = ExpectedGradients(*(torch.zeros(shape, device=self._device) for _ in range(3)))
        if self._router is None:
            return found
        weight = self._router.weight.detach().double().requires_grad_()
        factor = len(shard.microbatches) / len(microbatches)
        z_coefficient = self._config.moe_z_loss_coeff or 0.0
        so_far: Tensor | None = None
        for (inputs, assignments), microbatch in zip(self._seen, microbatches, strict=True):
            of_tokens = sequences_of_tokens(microbatch, self._cut)
            logits = of_tokens.of_tokens(self._logits(inputs, weight, torch.float64))
            is_token, assignments = self._is_token(microbatch).double(), of_tokens.of_tokens(assignments).double()
            scores = router_scores(logits, self._router.score_function)
            # As if no score fell when another score rises. With even loads these terms cancel except for rounding.
            alone = scores.detach() * logits
            balancing, uncancelled = weight.new_zeros(()), weight.new_zeros(())
            for kind in NAME_OF_BALANCING_TYPE:
                coefficient = self._router.get_aux_loss_coeff(kind)
                if not coefficient > 0:
                    continue
                if kind == "seq_aux_loss":
                    sequence = of_tokens.sequence.where(is_token > 0, -1)
                    rows = sum_over_group(
                        load_of_sequences(assignments, sequence, of_tokens.num_sequences), self._router.tp_cp_group
                    )
                    sums = [sequence_balancing_sum(each, sequence, rows, self._topk) for each in (scores, alone)]
                    terms = sequences
                else:
                    is_global = kind == "global_aux_loss"
                    group = self._router.tp_dp_cp_group if is_global else self._router.tp_cp_group
                    load = sum_over_group(load_of_tokens(assignments, is_token), group)
                    if is_global:
                        so_far = load = load if so_far is None else load + so_far
                    sums = [balancing_sum(each, is_token, load) for each in (scores, alone)]
                    terms = tokens
                balancing = balancing + coefficient * factor / terms * sums[0]
                uncancelled = uncancelled + coefficient * factor / terms * sums[1]
            z_loss = z_loss_sum(logits, is_token) * (z_coefficient * factor / tokens)
            for total, loss in zip(found, (balancing, z_loss, uncancelled), strict=True):
                total += _gradient(loss, weight)
        return found

    def _is_token(self, microbatch: ModelMicrobatch) -> Tensor:
        padding = microbatch.padding_mask
        if padding is None:
            padding = torch.zeros_like(microbatch.input_ids, dtype=torch.bool)
        return ~microbatch.in_router_order(padding, self._cut)

    def _totals(self, shard: GlobalBatchShard) -> tuple[float, float]:
        """Return the number of tokens, and the number of sequences with a token, over all data-parallel ranks."""
        lengths = torch.cat([batch.counted_lengths for batch in shard.microbatches])
        totals = torch.tensor([float(lengths.sum()), float((lengths > 0).sum())], device=self._device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        tokens, sequences = totals.clamp(min=1).tolist()
        return tokens, sequences


def _gradient(loss: Tensor, weight: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(weight, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    return gradient.float()
