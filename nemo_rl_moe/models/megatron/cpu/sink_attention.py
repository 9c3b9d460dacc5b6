# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Core attention with a sliding window, with attention sinks, or with both."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import SDPAttention, causal_attention, causal_mask, masked_attention


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Compute causal attention with one more score in each head's softmax, for a key without a value.

    The additional scores are the learnt sinks of Xiao et al. 2023, Efficient Streaming Language Models with Attention
    Sinks (arXiv:2309.17453), as in gpt-oss. The attention weights of a query add up to less than 1.
    """
    queries, batch, heads, dim = query.shape
    scale = dim**-0.5 if scale is None else scale
    if queries == 1 and window is not None:
        key, value = key[-window:], value[-window:]
    # The sink is a first key. It is zero except in an extra dimension, in which each query holds its head's sink.
    # A mask with a gradient would rule out torch's fused kernel.
    sink = sinks.to(query.dtype).view(heads, 1).expand(queries, batch, heads, 1)
    query = torch.cat([query, sink], dim=-1)
    key, value = (F.pad(tensor, (0, 1, 0, 0, 0, 0, 1, 0)) for tensor in (key, value))
    key[0, ..., dim] = 1 / scale
    mask = F.pad(causal_mask(queries, key.shape[0] - 1, query.device, window), (1, 0), value=True)
    context = masked_attention(query, key, value, mask, scale)
    return context[..., :dim].reshape(queries, batch, heads * dim)


class SinkAttention(SDPAttention):
    """Core attention that follows the configuration's `window_size`, `window_attn_skip_freq` and `softmax_type`.

    Attributes:
        softmax_offset: The sinks, `[heads of this rank]`, under Megatron-Core's name, or None.
        window: Number of keys that a query of this layer sees including its own, or None if it sees all.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **others: Any):
        super().__init__(config, **others)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron-Core does not count a query's own key.
        self.window = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = self._new_sinks() if config.softmax_type == "learnable" else None

    def _new_sinks(self) -> torch.nn.Parameter:
        config = self.config
        sinks = torch.empty(
            config.num_attention_heads // config.tensor_model_parallel_size,
            dtype=config.params_dtype,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        if config.perform_initialization:
            config.init_method(sinks)
        return torch.nn.Parameter(sinks)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.softmax_offset is None:
            return causal_attention(query, key, value, self.softmax_scale, self.window)
        return sink_attention(query, key, value, self.softmax_offset, self.softmax_scale, self.window)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return state
