# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that other processes open by a name, in the place of a GPU's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEPT: list[shared_memory.SharedMemory] = []
PLACE = ["nowhere"]
"""Of this process."""


@dataclass(frozen=True)
class HostMemory:
    """What `CudaMemory` is on GPUs.

    Attributes:
        is_everywhere: All processes are on one GPU; otherwise each is where `PLACE` says.
    """

    is_everywhere: bool = True

    def device(self) -> torch.device:
        return torch.device("cpu")

    def place(self) -> str:
        return "GPU-0" if self.is_everywhere else PLACE[0]

    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        block = shared_memory.SharedMemory(create=True, size=max(1, buffer.nbytes))
        np.frombuffer(block.buf, np.uint8)[: buffer.nbytes] = buffer.numpy()
        resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
        KEPT.append(block)
        return {"name": block.name, "bytes": buffer.nbytes}

    @contextmanager
    def mapped(self, handle: Mapping[str, Any]) -> Iterator[Tensor]:
        block = shared_memory.SharedMemory(handle["name"])
        resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
        yield torch.frombuffer(block.buf, dtype=torch.uint8)[: handle["bytes"]]


def forget_kept() -> None:
    """Remove what this process has shared."""
    while KEPT:
        Path("/dev/shm", KEPT.pop().name).unlink()
