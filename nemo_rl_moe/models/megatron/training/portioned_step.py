# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's Adam in portions: its float32 copies of bfloat16 moments stay small."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

PORTION_PARAMETERS = 2**28
"""Parameters that an Adam with moments in bfloat16 updates at a time: 2 GiB of float32 copies."""


def step_in_portions(adam: Any, most_parameters: int) -> None:
    """Have Transformer Engine's Adam update so many parameters at a time, with the same result.

    It makes float32 copies of moments in other formats, of a whole group at once: for the experts' group that is more
    than bfloat16 moments save.

    Args:
        most_parameters: Most parameters of a portion; a tensor of more is one by itself.
    """
    step_of_groups = adam.step

    def step(*arguments: Any, **keywords: Any) -> None:
        groups = adam.param_groups
        try:
            for group in groups:
                counted = {}
                for tensors in _portions(group["params"], most_parameters):
                    portion = {**group, "params": tensors}
                    adam.param_groups = [portion]
                    step_of_groups(*arguments, **keywords)
                    counted = {"step": portion["step"]}
                group.update(counted)
        finally:
            adam.param_groups = groups

    adam.step = step


def _portions(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    portion: list[Tensor] = []
    for tensor in tensors:
        if portion and sum(other.numel() for other in portion) + tensor.numel() > most:
            yield portion
            portion = []
        portion.append(tensor)
    if portion:
        yield portion
