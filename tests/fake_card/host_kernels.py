# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of the fake card: the host computes each operation on the card's tensors, in the same memory.

All else is torch's own CUDA code: allocation, views, copies of bytes, streams, events, pinned memory, generators'
states and the threads of autograd. As on a card,

- operands on the host, or on another card, are refused;
- a random operation takes its numbers from the card's generator, and moves it on. They are not CUDA's numbers;
- an operation that waits for the card is reported, if `torch.cuda.set_sync_debug_mode` asks for that.

With FAKE_CARD_UNTOUCHED=1 an operation on large tensors is left to torch's CUDA code, whose kernels do nothing: it
allocates its results, and their values have no meaning.
"""

import ctypes
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# These only make or describe memory, which torch does itself.
_WITHOUT_KERNEL = frozenset(
    {
        *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "_resize_output_"),
        *("_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh", "set_", "record_stream", "is_pinned"),
    }
)
_COPIES = frozenset({"copy_", "_to_copy", "_copy_from"})
# Indices may be on the host.
_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_ANSWERS_ON_HOST = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
# The host must know a size or a value before it goes on.
_WAITS = _ANSWERS_ON_HOST | {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"}

# With FAKE_CARD_UNTOUCHED: bytes of an operation, and elements of a tensor of floats, that are still computed. Routing
# maps are, and decide how many rows an expert gets; hidden states and weights are not.
_MOST_BYTES, _MOST_FLOATS = 24 << 20, 1 << 20


def _rms_norm_backward(
    gradient: torch.Tensor,
    given: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    last = tuple(range(-len(normalized_shape), 0))
    normed = given.float() * rstd
    weighted = gradient.float() if weight is None else gradient.float() * weight.float()
    of_given = (weighted - normed * (weighted * normed).mean(last, keepdim=True)) * rstd
    of_weight = (gradient.float() * normed).flatten(0, -len(normalized_shape) - 1).sum(0)
    return (
        of_given.to(given.dtype) if output_mask[0] else None,
        of_weight.to(weight.dtype) if output_mask[1] and weight is not None else None,
    )


_ON_CARDS_ALONE = {"_fused_rms_norm_backward": _rms_norm_backward}
"""Operations that torch has for cards and not for the host."""

_PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mm": torch.mm,
    "bmm": torch.bmm,
    "addmm": torch.addmm,
    "addmm_": torch.addmm,
    "baddbmm": torch.baddbmm,
}
"""Matrix products -> the functions that return a new tensor."""


def _summed_in_float32(name: str) -> Callable[..., torch.Tensor]:
    """Return a matrix product of bfloat16 numbers that sums in float32, as cards do.

    A host without instructions for bfloat16 needs up to 300 times as long for torch's own.
    """

    def product(*args: Any, **kwargs: Any) -> torch.Tensor:
        written = kwargs.pop("out", args[0] if name.endswith("_") else None)
        wide = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
        found = _PRODUCTS[name](*wide, **kwargs).to(torch.bfloat16)
        return found if written is None else written.copy_(found)

    return product


PARTS: dict[str, Callable[..., Any]] = {}
"""Operations of other libraries -> what they consist of."""
KERNELS: dict[str, Mapping[str, Callable[..., Any]]] = {}
"""Other libraries -> their kernels by name, as functions of the host. An operation without one fails."""


def kernel_named(library: str, name: str) -> Callable[..., Any]:
    """Return a kernel.

    Raises:
        NotImplementedError: There is none, and the results would be what the memory held before.
    """
    if name not in KERNELS[library]:
        raise NotImplementedError(f"the fake card has no kernel {name} of {library}")
    return KERNELS[library][name]


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host in the memory of one of the card."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    whole = storage.nbytes() // tensor.element_size() * tensor.element_size()
    elements = torch.frombuffer(memory, dtype=torch.uint8)[:whole].view(tensor.dtype)
    return torch.as_strided(elements, tensor.size(), tensor.stride(), tensor.storage_offset())


class HostKernels(TorchDispatchMode):
    """Computes on the host what is asked for on a card."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves_large = bool(os.environ.get("FAKE_CARD_UNTOUCHED"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (parts := PARTS.get(func._schema.name)) is not None:
            with self:
                return parts(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # where torch does not take operations apart before
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        flat, spec = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        on_card = [each for each in tensors if each.is_cuda]
        asked_for = kwargs.get("device")
        makes_on_card = asked_for is not None and torch.device(asked_for).type == "cuda"
        name = func._schema.name.partition("::")[2]
        if not (on_card or makes_on_card) or name in _WITHOUT_KERNEL or _is_view(func):
            return func(*args, **kwargs)
        kernel = _ON_CARDS_ALONE.get(name, func)
        if name in _PRODUCTS and all(each.dtype is torch.bfloat16 for each in tensors) and not _has_out_dtype(func):
            kernel = _summed_in_float32(name)
        if func.namespace not in ("aten", "prims"):
            if func.namespace not in KERNELS:
                return func(*args, **kwargs)
            kernel = kernel_named(func.namespace, name)
        if on_card and name not in _COPIES:
            _refuse_strangers(func, tensors, but_on_host=name in _INDEXES)
        if self._leaves_large and _is_large(name, tensors, args):
            return func(*args, **kwargs)
        card = on_card[0].device if on_card else _with_index(torch.device(asked_for))
        leaves_card = name == "_to_copy" and asked_for is not None and not makes_on_card
        _report_wait(name, func, args, kwargs, tensors)
        aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                aliases.append((host_alias(value), value))
                return aliases[-1][0]
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            if isinstance(value, torch.Generator) and value.device.type == "cuda":
                return _host_generator(value)
            return value

        def to_card(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for alias, original in aliases:
                if value is alias:
                    return _as_alias(original, alias)
            if leaves_card or name in _ANSWERS_ON_HOST or any(value is each for each in tensors):
                return value
            made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=card)
            if value.numel():
                host_alias(made).copy_(value)
            return made

        host_args, host_kwargs = tree_unflatten([to_host(each) for each in flat], spec)
        if asked_for is not None:
            host_kwargs["device"] = torch.device("cpu")
        if makes_on_card or (name == "_to_copy" and asked_for is None):
            host_kwargs.pop("pin_memory", None)
        with _numbers_of(card, func, flat):
            return tree_map(to_card, kernel(*host_args, **host_kwargs))


def _has_out_dtype(func: Any) -> bool:
    return any(each.name == "out_dtype" for each in func._schema.arguments)


def _is_view(func: Any) -> bool:
    if func._schema.is_mutable:
        return torch.Tag.inplace_view in func.tags
    return any(each.alias_info is not None for each in func._schema.returns)


def _is_large(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> bool:
    num_bytes = sum(each.nbytes for each in tensors)
    if not tensors or name.startswith("new_"):  # what it makes has the size that it is given
        sizes = (each for each in args[:2] if isinstance(each, (list, tuple)) and all(isinstance(n, int) for n in each))
        num_bytes += 8 * sum(map(math.prod, sizes))
    return num_bytes > _MOST_BYTES or any(each.is_floating_point() and each.numel() > _MOST_FLOATS for each in tensors)


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _refuse_strangers(func: Any, tensors: Sequence[torch.Tensor], *, but_on_host: bool) -> None:
    # A single number may be on the host.
    devices = {each.device for each in tensors if each.dim() > 0 and not (but_on_host and not each.is_cuda)}
    devices |= {each.device for each in tensors if each.is_cuda}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({func})")


def _as_alias(original: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """Return the card's tensor for what the host has written to, in its shape now."""
    if original.shape != alias.shape:
        raise RuntimeError(f"the fake card cannot change the shape {list(original.shape)} to {list(alias.shape)}")
    return original


# Random numbers


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Return a generator of the host for the state of one of the card, which goes on as after a kernel."""
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)


@contextmanager
def _numbers_of(card: torch.device, func: Any, flat: Sequence[Any]) -> Iterator[None]:
    """Let a random operation without a generator of its own take its numbers from the card's."""
    if torch.Tag.nondeterministic_seeded not in func.tags or any(isinstance(each, torch.Generator) for each in flat):
        yield
        return
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(_host_generator(torch.cuda.default_generators[card.index]).get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)


# Waiting


def _report_wait(name: str, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> None:
    mode = torch.cuda.get_sync_debug_mode()
    if not mode or not _waits(name, args, kwargs, tensors):
        return
    if mode == 2:
        raise RuntimeError(f"called a synchronizing CUDA operation ({func})")
    warnings.warn(f"called a synchronizing CUDA operation ({func})", stacklevel=3)


def _waits(name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if name in _WAITS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in _INDEXES:
        return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "copy_":
        crosses = args[0].is_cuda != args[1].is_cuda
        return crosses and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if name == "_to_copy":
        to = kwargs.get("device")
        crosses = to is not None and (torch.device(to).type == "cuda") != tensors[0].is_cuda
        return crosses and not kwargs.get("non_blocking", False)
    return False


# For a whole process

_of_thread = threading.local()


def enter(_: object = None) -> None:
    """Computes on the host from now on, in this thread and in those that it starts."""
    enter_thread()
    # torch's attention then consists of operations that the host has too.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def with_kernels(thread: threading.Thread) -> None:
        enter_thread()
        bootstrap(thread)

    threading.Thread._bootstrap_inner = with_kernels  # type: ignore[attr-defined]


def enter_thread() -> None:
    """Computes on the host from now on in this thread, if it does not yet."""
    if not hasattr(_of_thread, "kernels"):
        _of_thread.kernels = HostKernels()
        _of_thread.kernels.__enter__()
