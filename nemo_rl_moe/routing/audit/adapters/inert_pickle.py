# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pickles and `torch.save` files as inert data: tensors, arrays, containers, and stand-ins for a framework's classes.

A pickle is a program. Here each name in it leads to one of the few functions of this module. So no code of another
package runs, and none is imported. Classes of known frameworks become an `Inert`, which keeps the data from the file.
Any other name is refused. Arrays are also built here, since numpy's `__setstate__` trusts a pickle.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from nemo_rl_moe.errors import DataError, one_line

_MOST_REPEATED = 2**25
"""Largest size of a tensor that repeats the numbers of a smaller storage."""
FRAMEWORKS = (
    "areal",
    "miles",
    "nemo_rl",
    "sglang",
    "skyrl",
    "skyrl_train",
    "slime",
    "tensordict",
    "transformers",
    "verl",
    "vllm",
)
"""Packages whose classes become stand-ins (`Inert`) when a pickle names them."""
_STORAGES = {
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "UntypedStorage": torch.uint8,
}


class RefusedError(pickle.UnpicklingError):
    """The file names something that no dump of a rollout needs."""


class Inert:
    path = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        """Create an object that keeps the arguments from the pickle."""
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, {}
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any
        self.items: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


class PickledArray:
    """Stand-in for an array of numpy. The array is in `values`."""

    values: np.ndarray = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Build the array from a state `(version, shape, dtype, whether in Fortran order, content)`."""
        _, shape, dtype, fortran, content = state
        order = "F" if fortran else "C"
        if dtype.is_object:
            self.values = np.empty(len(content), dtype=object)
            self.values[:] = content
            self.values = self.values.reshape(shape, order=order)  # type: ignore[call-overload]
        else:
            self.values = np.frombuffer(content, dtype=dtype.numpy).reshape(shape, order=order)  # type: ignore[call-overload]


class _PickledDtype:
    """Stand-in for a dtype of numpy."""

    def __init__(self, code: str, *_: Any):
        self.is_object = code.startswith("O")
        self._plain = code[:1] in "biufSU"
        self.numpy = np.dtype(code) if self._plain else np.dtype(object)
        if not self._plain and not self.is_object:
            raise RefusedError(f"it holds an array of {code!r}, expected numbers, texts or objects")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self._plain and state[1] in ("<", ">"):
            self.numpy = self.numpy.newbyteorder(state[1])


class _Call:
    """Callable without attributes that a pickle could change. It wraps a function."""

    __slots__ = ("__wrapped",)

    def __init__(self, function: Callable[..., Any]):
        self.__wrapped = function

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped(*args)


def _array(kind: Any, *_: Any) -> PickledArray:
    return PickledArray()


def _array_of_buffer(buffer: Any, dtype: _PickledDtype, shape: Any, order: str) -> PickledArray:
    made = PickledArray()
    made.__setstate__((1, shape, dtype, order == "F", bytes(buffer)))
    return made


def _scalar(dtype: _PickledDtype, content: Any = b"") -> Any:
    return content if dtype.is_object else np.frombuffer(content, dtype=dtype.numpy)[0].item()


def _tensor(storage: torch.Tensor, offset: int, size: Iterable[int], stride: Iterable[int], *_: Any) -> torch.Tensor:
    size, stride = tuple(size), tuple(stride)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if prod(size) and not 0 <= offset <= last < len(storage):
        raise RefusedError(f"it holds a tensor {size} that lies outside of its storage")
    if prod(size) > max(_MOST_REPEATED, 4 * len(storage)):
        raise RefusedError(
            f"it holds a tensor {size} that repeats the {len(storage)} numbers of its storage many times"
        )
    return torch.as_strided(storage, size, stride, offset)


def _tensor_of_bytes(
    storage: torch.Tensor,
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    _: Any,
    __: Any,
    dtype: Any,
    *___: Any,
) -> torch.Tensor:
    return _tensor(storage.view(dtype), offset, size, stride)


def _of_type(function: Any, _: Any, args: tuple[Any, ...], *__: Any) -> Any:
    """Return a tensor that was saved with attributes, without these attributes."""
    if not isinstance(function, _Call):
        raise RefusedError("it builds a tensor with a class, expected a function")
    return function(*args)


def _jagged(parts: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a nested tensor as a list, from their concatenated values."""
    values, offsets = parts["values"], parts["offsets"]
    if parts["_ragged_idx"] != 1 or parts["lengths"] is not None:
        raise RefusedError("it holds a nested tensor whose parts are not simply concatenated")
    if offsets.nbytes > offsets.untyped_storage().nbytes():  # a stride of 0 repeats one number any number of times
        raise RefusedError("it holds a nested tensor with more offsets than the file contains")
    return [values[first:end] for first, end in pairwise(offsets.tolist())]


