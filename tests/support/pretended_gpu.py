# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A GPU that there is not: tensors with real numbers on the host that are taken for the device's or for the host's.

What a tensor's memory belongs to is noted at its storage, so that views and parameters follow. Code that asks for
`cuda` gets tensors that say they are there; an operation on both kinds raises as CUDA's would; and what would make the
host wait for the device is counted with its place. The numbers are those of the host, so that whole steps run.

What torch itself composes of others on the host is seen as it is composed there. Kernels that only a GPU has, their
speed and their order are not seen.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._C._distributed_c10d import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")

# Operations whose result's shape depends on values, or that end on the host.
_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "argwhere",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_COPIES = frozenset({"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"})


class Wait(NamedTuple):
    """What makes the host wait, and the function that asks for it.

    Attributes:
        owner: `ours`, `megatron`, `transformer_engine`, or `tests` with what stands in there for other packages.
        function: Module and name of the innermost function outside of torch.
        kind: The operation.
    """

    owner: str
    function: str
    kind: str


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), "lies_on_gpu", False)


def _place(tensor: torch.Tensor, on_gpu: bool, *, pinned: bool = False) -> None:
    with torch._C.DisableTorchFunction():
        storage: Any = tensor.untyped_storage()
        storage.lies_on_gpu, storage.is_pinned_memory = on_gpu, pinned


def _is_pinned(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), "is_pinned_memory", False)


def _is_gpu(device: Any) -> bool:
    """Return True for what names a GPU: a device, its number, or its name."""
    return isinstance(device, int) or str(device).startswith("cuda")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class PretendedGpu:
    """The pretended device of this process.

    Attributes:
        waits: How often the host would have waited, since `clear`.
    """

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        # What a tensor that is made of nothing belongs to, by the function of torch that Python has called.
        self.makes_on_gpu: list[bool] = []

    def wait(self, kind: str) -> None:
        self.waits[Wait(*caller(), kind)] += 1

    @contextmanager
    def plugged_in(self) -> Iterator["PretendedGpu"]:
        """Everything inside sees the device; torch's process groups carry its tensors alone."""
        from nemo_rl_moe.models.megatron.model import gpt_model, parallel_state

        cuda: Any = torch.cuda

        def synchronize(*_: Any, **__: Any) -> None:
            self.wait("synchronize")

        wait_for_peers = Work.wait

        def wait(work: Any, *args: Any) -> Any:
            # gloo copies what it has received out of memory of its own; NCCL does not.
            before = self.waits.copy()
            done = wait_for_peers(work, *args)
            self.waits = before
            return done

        with (
            mock.patch.object(Work, "wait", wait),
            mock.patch.object(parallel_state, "device", return_value=GPU),
            mock.patch.object(gpt_model, "cpu_backend", SimpleNamespace(ACTIVE=False)),
            mock.patch.object(cuda, "current_device", return_value=GPU),
            mock.patch.object(cuda, "reset_peak_memory_stats"),
            # The host's stand-in for a stream is none that torch would take.
            mock.patch.object(torch.Tensor, "record_stream", create=True),
            mock.patch.object(cuda, "synchronize", synchronize),
            mock.patch.object(cuda.Stream, "synchronize", synchronize),
            mock.patch.object(cuda.Event, "synchronize", synchronize),
            mock.patch.object(torch.distributed.distributed_c10d, "_get_object_coll_device", return_value=GPU),
            _Operations(self),
            _Functions(self),
        ):
            yield self


# What Python calls


