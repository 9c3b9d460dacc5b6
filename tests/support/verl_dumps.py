# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files as verl's `DataProto.save_to_disk` writes them, without verl and tensordict.

The layout is that of verl 0.9.1 with tensordict 0.15 (`consolidate`: each tensor's bytes, filled up to a multiple of 8
where one of them needs it) and that of `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy` (`serialize_tensordict`).
"""

import io
import pickle
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

Serialization = Literal["torch", "numpy"]


def verl_dump(tensors: Mapping[str, torch.Tensor], uids: list[str], method: Serialization) -> bytes:
    """Return a saved `DataProto`.

    Args:
        tensors: The batch.
        uids: Name of each sequence's prompt.
        method: How the tensors are packed.
    """
    with _modules() as modules:
        packed = _numpy(tensors) if method == "numpy" else _consolidated(tensors, modules)
        proto = modules["verl.protocol"].DataProto
        proto.__getstate__ = lambda self: (packed, {"uid": np.array(uids, dtype=object)}, {"global_steps": 3})
        return pickle.dumps(proto())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _consolidated(tensors: Mapping[str, torch.Tensor], modules: Mapping[str, Any]) -> bytes:
    pads = {name: -_bytes_of(tensor).numel() % 8 for name, tensor in tensors.items()}
    pieces, leaves, place = [], {}, 0
    for name, tensor in tensors.items():
        pieces.append(torch.cat([_bytes_of(tensor), torch.zeros(pads[name], dtype=torch.uint8)]))
        last = place + pieces[-1].numel()
        leaves[name] = (str(tensor.dtype), list(tensor.shape), place, last, pads[name])
        place = last
    rebuild = modules["tensordict._reductions"]._rebuild_tensordict_files_consolidated
    made = type("TensorDict", (), {"__reduce__": lambda self: (rebuild, ({"leaves": leaves}, torch.cat(pieces)))})()
    buffer = io.BytesIO()
    torch.save(made, buffer)
    return buffer.getvalue()


def _numpy(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    encoded = {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.shape, _bytes_of(tensor).numpy())
        for name, tensor in tensors.items()
    }
    return (len(next(iter(tensors.values()))),), None, encoded


class _modules:
    """Context in which modules of the names that the pickles give can be imported."""

    def __enter__(self) -> Mapping[str, Any]:
        proto = type("DataProto", (), {"__module__": "verl.protocol"})

        def rebuild(metadata: Any, storage: Any) -> None:
            """Stand for the function of tensordict."""

        rebuild.__module__ = "tensordict._reductions"
        rebuild.__name__ = rebuild.__qualname__ = "_rebuild_tensordict_files_consolidated"
        contents: dict[str, dict[str, Any]] = {
            "verl": {},
            "verl.protocol": {"DataProto": proto},
            "tensordict": {},
            "tensordict._reductions": {rebuild.__name__: rebuild},
        }
        made = {name: ModuleType(name) for name in contents}
        for name, content in contents.items():
            vars(made[name]).update(content)
        self._before = {name: sys.modules.get(name) for name in made}
        sys.modules.update(made)
        return made

    def __exit__(self, *_: object) -> None:
        for name, before in self._before.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