def _items(*items: Any) -> list[Any]:
    return list(*items)


def _bytes(*content: Any) -> bytes:
    return content[0] if content and isinstance(content[0], bytes) else b""


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda *pairs: dict(*pairs),
    "collections.defaultdict": lambda *_: {},
    **{
        f"{builtins}.{name}": function
        for builtins in ("builtins", "__builtin__")
        for name, function in (("set", _items), ("frozenset", _items), ("bytes", _bytes), ("bytearray", _bytes))
    },
    "_codecs.encode": lambda text, *_: text.encode("latin1"),
    "torch.Size": lambda *sizes: tuple(*sizes),
    "torch.device": lambda *name: str(name),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_of_buffer for core in ("core", "_core")},
}
_KINDS: Mapping[str, Any] = {
    "numpy.ndarray": PickledArray,
    "numpy.dtype": _PickledDtype,
    "torch.Tensor": Inert,
    "torch.nested._internal.nested_tensor.NestedTensor": Inert,
    "torch._dynamo.decorators._DimRange": Inert,
}


class _InertUnpickler(pickle.Unpickler):
    """Unpickler that resolves names only to the functions and stand-ins of this module."""

    def __init__(self, content: bytes, storages: Callable[[str], bytes] | None):
        super().__init__(io.BytesIO(content))
        self._storages, self._loaded = storages, dict[str, torch.Tensor]()
        self._made: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return this module's function or class for a name in the pickle.

        Raises:
            RefusedError: No dump of a rollout needs the name.
        """
        path = f"{module}.{name}"
        if path not in self._made:
            self._made[path] = self._make(path, module, name)
        return self._made[path]

    def _make(self, path: str, module: str, name: str) -> Any:
        if path in _FUNCTIONS:
            return _Call(_FUNCTIONS[path])
        if path in _KINDS:
            return type(name, (_KINDS[path],), {})  # new for each load, since a pickle may set attributes of a class
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in FRAMEWORKS:
            return type("Inert", (Inert,), {"path": path})
        raise RefusedError(f"it names {path}, which no dump of a rollout needs")

    def persistent_load(self, saved: Any) -> torch.Tensor:
        """Return a tensor's storage as a flat tensor."""
        if self._storages is None or not isinstance(saved, tuple) or len(saved) < 5 or saved[0] != "storage":
            raise RefusedError("it refers to something outside of the file")
        _, dtype, key = saved[:3]
        if key not in self._loaded:
            content = self._storages(str(key))
            self._loaded[key] = (
                torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
        return self._loaded[key]


def read_pickle(content: bytes, where: str) -> Any:
    """Return the content of a pickle or of a `torch.save` file.

    Raises:
        DataError: The pickle names something that no dump needs, or is damaged.
    """
    try:
        return _parse(content)
    except RefusedError as error:
        raise DataError(
            f"{where}: refused: {error}; allowed are tensors, numpy arrays, containers and classes of"
            f" {', '.join(FRAMEWORKS)}"
        ) from None
    except Exception as error:  # a torn file can fail in any way
        raise DataError(f"{where}: cannot be read as a pickle: {one_line(error)}") from error


def _parse(content: bytes) -> Any:
    if not content.startswith(b"PK"):
        return _InertUnpickler(content, None).load()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise RefusedError("it is a compressed archive, which torch.save does not write")
        programs = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise RefusedError("it is an archive that torch.save has not written")
        folder = programs[0].removesuffix("data.pkl")
        return _InertUnpickler(archive.read(programs[0]), lambda key: archive.read(f"{folder}data/{key}")).load()