class _Functions(TorchFunctionMode):
    """Answers questions for the device, and notes what new tensors belong to."""

    def __init__(self, gpu: PretendedGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(function)
        if answer is not None:
            return answer(self._gpu, function, *args, **kwargs)
        if getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        asked = kwargs.get("device")
        pinned = bool(kwargs.get("pin_memory"))
        if asked is not None or pinned:
            kwargs = {**kwargs, "pin_memory": False} if pinned else kwargs
            kwargs = {**kwargs, "device": HOST} if asked is not None else kwargs
        given = list(tensors_in((*args, *kwargs.values())))
        on_gpu = _is_gpu(asked) if asked is not None else any(map(lies_on_gpu, given))
        self._gpu.makes_on_gpu.append(on_gpu)
        try:
            result = function(*args, **kwargs)
        finally:
            self._gpu.makes_on_gpu.pop()
        if function in _OF_VALUES and on_gpu and not (given and all(map(lies_on_gpu, given))):
            self._gpu.wait(function.__name__)
        if (asked is not None or pinned or function in _OF_VALUES) and isinstance(result, torch.Tensor):
            _place(result, on_gpu, pinned=pinned)
        return result


# Makers of tensors out of Python's values, which lie in memory that the device cannot read.
_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


def _to(gpu: PretendedGpu, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    copy = kwargs.pop("copy", False)
    if "other" in kwargs or (args and isinstance(args[0], torch.Tensor)):
        other, *rest = [kwargs.pop("other")] if "other" in kwargs else args
        args = (GPU if lies_on_gpu(other) else HOST, other.dtype, *rest)
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (GPU, *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = GPU
    with torch._C.DisableTorchFunction():
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return _moved(gpu, tensor, device, dtype, non_blocking, copy, memory_format)


def _moved(
    gpu: PretendedGpu,
    tensor: torch.Tensor,
    device: Any = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    here = lies_on_gpu(tensor)
    there = here if device is None else _is_gpu(device)
    as_asked = {} if memory_format is None else {"memory_format": memory_format}
    gpu.makes_on_gpu.append(there)
    try:
        result = tensor.to(dtype=dtype or tensor.dtype, copy=copy or here != there, **as_asked)
    finally:
        gpu.makes_on_gpu.pop()
    if here == there:
        return result
    # To the host and without waiting, torch takes memory that the device can write into.
    _place(result, there, pinned=non_blocking and not there)
    if tensor.numel() and not (non_blocking and (not there or _is_pinned(tensor))):
        gpu.wait(_copy_kind(there))
    return result


def _copy_kind(to_gpu: bool) -> str:
    return "copy to the device" if to_gpu else "copy to the host"


def _cpu(gpu: PretendedGpu, function: Any, tensor: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    return _moved(gpu, tensor, HOST, memory_format=memory_format)


def _cuda(
    gpu: PretendedGpu, function: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any
) -> torch.Tensor:
    return _moved(gpu, tensor, GPU, non_blocking=non_blocking)


def _pin_memory(gpu: PretendedGpu, function: Any, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if lies_on_gpu(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.Tensor' only dense CPU tensors can be pinned")
    pinned = tensor.clone()
    _place(pinned, False, pinned=True)
    return pinned


def _tolist(gpu: PretendedGpu, function: Any, tensor: torch.Tensor) -> Any:
    if lies_on_gpu(tensor):
        gpu.wait("tolist")
    return function(tensor)


def _numpy(gpu: PretendedGpu, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if lies_on_gpu(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    return function(tensor, *args, **kwargs)


def _deepcopy(gpu: PretendedGpu, function: Any, tensor: torch.Tensor, memo: Any) -> torch.Tensor:
    copied = function(tensor, memo)
    _place(copied, lies_on_gpu(tensor))
    return copied


_of = torch.Tensor
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _of.device.__get__: lambda gpu, function, tensor: GPU if lies_on_gpu(tensor) else HOST,
    _of.is_cuda.__get__: lambda gpu, function, tensor: lies_on_gpu(tensor),
    _of.is_cpu.__get__: lambda gpu, function, tensor: not lies_on_gpu(tensor),
    _of.get_device: lambda gpu, function, tensor: 0 if lies_on_gpu(tensor) else -1,
    _of.is_pinned: lambda gpu, function, tensor, *_: _is_pinned(tensor),
    _of.to: _to,
    _of.cpu: _cpu,
    _of.cuda: _cuda,
    _of.pin_memory: _pin_memory,
    _of.tolist: _tolist,
    _of.numpy: _numpy,
    _of.__array__: _numpy,
    _of.__deepcopy__: _deepcopy,
}


# What torch does


class _Operations(TorchDispatchMode):
    """Raises where the two kinds of memory meet, counts what waits, and hands on what tensors belong to."""

    def __init__(self, gpu: PretendedGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = list(tensors_in((*args, *kwargs.values())))
            on_gpu = [getattr(tensor.untyped_storage(), "lies_on_gpu", False) for tensor in given]
            namespace, _, name = function._schema.name.partition("::")
            if any(on_gpu):
                self._check(namespace, name, args, kwargs, given, on_gpu)
            elif namespace == "c10d" and given:
                raise RuntimeError(f"No backend type associated with device type cpu: {name} at {caller()}")
            result = function(*args, **kwargs)
            belongs = any(on_gpu) if given else self._gpu.makes_on_gpu[-1] if self._gpu.makes_on_gpu else True
            if belongs and name != "copy_":
                for tensor in tensors_in((result,)):
                    tensor.untyped_storage().lies_on_gpu = True  # type: ignore[attr-defined]
            return result

    def _check(
        self, namespace: str, name: str, args: Any, kwargs: Any, given: Sequence[torch.Tensor], on_gpu: Sequence[bool]
    ) -> None:
        if name in _INDEXING:
            self._check_indices(name, args, on_gpu[0])
        elif name == "copy_":
            self._check_copy(args, kwargs)
        elif name not in _COPIES and not all(on_gpu):
            on_host = [tensor for tensor, is_there in zip(given, on_gpu, strict=True) if not is_there]
            written = name.endswith("_") and not on_gpu[0]
            if namespace == "c10d" or written or any(tensor.dim() for tensor in on_host):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu:"
                    f" {name} of {[list(each.shape) for each in on_host]} on the host at {caller()}"
                )
        if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._gpu.wait(name)

    def _check_indices(self, name: str, args: Any, self_on_gpu: bool) -> None:
        values = [index for index in args[1] if index is not None]
        by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in values)
        from_host = [index for index in values if not lies_on_gpu(index)]
        if not self_on_gpu and len(from_host) < len(values):
            raise RuntimeError(f"indices should be on the device of what they index, at {caller()}")
        if from_host and self_on_gpu:
            self._gpu.wait("indices from the host")
        # One value at all places of one mask is filled in.
        fills = name.startswith("index_put") and len(values) == 1 and args[2].numel() == 1 and not any(args[3:])
        if by_mask and not fills:
            self._gpu.wait(f"{name} by a mask")

    def _check_copy(self, args: Any, kwargs: Any) -> None:
        target, source = args[0], args[1]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        to_gpu = lies_on_gpu(target)
        if to_gpu == lies_on_gpu(source) or not source.numel():
            return
        if not (non_blocking and _is_pinned(source if to_gpu else target)):
            self._gpu.wait(_copy_kind(to_gpu))


# Places

_TORCH = f"{Path(torch.__file__).parent}/"
_SKIPPED = (__file__, str(Path(__file__).with_name("nccl_rules.py")))
_TESTS = f"{Path(__file__).resolve().parents[1]}/"


def caller(*, beyond: Sequence[str] = ()) -> tuple[str, str]:
    """Return the owner and name of the innermost function outside of torch, of this file and of others."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        is_skipped = file in (*_SKIPPED, *beyond) or file.startswith((_TORCH, "<"))
        if frame.f_code.co_name != "__torch_function__" and not is_skipped:
            break
        frame = frame.f_back
    file = frame.f_code.co_filename
    of_packages = {"/megatron/core/": "megatron", "/site-packages/transformer_engine/": "transformer_engine"}
    owner = next((name for part, name in of_packages.items() if part in file), None)
    owner = owner or ("tests" if file.startswith(_TESTS) else "ours")
    return owner, f"{Path(file).stem}.{frame.f_code.co_qualname.replace('.<locals>', '')}"


def by_owner(waits: Iterable[tuple[Wait, int]], owner: str) -> dict[tuple[str, str], int]:
    """Return the counts of one owner's waits by function and kind."""
    return {(wait.function, wait.kind): count for wait, count in waits if wait.owner == owner}
