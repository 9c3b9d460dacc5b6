# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load of experts by who wrote a token, in training forward passes of conversations with an environment."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.megatron.training.assignment_counts import AssignmentCounts
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, SequenceCut, first_tokens
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.metrics.writers import WriterLoad, writer_metrics
from nemo_rl_moe.runs.folder.artifacts import EXPERTS_BY_WRITER
from nemo_rl_moe.token_writers import TOKEN_WRITERS, WRITERS


class ExpertWriterRecorder(StepObserver):
    """Load of experts by the writer of a token: the prompt, the model or the environment.

    Counts only in steps whose batch has the writers of tokens.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        self._config, self._device, self._per_layer = config, device, per_layer
        self._counter = AssignmentCounts(chunks, config, device)
        self._counts_step = False

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        # All ranks of a batch have the same columns.
        self._counts_step = TOKEN_WRITERS in shards[0].microbatches[0].columns
        if self._counts_step:
            self._counter.start(len(WRITERS))

    def training_forward(self, forward: TrainingForward) -> AbstractContextManager[None]:
        if not self._counts_step:
            return nullcontext()
        rows = _writers_of_tokens(forward.microbatch, self._counter.other_row, cut_of_rank(self._config))
        return self._counter.counting(rows)

    def end_step(self) -> StepObservations:
        """Return metrics and loads on rank 0. If the step's batch has the writers of tokens, this is a collective."""
        if not self._counts_step:
            return StepObservations()
        (counts,) = sum_over_ranks([self._counter.own_counts], self._device)
        if dist.get_rank() > 0:  # once is enough
            return StepObservations()
        found = WriterLoad(tuple(self._counter.layers), counts.numpy().astype(np.int64))
        metrics = writer_metrics(found.counts, found.layers, per_layer=self._per_layer)
        return StepObservations(metrics, {EXPERTS_BY_WRITER.name: found})


def _writers_of_tokens(microbatch: ModelMicrobatch, other_row: int, cut: SequenceCut) -> Int[Tensor, " tokens"]:
    """Return the index of each token's writer, or `other_row` on padding, in the order in which routers see tokens."""
    batch = microbatch.batch
    writers = batch.columns[TOKEN_WRITERS].values.long()
    is_token = first_tokens(batch.counted_lengths, writers.shape[1])
    return microbatch.in_router_order(microbatch.at_tokens(writers, is_token, other_row), cut)
