# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts that are handed to the routers of a full-size step, because nothing computes their logits there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch, per_token
from nemo_rl_moe.routing.metrics.overload_factor import overload_factors, rank_loads
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.routing.routers import moe_layer_indices
from nemo_rl_moe.runs.folder.capture_folder import read_description, read_step, steps_of


def overload_of_capture(folder: Path, ranks: int) -> float:
    """Return the highest load of a rank over the mean load, of all layers and steps of a capture."""
    description = read_description(folder)
    found = 1.0
    for step, files in steps_of(folder).items():
        for rows in read_step(description, step, files):
            for experts in torch.as_tensor(rows.columns["training_experts"]).unbind(1):
                counts = torch.bincount(experts[experts >= 0], minlength=description.num_experts)
                found = max(found, float(overload_factors(rank_loads(counts[None], ranks))))
    return found


def experts_of_tokens(num_tokens: int, transformer: TransformerConfig, ranks: int, overload: float) -> Tensor:
    """Return distinct experts of each token and layer with experts, `[tokens, layers, topk]`, int16.

    Args:
        ranks: Expert-parallel ranks. The first gets `overload` times the mean load, the others the rest in equal parts.
    """
    topk, num_experts = transformer.moe_router_topk, transformer.num_moe_experts
    layers = len(moe_layer_indices(transformer))
    of_rank = num_experts // ranks
    rows = torch.arange(num_tokens * topk, dtype=torch.float64)
    is_first = ((rows + 1) * overload / ranks).floor() > (rows * overload / ranks).floor()
    # Experts in turn, so that those of a token are distinct.
    of_others = of_rank + (~is_first).cumsum(0) % (num_experts - of_rank)
    in_turn = torch.where(is_first, is_first.cumsum(0) % of_rank, of_others)
    experts = in_turn.view(num_tokens, 1, topk).expand(-1, layers, -1)
    return experts.to(torch.int16)


def with_experts(shard: GlobalBatchShard, experts: Tensor) -> GlobalBatchShard:
    """Return the shard with experts as a rollout has captured them: all but the last token of a sequence have some."""

    def routed(batch: TokenBatch) -> TokenBatch:
        size, longest = batch.input_ids.shape
        fed = torch.arange(longest) < batch.lengths[:, None] - 1
        routes = torch.full((size, longest, *experts.shape[1:]), -1, dtype=experts.dtype)
        routes[fed] = experts[: int(fed.sum())]
        return batch.with_columns(**{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)})

    return replace(shard, microbatches=tuple(map(routed, shard.microbatches)))


class HandedInLogits:
    """Logits of all routers by which each token gets its experts, without replay.

    Attributes:
        experts: `[tokens, layers, topk]`; None leaves the logits alone.
    """

    def __init__(self, routers: Sequence[TopKRouter]):
        self.experts: Tensor | None = None
        for layer, router in enumerate(routers):
            router.gating = self._gating(router.gating, layer)

    def _gating(self, gating: Any, layer: int) -> Any:
        def handed_in(*args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = gating(*args, **kwargs)
            if self.experts is not None:
                chosen = self.experts[:, layer].long()
                wanted = torch.zeros(chosen.shape[0], logits.shape[-1]).scatter_(1, chosen, 1.0)
                logits.data.view(wanted.shape).copy_(wanted.to(logits.dtype))  # unseen by autograd
            return logits

        return handed_in
