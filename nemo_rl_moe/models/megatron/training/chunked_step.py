# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's Adam in chunks: its float32 copies of bfloat16 moments stay small."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

CHUNK_PARAMETERS = 2**28
"""Parameters that an Adam with moments in bfloat16 updates at a time: 2 GiB of float32 copies."""


def step_in_chunks(adam: Any, most_parameters: int) -> None:
    """Have Transformer Engine's Adam update at most so many parameters at a time, with the same result.

    It makes float32 copies of moments in other formats, of a whole group at once: for the experts' group that is more
    than bfloat16 moments save.
    """
    step_of_groups = adam.step

    def step(*arguments: Any, **keywords: Any) -> None:
        groups = adam.param_groups
        try:
            for group in groups:
                counted = {}
                for tensors in _chunks(group["params"], most_parameters):
                    chunk = {**group, "params": tensors}
                    adam.param_groups = [chunk]
                    step_of_groups(*arguments, **keywords)
                    counted = {"step": chunk["step"]}
                group.update(counted)
        finally:
            adam.param_groups = groups

    adam.step = step


def _chunks(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(other.numel() for other in chunk) + tensor.numel() > most:
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk
