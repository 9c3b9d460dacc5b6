# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model chunk's own forward pass with a key-value cache: Megatron-Core's modules, Transformer Engine's with them."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu_layers.attention import causal_mask

# isort: split
from megatron.core.inference.contexts import StaticInferenceContext


class StockInferenceContext(StaticInferenceContext):
    """Megatron-Core's key-value cache, which rows can leave."""

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Lets all other rows leave."""
        memory = self.key_value_memory_dict
        for layer_number, tensors in memory.items():
            memory[layer_number] = tuple(tensor.index_select(1, rows) for tensor in tensors)


class StockForward:
    """The forward pass of one batch through one chunk.

    Args:
        chunk: A GPTModel chunk under `hidden_states_only`.
        context: The batch's key-value cache.
    """

    def __init__(self, chunk: Any, context: StockInferenceContext):
        self._chunk, self._context = chunk, context

    def __call__(
        self, token_ids: Int[Tensor, "rows columns"], received: Float[Tensor, "columns rows hidden"] | None
    ) -> Float[Tensor, "columns rows hidden"]:
        """Runs the next tokens, and keeps their keys and values.

        Args:
            token_ids: For the first pipeline stage.
            received: What the stage before returned, for all others.
        """
        columns, mask = token_ids.shape[1], None
        if columns > 1:
            # Without one Megatron-Core keeps a mask of each length: made in inference mode, no training could use it.
            mask = ~causal_mask(columns, columns, token_ids.device)[None, None]
        self._chunk.set_input_tensor(received)
        hidden_states: Tensor = self._chunk(
            token_ids, None, mask, inference_context=self._context, runtime_gather_output=True
        )
        self._chunk.set_input_tensor(None)
        return hidden_states
