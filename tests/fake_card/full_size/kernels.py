# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine on the fake card: kernels that it compiles or plans at run time are left out.

Its own library launches kernels, which the fake card ignores. Triton would compile some first, and cuDNN would plan its
attention by a graph that the fake card does not have. In their place only the memory is allocated that they take.
"""

from typing import Any

import torch
from torch import Tensor


def leave_out_kernels() -> None:
    """Replace the calls in this process, from before the first model on."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for launcher in (JITFunction, Autotuner):
        launcher.run = lambda self, *args, **kwargs: None
    _replace_fused_attention()


def _replace_fused_attention() -> None:
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    extension = utils.tex

    class WithFusedAttention:
        """The extension, which chooses cuDNN's attention without asking cuDNN."""

        def __getattr__(self, name: str) -> Any:
            return getattr(extension, name)

        def get_fused_attn_backend(self, *args: Any, **kwargs: Any) -> Any:
            return FusedAttnBackend["F16_arbitrary_seqlen"]

    backends.fused_attn_fwd, backends.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
    utils.tex = WithFusedAttention()


def fused_attn_fwd(
    is_training: bool,
    longest_query: int,
    longest_key: int,
    query_offsets: Tensor,
    key_offsets: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Allocate the output, and for training what cuDNN 9.6 and later keep: softmax statistics and a random state."""
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    if not is_training:
        return output, []
    statistics = query.new_empty(*query.shape[:-1], 1, dtype=torch.float32)
    return output, [statistics, query.new_empty(2, dtype=torch.int64)]


def fused_attn_bwd(
    longest_query: int,
    longest_key: int,
    query_offsets: Tensor,
    key_offsets: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients, and meanwhile a float32 sum of the queries' gradient, which stands for the workspace."""
    query.new_empty(query.shape, dtype=torch.float32)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
