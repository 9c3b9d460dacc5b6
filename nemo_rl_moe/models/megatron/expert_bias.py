# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routers' expert bias, which Megatron-Core moves before the optimizer's step, whatever becomes of that."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter


@contextmanager
def router_state_in_float32(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Keeps the routers' buffers as they are while something converts the chunks to another type.

    Megatron-Core converts them with the weights, and takes the bias alone back to float32, rounded by then. The numbers
    of tokens that it counts stay in bfloat16, which has no odd number above 256.
    """
    kept = [
        (router, name, buffer)
        for chunk in chunks
        for router in chunk.modules()
        if isinstance(router, TopKRouter)
        for name, buffer in router.named_buffers(recurse=False)
    ]
    yield
    for router, name, buffer in kept:
        setattr(router, name, buffer)


class ExpertBias:
    """Takes back the bias of an update that is left out.

    The tokens that each expert got, from which the bias is moved, Megatron-Core sets to zero with every move.

    Args:
        chunks: The model's chunks. Where routers have no bias there is nothing to do.
    """

    def __init__(self, chunks: Sequence[GPTModel]):
        self._routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter) and module.expert_bias is not None
        ]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Before a step."""
        self._kept = [router.expert_bias.clone() for router in self._routers]

    @torch.no_grad()
    def put_back(self) -> None:
        """As it was kept."""
        for router, kept in zip(self._routers, self._kept, strict=True):
            router.expert_bias.copy_(kept)
