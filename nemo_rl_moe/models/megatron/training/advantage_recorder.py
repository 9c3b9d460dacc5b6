# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts that each sequence's trained tokens go to, counted in training forward passes, beside its advantage."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Axis, GlobalBatchShard, TokenBatch
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.model.transformer_config import moe_layer_indices
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch
from nemo_rl_moe.models.megatron.training.router_taps import SequenceCut, cut_of_rank, in_router_order
from nemo_rl_moe.moe.recorder import sum_over_ranks
from nemo_rl_moe.moe.routers import RouterLayer, routed_experts, routers_of
from nemo_rl_moe.moe.routing_advantage import (
    AdvantageScores,
    add_sequence_assignments,
    advantage_metrics,
    advantage_scores,
)

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

ADVANTAGES = "advantages"
"""Column of a batch that is trained by advantages: one for each sequence or each token."""


class AdvantageRecorder:
    """The counts `n[s,i,e]` of one `train` call: tokens of sequence `s` from which a trained token is predicted, and
    that layer `i` sends to expert `e`.

    Args:
        chunks: This rank's model chunks.
        config: The model's configuration.
        device: Where the routers run.
        per_layer: Report each layer too.

    Attributes:
        scores: Of the last report; None where it had nothing to say.
    """

    scores: AdvantageScores | None = None

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        self._config, self._device, self._per_layer = config, device, per_layer
        self._layers = moe_layer_indices(config)
        self._shards: Sequence[GlobalBatchShard] = ()
        self._first_rows: list[int] = []
        self._counts = self._new_counts(0)
        self._rows: Int[Tensor, " tokens"] | None = None
        self._indices: dict[int, Tensor] = {}
        self._own_layers: dict[tuple[int, ...], Tensor] = {}
        positions = {layer: position for position, layer in enumerate(self._layers)}
        for chunk in chunks:
            # The decoder's own routers, as on a tape.
            for layer, router in routers_of(chunk.decoder):
                hook = self._hook(positions[layer.key], layer)  # type: ignore[index]  # Megatron-Core numbers its layers
                router.register_forward_hook(hook)

    def start(self, shards: Sequence[GlobalBatchShard]) -> None:
        """Clears what was counted and makes room for these sequences; for none where they have no advantages."""
        microbatches = [microbatch for shard in shards for microbatch in shard.microbatches]
        has_advantages = all(ADVANTAGES in microbatch.columns for microbatch in microbatches)
        self._shards = shards if has_advantages else ()
        if not has_advantages:
            return
        *self._first_rows, num_rows = accumulate(map(len, microbatches), initial=0)
        if len(self._counts) == num_rows + 1:
            self._counts.zero_()
        else:
            self._counts = self._new_counts(num_rows)

    @contextmanager
    def training_forward(self, number: int, microbatch: ModelMicrobatch) -> Iterator[None]:
        """While open, what the routers choose counts for the sequences of this microbatch.

        Args:
            number: Of the microbatch, within the `train` call.
            microbatch: What runs.
        """
        if not self._shards:
            yield
            return
        self._rows = rows_of_tokens(
            microbatch, self._first_rows[number], len(self._counts) - 1, cut_of_rank(self._config)
        )
        try:
            yield
            self._add_indices(self._rows)
        finally:
            self._rows = None
            self._indices = {}

    def report(self) -> dict[str, float]:
        """Metrics of what was counted, on rank 0 alone. A collective where there are advantages: all ranks call it."""
        self.scores = None
        if not self._shards:
            return {}
        counts, facts = sum_over_ranks(self._of_whole_batch(), self._device)
        if dist.get_rank() > 0:  # once is enough
            return {}
        (trained,) = facts[2].nonzero(as_tuple=True)
        if not len(trained):
            return {}
        advantages, groups, _ = facts.index_select(1, trained)
        metrics: dict[str, float] = {}
        of_both = advantage_scores(counts.index_select(0, trained), advantages, groups)
        for of_shares, scores in enumerate(of_both):
            metrics |= advantage_metrics(scores, self._layers, per_layer=self._per_layer, of_shares=bool(of_shares))
        # Of numbers of tokens every expert has a preference where long responses are good ones.
        self.scores = AdvantageScores(tuple(self._layers), scores.cpu())
        return metrics

    def _of_whole_batch(self) -> list[Tensor]:
        """This rank's counts, and advantage, group and whether it is trained of its sequences, at their places."""
        batches = [microbatch for shard in self._shards for microbatch in shard.microbatches]
        places = np.array([place for shard in self._shards for place in shard.places])
        num_sequences = self._shards[0].num_batch_sequences
        counts = self._counts.new_zeros(num_sequences, *self._counts.shape[1:])
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        if self._config.sequence_parallel or tensor_rank == 0:
            counts.index_copy_(0, torch.from_numpy(places).to(self._device), self._counts[:-1])
        facts = np.zeros((3, num_sequences))
        is_first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
        if is_first_stage and parallel_state.get_tensor_and_context_parallel_group().rank() == 0:
            facts[:, places] = np.concatenate([_facts_of(batch) for batch in batches], 1)
        return [counts, torch.from_numpy(facts)]

    def _new_counts(self, num_rows: int) -> Int[Tensor, "rows layers experts"]:
        """Zeros for so many sequences, and a row for tokens that do not count."""
        shape = (num_rows + 1, len(self._layers), int(self._config.num_moe_experts or 0))
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _add_indices(self, rows: Int[Tensor, " tokens"]) -> None:
        """Adds the calls of all layers at once: on small models each operation takes its time."""
        positions = tuple(self._indices)
        if not positions:
            return
        if positions not in self._own_layers:
            self._own_layers[positions] = torch.tensor(positions, device=self._device)[:, None, None]
        of_layers = torch.stack(list(self._indices.values()))
        add_sequence_assignments(self._counts, self._own_layers[positions], of_layers, rows)

    def _hook(self, position: int, layer: RouterLayer) -> Any:
        def count(router: nn.Module, args: Any, outputs: Any) -> None:
            if self._rows is None:
                return
            routed = routed_experts(layer, router, outputs)
            if routed.dtype == torch.bool:
                add_sequence_assignments(self._counts, position, routed, self._rows)
            else:  # a router runs once in a forward pass
                self._indices[position] = routed

        return count


