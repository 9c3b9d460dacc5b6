# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hostile pickles run nothing, and what is harmless is read as it was written."""

import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nested._internal.nested_tensor import _rebuild_njt

from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.inert_pickle import Inert, PickledArray, read_pickle
from nemo_rl_moe.routing.audit.adapters.layout import array, expert_rows


class Attack:
    """Object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


ATTACKS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda mark: Attack(os.system, f"touch {mark}"),
    "subprocess": lambda mark: Attack(subprocess.check_call, ["touch", mark]),
    "eval": lambda mark: Attack(eval, f"open({mark!r}, 'w')"),
    "getattr": lambda mark: Attack(getattr, Attack(__import__, "os"), "system"),
    "torch.load": lambda mark: Attack(torch.load, mark),
    "numpy.load": lambda mark: Attack(np.load, mark),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("form", ["pickle", "torch", "dump"])
def test_hostile_files_are_refused(name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, path = tmp_path / "ran", tmp_path / "3.pt"
    attack = ATTACKS[name](str(mark))
    if form == "pickle":
        path.write_bytes(pickle.dumps({"rollout_id": 3, "samples": [attack]}))
    elif form == "torch":
        torch.save({"rollout_id": 3, "samples": [attack]}, path)
    else:
        torch.save({"routed_experts": torch.zeros(2, 3), "more": [{"a": attack}]}, path)
    assert main(["audit", str(path)]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"error: {path}: refused: it names ")
    assert "allowed are tensors, numpy arrays, containers and classes of" in reported
    assert reported.count("\n") == 1
    assert not mark.exists()


def test_a_hostile_pickle_would_have_run(tmp_path: Path) -> None:
    """The attack is real: pickle's own reader runs it."""
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(ATTACKS["os.system"](str(mark))))  # noqa: S301
    assert mark.exists()


def test_a_hostile_pickle_inside_of_a_dataproto_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, module = tmp_path / "ran", ModuleType("verl.protocol")

    class DataProto:
        def __getstate__(self) -> Any:
            return pickle.dumps(ATTACKS["os.system"](str(mark))), {}, {}

    DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"
    module.DataProto = DataProto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    (tmp_path / "3.pkl").write_bytes(pickle.dumps(DataProto()))
    assert main(["audit", str(tmp_path / "3.pkl")]) == 2
    assert "3.pkl: refused: it names posix.system" in capsys.readouterr().err
    assert not mark.exists()


ARRAYS = [
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array([1, 2], dtype=">i4"),
    np.zeros((0, 3), dtype=np.uint8),
    np.array([True, False]),
    np.float32(2.5),
    np.array(["a", None, [1]], dtype=object),
]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("given", ARRAYS, ids=lambda given: f"{given.dtype}-{given.shape}")
def test_arrays_come_back(given: np.ndarray, protocol: int) -> None:
    found = read_pickle(pickle.dumps(given, protocol=protocol), "x")
    values = found.values if isinstance(found, PickledArray) else np.asarray(found)
    if given.dtype == object:
        assert values.tolist() == given.tolist()
    else:
        np.testing.assert_array_equal(values, given)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.uint16]
)
def test_tensors_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    given = {"whole": whole, "part": whole[1:3, ::2], "turned": whole.t(), "none": whole[:0], "one": whole[0, 1]}
    torch.save(OrderedDict(given), tmp_path / "x.pt")
    found = read_pickle((tmp_path / "x.pt").read_bytes(), "x")
    for name, tensor in given.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)
    assert array(found["part"], "x").tolist() == given["part"].tolist()


def test_containers_and_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("verl.things")

    class Thing:
        def __init__(self, x: int) -> None:
            self.x = x

    Thing.__module__, Thing.__qualname__ = "verl.things", "Thing"
    module.Thing = Thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.things", module)
    given = {"a": (1, 2.5, "x", b"y", None), "b": [Thing(4)], "c": OrderedDict(d=1), "e": {1, 2}}
    found = read_pickle(pickle.dumps(given), "x")
    assert found["a"] == given["a"]
    assert found["c"] == {"d": 1}
    assert sorted(found["e"]) == [1, 2]
    (thing,) = found["b"]
    assert isinstance(thing, Inert)
    assert (thing.path, thing.state) == ("verl.things.Thing", {"x": 4})


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"PK\x03\x04" + bytes(40), pickle.dumps([1, 2])[:-3]])
def test_torn_files_are_reported(content: bytes) -> None:
    with pytest.raises(DataError, match="x: cannot be read as a pickle"):
        read_pickle(content, "x")


def test_tensors_outside_of_their_storage_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    position = content.index(b"K\x06\x85")  # the shape (6,) of the pickle, stored as it is
    with pytest.raises(DataError, match=r"lies outside of its storage|cannot be read"):
        read_pickle(content[: position + 1] + b"\x07" + content[position + 2 :], "x")


@pytest.mark.parametrize("offsets", [torch.tensor([0, 2, 2, 6]), torch.zeros(1, dtype=torch.int64).expand(10**5)])
def test_a_nested_tensor_has_no_more_tensors_than_the_file_has_offsets(offsets: torch.Tensor, tmp_path: Path) -> None:
    parts = {"values": torch.arange(6), "offsets": offsets, "_ragged_idx": 1, "lengths": None}
    torch.save(Attack(_rebuild_njt, parts), tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    if len(offsets) == 4:
        assert [each.tolist() for each in read_pickle(content, "x")] == [[0, 1], [], [2, 3, 4, 5]]
    else:
        with pytest.raises(DataError, match="x: refused: it holds a nested tensor with more offsets than the file"):
            read_pickle(content, "x")


def shared_lists(members: int, depth: int) -> list[Any]:
    found: list[Any] = [1]
    for _ in range(depth):
        found = [found] * members
    return found


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (np.empty((0, 20_000, 7_500), np.int16), "expected integers [tokens, layers, topk]"),
        (np.empty((0, 1_000, 1_000), np.int16), "would fill 1,000,000,000 numbers, expected at most 268,435,456"),
        (shared_lists(12, 9), "lists that repeat the same list"),
        ([[[0] * 30_000] * 5_000] * 9, "lists that repeat the same list"),
        (np.full((9, 2, 2), -7, np.int16), "got the expert -7, expected 0 to 32767, or -1 for none"),
    ],
    ids=("no rows", "few rows", "nested", "rows", "negative"),
)
def test_small_files_do_not_come_to_large_routes(routes: Any, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        expert_rows(routes, 1_000, "x")


def test_lists_may_share_rows_of_padding() -> None:
    found = expert_rows([[[0, 1]] * 3] * 4, 5, "x")
    assert found.tolist() == [*[[[0, 1]] * 3] * 4, [[-1, -1]] * 3]


def test_a_tensor_does_not_stand_for_many_times_its_storage(tmp_path: Path) -> None:
    torch.save(torch.zeros(1, dtype=torch.int32).as_strided((10, 20_000, 7_500), (0, 0, 0)), tmp_path / "a.pt")
    with pytest.raises(DataError, match="of its storage many times"):
        read_pickle((tmp_path / "a.pt").read_bytes(), "x")
    torch.save(torch.zeros(1).expand(1_000), tmp_path / "a.pt")
    assert read_pickle((tmp_path / "a.pt").read_bytes(), "x").shape == (1_000,)


def test_lists_that_are_nested_deeply_are_no_routes() -> None:
    with pytest.raises(DataError, match="expected "):
        expert_rows(shared_lists(1, 100_000), 5, "x")
