# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference model of a model with adapters: its base, of which there is no second copy."""

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_moe.models.megatron.lora.adapter import Switch


class BaseAsReference:
    """The model with its adapters switched off, in the place of `ReferenceWeights`."""

    def __init__(self, switch: Switch):
        self._switch = switch

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the base while open."""
        with self._switch.off():
            yield
