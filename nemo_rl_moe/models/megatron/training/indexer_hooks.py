# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks on the indexers of a rank's chunks. They replay a microbatch's captured positions, and count the agreement.

Attention gets the positions of a microbatch before a chunk's forward pass, and again when its backward pass begins, as
routers get routes (`router_hooks`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.megatron.layers.sparse_attention import SparseSelfAttention
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, first_tokens
from nemo_rl_moe.routing.agreement.indexer_rows import Indexed, indexer_anomalies, overlap_of
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS, CapturedKeys, ChosenKeys, num_common
from nemo_rl_moe.token_lag import TOKEN_LAG


@dataclass(frozen=True)
class IndexerReport:
    """Agreement of a step's indexers with the captured positions, and what is wrong with these."""

    metrics: dict[str, float]
    anomalies: tuple[RoutingAnomaly, ...]


class IndexerHooks:
    """Hooks on all indexers of this rank. Every pass over a batch with captured positions replays them.

    Attributes:
        layers: Indices of the model's layers with an indexer.
        topk: Number of positions of a row.
    """

    def __init__(self, chunks: Sequence[GPTModel], layers: Sequence[int], topk: int, device: torch.device):
        self.layers, self.topk = tuple(layers), topk
        of_layer = {layer: position for position, layer in enumerate(layers)}
        self._attentions: list[dict[int, SparseSelfAttention]] = [
            {
                of_layer[layer.layer_number - 1]: layer.self_attention
                for layer in chunk.decoder.layers
                if layer.self_attention.indexer is not None
            }
            for chunk in chunks
        ]
        # The ranks that share a sequence know the same choices.
        self._counts_rows = parallel_state.get_tensor_model_parallel_rank() == 0
        self._counts = torch.zeros(len(layers), len(Indexed), dtype=torch.long, device=device)
        self._has_older_weights = False
        self._last: tuple[ModelMicrobatch, CapturedKeys] | None = None

    @property
    def positions(self) -> list[list[int]]:
        """For each chunk, the indices of its layers with an indexer among all such layers of the model."""
        return [sorted(attentions) for attentions in self._attentions]

    @contextmanager
    def forward(self, chunk: int, microbatch: ModelMicrobatch, *, counts: bool) -> Iterator[None]:
        """Replay the captured positions in the forward pass of a chunk over one microbatch.

        Args:
            counts: Whether the pass counts in the step's statistics.
        """
        captured = self._captured(microbatch)
        counts = counts and captured is not None and self._counts_rows
        self._give(chunk, microbatch, captured)
        for attention in self._attentions[chunk].values():
            attention.seen = [] if counts else None
        try:
            yield
            if counts and captured is not None:
                self._count(chunk, microbatch, captured)
        finally:
            for attention in self._attentions[chunk].values():
                attention.seen = None
            self._give(chunk, microbatch, None)

    def watch_backward(self, heads: Sequence[Tensor], chunk: int, microbatch: ModelMicrobatch) -> None:
        """Give the captured positions again when the backward pass begins, for layers that recomputation runs."""
        captured = self._captured(microbatch)
        if captured is not None:
            register_multi_grad_hook(heads, lambda _: self._give(chunk, microbatch, captured), mode="any")

    def clear(self) -> None:
        """Remove all positions. Called after the last backward pass, so that later passes choose for themselves."""
        self._last = None
        for attentions in self._attentions:
            for attention in attentions.values():
                attention.captured = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the indexers' choices for `take` while the context is open."""
        attentions = [attention for of_chunk in self._attentions for attention in of_chunk.values()]
        for attention in attentions:
            attention.seen = []
        try:
            yield
        finally:
            for attention in attentions:
                attention.seen = None

    def take(self) -> dict[int, list[ChosenKeys]]:
        """Return index of a layer with an indexer -> its choices under `shown` since the last call."""
        found = {}
        for attentions in self._attentions:
            for position, attention in attentions.items():
                found[position], attention.seen = attention.seen or [], []
        return found

    def start_step(self, num_updates: int = 1) -> None:
        self._counts.zero_()
        self._has_older_weights = num_updates > 1

    def report(self, *, per_layer: bool) -> IndexerReport | None:
        """Return the report on a step's captured positions on rank 0, otherwise None. Every rank calls it."""
        older = self._counts.new_full((1, len(Indexed)), int(self._has_older_weights))
        together = torch.cat([self._counts, older])
        dist.all_reduce(together)
        if dist.get_rank() > 0:
            return None
        counts = together.cpu().numpy()
        of_layers, total = counts[:-1], counts[:-1].sum(0)
        rows = int(total[Indexed.ROWS])
        if not rows:
            return None
        metrics = {
            "indexer/rows_expected": float(rows),
            "indexer/rows_usable_share": float(total[Indexed.USABLE] / rows),
            "indexer/rows_missing_share": float(total[Indexed.MISSING] / rows),
        }
        if (overlap := overlap_of(total)) is not None:
            metrics["indexer/overlap"] = overlap
            metrics["indexer/agreement"] = float(total[Indexed.TAKEN] / total[Indexed.COMPARED])
        if per_layer:
            metrics |= _overlap_of_layers(self.layers, of_layers)
        return IndexerReport(metrics, tuple(indexer_anomalies(total, same_weights=not counts[-1].any())))

    def _captured(self, microbatch: ModelMicrobatch) -> CapturedKeys | None:
        """Return the captured rows in the order of the model's tokens. The last result is cached."""
        if INDEXER_POSITIONS not in microbatch.model_columns:
            return None
        if self._last is None or self._last[0] is not microbatch:
            batch = microbatch.batch
            rows, longest = batch.input_ids.shape
            of_rows = torch.arange(rows, device=batch.lengths.device)[:, None].expand(rows, longest)
            # Padding is one more sequence.
            sequences = microbatch.at_tokens(of_rows, first_tokens(batch.counted_lengths, longest), rows)
            captured, places, sequences = (
                values.transpose(0, 1).flatten(0, 1)
                for values in (microbatch.model_columns[INDEXER_POSITIONS], microbatch.offsets, sequences)
            )
            self._last = (microbatch, CapturedKeys.of(captured, places, sequences))
        return self._last[1]

    def _give(self, chunk: int, microbatch: ModelMicrobatch, captured: CapturedKeys | None) -> None:
        num_rows = microbatch.input_ids.shape[0]
        for position, attention in self._attentions[chunk].items():
            attention.captured = (
                None if captured is None else captured.positions[:, position].unflatten(0, (-1, num_rows))
            )

    def _count(self, chunk: int, microbatch: ModelMicrobatch, captured: CapturedKeys) -> None:
        """Count the rows of tokens that an engine feeds to its model, and compare those that are a choice."""
        self._has_older_weights |= TOKEN_LAG in microbatch.batch.columns
        batch, offsets = microbatch.batch, microbatch.offsets
        fed = first_tokens(batch.counted_lengths - 1, batch.input_ids.shape[1])
        fed = microbatch.at_tokens(fed, fed, False).transpose(0, 1).flatten()
        chooses = fed & (offsets.transpose(0, 1).flatten() >= self.topk)
        packed = microbatch.packed_seq_params
        longest = offsets.shape[1] if packed is None else int(packed.max_seqlen_q)
        for position, attention in self._attentions[chunk].items():
            counts = self._counts[position]
            for kind, mask in captured.kinds.items():
                counts[kind] += (mask[:, position] & fed).sum()
            # No sequence of the microbatch is longer than `topk` if the indexer did not run.
            for live, taken in attention.seen or ():
                compared = chooses & captured.usable[:, position]
                rows = captured.positions[:, position]
                counts[Indexed.COMPARED] += compared.sum() * self.topk
                counts[Indexed.COMMON] += num_common(rows, live, longest).where(compared, 0).sum()
                counts[Indexed.TAKEN] += num_common(rows, taken, longest).where(compared, 0).sum()


def _overlap_of_layers(layers: Sequence[int], counts: Int[np.ndarray, "layers kinds"]) -> dict[str, float]:
    overlaps = zip(layers, map(overlap_of, counts), strict=True)
    return {f"indexer/overlap_layer_{layer}": overlap for layer, overlap in overlaps if overlap is not None}


def attach_indexer_hooks(
    chunks: Sequence[GPTModel], policy: PolicyConfig, hf_config: object, device: torch.device
) -> IndexerHooks | None:
    """Attach and return the hooks that a configuration asks for, or None without indexer replay."""
    chosen = policy.megatron_cfg
    if not isinstance(chosen, RolloutMegatronConfig) or chosen.indexer_replay == "none":
        return None
    layers = family_of(hf_config).indexed_layers(hf_config)
    return IndexerHooks(chunks, layers, int(hf_config.index_topk), device)  # type: ignore[attr-defined]