def attach_advantage_recorder(
    chunks: Sequence[GPTModel], config: TransformerConfig, policy: PolicyConfig, device: torch.device
) -> AdvantageRecorder | None:
    """Recorder as a policy's configuration asks for it; None without, or where the model has no MoE layers."""
    generates, megatron = generating(policy), policy.megatron_cfg
    if generates is None or not generates.megatron_cfg.experts_by_advantage or not megatron.track_moe_metrics:
        return None
    if not moe_layer_indices(config):
        return None
    return AdvantageRecorder(chunks, config, device, per_layer=megatron.moe_per_layer_logging)


def rows_of_tokens(
    microbatch: ModelMicrobatch, first_row: int, other_row: int, cut: SequenceCut
) -> Int[Tensor, " tokens"]:
    """Row of each token in the routers' order: that of its sequence where a trained token is predicted from it.

    Args:
        microbatch: The microbatch.
        first_row: Row of its first sequence.
        other_row: Row of all other tokens, padding among them.
        cut: This rank's block of columns.
    """
    trained = microbatch.batch.token_mask[:, 1:]
    rows = torch.arange(first_row, first_row + len(trained), device=trained.device)[:, None].expand_as(trained)
    return in_router_order(microbatch.at_tokens(rows, trained, other_row), cut)


def _facts_of(batch: TokenBatch) -> Float[np.ndarray, "3 sequences"]:
    """Advantage (the mean over a sequence's trained tokens), number of its group, and 1 where it has such a token.

    Responses to the same prompt, which advantages compare, come from the same sample.
    """
    column, trained = batch.columns[ADVANTAGES], batch.token_mask[:, 1:].numpy()
    facts = np.empty((3, len(batch)))
    values = column.of_targets().values.double().numpy()
    if column.axis is Axis.TOKEN:
        values = values.sum(1, where=trained) / np.maximum(trained.sum(1), 1)
    facts[0] = values
    facts[1] = [zlib.crc32(sample_id.encode()) for sample_id in batch.sample_ids]
    facts[2] = trained.any(1)
    return facts
