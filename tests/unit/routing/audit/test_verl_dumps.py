# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dumps of verl of any size and any type of numbers, in both ways in which verl packs tensors.

The files are made without verl and tensordict. Their layout is that of verl 0.9.1 with tensordict 0.15 (`consolidate`:
each tensor's bytes, filled up to a multiple of 8 where one of them needs it) and that of
`VERL_DATAPROTO_SERIALIZATION_METHOD=numpy` (`serialize_tensordict`).
"""

import io
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.cli import main
from nemo_rl_moe.routing.audit.adapters.inert_pickle import read_pickle
from nemo_rl_moe.routing.audit.adapters.verl import read
from tests.support.quick_list import examples

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


EXPERT_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MASK_TYPES = (torch.bool, torch.uint8, torch.int64)
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("method", ["torch", "numpy"])
@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 5, 6, 3, 2))),
    experts=st.sampled_from(EXPERT_TYPES),
    masks=st.sampled_from(MASK_TYPES),
    floats=st.sampled_from(FLOAT_TYPES),
    seed=st.integers(0, 2**16),
)
def test_any_size_and_type_comes_back(
    method: Serialization,
    sizes: tuple[int, int, int, int, int],
    experts: torch.dtype,
    masks: torch.dtype,
    floats: torch.dtype,
    seed: int,
) -> None:
    count, prompt, response, layers, topk = sizes
    draw = torch.Generator().manual_seed(seed)
    length = prompt + response
    attention = torch.ones(count, length)
    for row in range(count):  # padding on both sides
        attention[row, : int(torch.randint(prompt, (1,), generator=draw))] = 0
        attention[row, length - int(torch.randint(response, (1,), generator=draw)) :] = 0
    tensors = {
        # Before the others: where its bytes were not filled up, all that follow would lie wrong.
        "routed_experts": torch.randint(8, (count, length, layers, topk), generator=draw).to(experts),
        "attention_mask": attention.to(masks),
        "response_mask": attention[:, prompt:].to(masks),
        "input_ids": torch.randint(99, (count, length), generator=draw).to(torch.int32),
        "responses": torch.randint(99, (count, response), generator=draw),
        "rollout_log_probs": -torch.rand(count, response, generator=draw).to(floats),
    }
    content = read_pickle(verl_dump(tensors, [f"p{n}" for n in range(count)], method), "x")
    found = list(read(content, "x", None))
    assert [sequence.name for sequence in found] == [f"p{n}-{n}" for n in range(count)]
    for row, sequence in enumerate(found):
        real = attention[row].bool()
        for column, field in (("token_ids", "input_ids"), ("rollout_experts", "routed_experts")):
            np.testing.assert_array_equal(sequence.columns[column], tensors[field][row][real].numpy())
        trained = sequence.columns["loss_mask"]
        assert trained.sum() == attention[row, prompt:].sum()
        expected = tensors["rollout_log_probs"][row].float()[attention[row, prompt:].bool()]
        np.testing.assert_array_equal(sequence.columns["rollout_logprobs"][trained], expected.numpy())


DAMAGE = {
    "type": ("load", (1, 3), np.zeros(24, np.uint8)),
    "short": ("int64", (1, 3), np.zeros(16, np.uint8)),
    "form": "int64",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_numpy_dump_is_reported(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}._numpy", lambda tensors: ((1,), None, {"input_ids": DAMAGE[damage]}))
    path = tmp_path / "3.pkl"
    path.write_bytes(verl_dump({}, ["p"], "numpy"))
    assert main(["audit", str(path)]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"error: {path}: a DataProto whose tensors cannot be read: ")
    assert reported.count("\n") == 1
