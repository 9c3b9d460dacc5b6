# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Value head: one number per token, linear in the last hidden state, besides or instead of logits."""

from collections.abc import Collection
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_rl_moe.models.interfaces import OF_VALUES, Head

NAME = "value_head"
PREFIX = f"{NAME}."
"""Prefix of the parameters' names. No published model has it."""


class ValueHead(torch.nn.Module):
    """Value of each token: `w . h` in float32, with the final norm's output `h`.

    Every tensor-parallel rank holds all of `w` and computes all values, so the gradient of `w` is equal on all ranks.
    """

    def __init__(self, config: Any):
        super().__init__()
        self._config = config
        # Starting weights are set later, by name. Sampling them here would shift the run's random numbers.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_states: Float[Tensor, "local_columns rows hidden"]) -> Float[Tensor, "rows columns"]:
        """Return the values. Under sequence parallelism, ranks gather the columns first."""
        if self._config.sequence_parallel:
            # Every rank computes the full gradient, and keeps the part of its columns.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden_states.float(), self.weight.float())[..., 0].T


def add_value_head(chunk: GPTModel, heads: Collection[Head]) -> None:
    """Add a value head to the last stage's chunk if one of `heads` needs it.

    With `Head.SCORE` the model is a sequence classifier: its exported folder has the value head and no output layer. If
    the model predicts no tokens, its output layer is frozen, because it gets no gradient. Weight decay would change
    a trainable output layer nevertheless, and a wrapper that overlaps gradient reduction would wait for its gradient.
    """
    if OF_VALUES.isdisjoint(heads) or not chunk.post_process:
        return
    chunk.value_head, chunk.has_value_head = ValueHead(chunk.config).to(next(chunk.parameters()).device), True
    chunk.predicts_tokens, chunk.is_classifier = Head.LOGPROBS in heads, Head.SCORE in heads
    if not chunk.predicts_tokens and not chunk.share_embeddings_and_output_weights:
        chunk.output_layer.weight.requires_grad_(False)
