# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A copy of some weights in a Ray actor, which a signal may strike when it has half of them."""

import os
import signal
from collections.abc import Iterator

import torch

from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec

TENSORS = [(f"weight {index}", torch.full((500,), float(index))) for index in range(20)]


class Copy:  # pragma: no cover  (runs in another process)
    """A copy of the weights, which a signal may strike when it has half of them."""

    def __init__(self, number: int, faulty_by: signal.Signals | None):
        self._number, self._faulty_by = number, faulty_by
        self._found: dict[str, float] = {}

    def receive(self, spec: TransportSpec) -> str | None:
        try:
            spec.receive(self._number, self._load)
        except Exception as error:
            return str(error)
        return None

    def _load(self, tensors: Iterator[NamedTensor]) -> None:
        for name, tensor in tensors:
            self._found[name] = float(tensor.mean())
            if len(self._found) == len(TENSORS) // 2 and self._faulty_by is not None:
                os.kill(os.getpid(), self._faulty_by)

    def found(self) -> dict[str, float]:
        return self._found

    def is_there(self) -> bool:
        return True
