# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts of each sequence's trained tokens, counted in training forward passes, with the sequence's advantage."""

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, GlobalBatchShard, TokenBatch
from nemo_rl_moe.models.megatron.training.assignment_counts import AssignmentCounts
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, SequenceCut
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.metrics.routing_advantage import (
    AdvantageScores,
    TrainedResponses,
    advantage_metrics,
    advantage_scores,
    joined_by_sample,
)
from nemo_rl_moe.runs.folder.artifacts import EXPERTS_BY_ADVANTAGE

ADVANTAGES = "advantages"
"""Column with the advantage of each sequence or each token."""


class ExpertAdvantageRecorder(StepObserver):
    """Observer that scores how the use of each expert relates to the advantages of sequences.

    It counts in one `train` call `n[s,i,e]`, the number of tokens of sequence `s` that predict a trained token and that
    layer `i` sends to expert `e`.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        self._config, self._device, self._per_layer = config, device, per_layer
        self._counter = AssignmentCounts(chunks, config, device)
        self._shards: Sequence[GlobalBatchShard] = ()
        self._first_rows: list[int] = []

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        microbatches = [microbatch for shard in shards for microbatch in shard.microbatches]
        has_advantages = all(ADVANTAGES in microbatch.columns for microbatch in microbatches)
        self._shards = shards if has_advantages else ()
        if has_advantages:
            *self._first_rows, num_rows = accumulate(map(len, microbatches), initial=0)
            self._counter.start(num_rows)

    def training_forward(self, forward: TrainingForward) -> AbstractContextManager[None]:
        if not self._shards:
            return nullcontext()
        first_row, other_row = self._first_rows[forward.number], self._counter.other_row
        rows = rows_of_tokens(forward.microbatch, first_row, other_row, cut_of_rank(self._config))
        return self._counter.counting(rows)

    def end_step(self) -> StepObservations:
        """Return metrics and the experts' scores on rank 0. If the batch has advantages, this is a collective."""
        if not self._shards:
            return StepObservations()
        counts, facts = sum_over_ranks(self._of_whole_batch(), self._device)
        if dist.get_rank() > 0:  # once is enough
            return StepObservations()
        (trained,) = facts[2].nonzero(as_tuple=True)
        if not len(trained):
            return StepObservations()
        advantages, groups, num_tokens, samples = facts.index_select(1, trained)
        of_sequences = TrainedResponses(counts.index_select(0, trained), advantages, groups)
        layers = self._counter.layers
        metrics: dict[str, float] = {}
        of_both = advantage_scores(*joined_by_sample(of_sequences, num_tokens, samples))
        for of_shares, scores in enumerate(of_both):
            metrics |= advantage_metrics(scores, layers, per_layer=self._per_layer, of_shares=bool(of_shares))
        # The last scores are by shares. By counts, every expert would prefer good responses if these are long.
        found = AdvantageScores(tuple(layers), scores.cpu())
        return StepObservations(metrics, {EXPERTS_BY_ADVANTAGE.name: found})

    def _of_whole_batch(self) -> list[Tensor]:
        """Return two tensors with a position for each sequence of the global batch, filled for this rank's sequences.

        The first has the counts, `[sequences, layers, experts]`. The second, `[4, sequences]`, has the advantage, the
        group, the number of trained tokens and the sample of each sequence.
        """
        batches = [microbatch for shard in self._shards for microbatch in shard.microbatches]
        places = np.array([place for shard in self._shards for place in shard.places])
        num_sequences = self._shards[0].num_batch_sequences
        own_counts = self._counter.own_counts
        counts = own_counts.new_zeros(num_sequences, *own_counts.shape[1:])
        counts.index_copy_(0, torch.from_numpy(places).to(self._device), own_counts)
        facts = np.zeros((4, num_sequences))
        is_first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
        if is_first_stage and parallel_state.get_tensor_and_context_parallel_group().rank() == 0:
            samples = [sample for shard in self._shards for sample in shard.samples]
            facts[:, places] = np.vstack([np.concatenate([_facts_of(batch) for batch in batches], 1), samples])
        return [counts, torch.from_numpy(facts)]


def rows_of_tokens(
    microbatch: ModelMicrobatch, first_row: int, other_row: int, cut: SequenceCut
) -> Int[Tensor, " tokens"]:
    """Return the row in which each token is counted, in the order in which the routers see the tokens.

    It is the row of the token's sequence if the token predicts a trained token, else `other_row`.
    """
    trained = microbatch.batch.token_mask[:, 1:]
    rows = torch.arange(first_row, first_row + len(trained), device=trained.device)[:, None].expand_as(trained)
    return microbatch.in_router_order(microbatch.at_tokens(rows, trained, other_row), cut)


def _facts_of(batch: TokenBatch) -> Float[np.ndarray, "3 sequences"]:
    """Return each sequence's mean advantage over trained tokens, number of its group, and number of trained tokens."""
    column, trained = batch.columns[ADVANTAGES], batch.token_mask[:, 1:].numpy()
    num_trained = trained.sum(1)
    advantages = column.of_targets().values.double().numpy()
    if column.axis is Axis.TOKEN:
        advantages = advantages.sum(1, where=trained) / np.maximum(num_trained, 1)
    groups = [zlib.crc32(sample_id.encode()) for sample_id in batch.sample_ids]
    return np.array([advantages, groups, num_trained], dtype=np.float64)
