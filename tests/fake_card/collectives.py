# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every collective and message of ProcessGroupNCCL against what it must give. Numbers are small integers, so that sums
are exact in every type."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
SHAPES = ((1,), (7, 3), (700_001,))
"""One element, few, and more than what ranks show each other at a time."""


@contextmanager
def nccl_job() -> Iterator[tuple[int, int, torch.device]]:
    """The job of this process. Gives rank, number of ranks, and card."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=100))
    try:
        yield rank, size, device
    finally:
        dist.destroy_process_group()


def given(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return what a rank puts in: integers from 0 to 9."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 10, tuple(shape), generator=generator).to(dtype)


def _must_be(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected.to(found.dtype), rtol=0, atol=0, msg=lambda m: f"{what}: {m}")


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() for each in tensors]).sum(0)


def _reductions(rank: int, size: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
    every = [given(r, shape, dtype) for r in range(size)]
    expected: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "SUM": lambda numbers: numbers.sum(0),
        "MAX": lambda numbers: numbers.amax(0),
        "MIN": lambda numbers: numbers.amin(0),
        "PRODUCT": lambda numbers: numbers.prod(0),
    }
    if dtype.is_floating_point:
        expected["AVG"] = lambda numbers: numbers.mean(0)
    for name, compute in expected.items():
        tensor = every[rank].to(device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        _must_be(tensor, compute(torch.stack(every).double()), f"all_reduce {name}")
    tensor = every[rank].to(device)
    dist.reduce(tensor, 0)
    if rank == 0:
        _must_be(tensor, _sum(every), "reduce")
    whole = [given(r, (size, *shape), dtype, 1) for r in range(size)]
    part = torch.empty(shape, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(part, whole[rank].to(device))
    _must_be(part, _sum(whole)[rank], "reduce_scatter_tensor")
    in_place = whole[rank].to(device)
    dist.reduce_scatter_tensor(in_place[rank], in_place)
    _must_be(in_place[rank], _sum(whole)[rank], "reduce_scatter_tensor in place")


def _movements(rank: int, size: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
    every = [given(r, shape, dtype) for r in range(size)]
    tensor = every[rank].to(device)
    dist.broadcast(tensor, size - 1)
    _must_be(tensor, every[-1], "broadcast")
    gathered = torch.empty((size, *shape), dtype=dtype, device=device)
    dist.all_gather_into_tensor(gathered, every[rank].to(device))
    _must_be(gathered, torch.stack(every), "all_gather_into_tensor")
    gathered = torch.empty((size, *shape), dtype=dtype, device=device)
    gathered[rank] = every[rank].to(device)
    dist.all_gather_into_tensor(gathered, gathered[rank])
    _must_be(gathered, torch.stack(every), "all_gather_into_tensor in place")
    parts = [torch.empty(tuple(shape), dtype=dtype, device=device) for _ in range(size)]
    dist.all_gather(parts, every[rank].to(device))
    for part, expected in zip(parts, every, strict=True):
        _must_be(part, expected, "all_gather")
    whole = [given(r, (size, *shape), dtype, 1) for r in range(size)]
    received = torch.empty((size, *shape), dtype=dtype, device=device)
    dist.all_to_all_single(received, whole[rank].to(device))
    _must_be(received, torch.stack([each[rank] for each in whole]), "all_to_all_single")


def _uneven(rank: int, size: int, device: torch.device, unit: int, dtype: torch.dtype) -> None:
    """Sizes that differ, with an empty one."""
    sizes = [[(3 * i + 5 * j) % 7 * unit for j in range(size)] for i in range(size)]
    every = [given(r, (sum(sizes[r]),), dtype, 2) for r in range(size)]
    incoming = [sizes[r][rank] for r in range(size)]
    received = torch.empty(sum(incoming), dtype=dtype, device=device)
    dist.all_to_all_single(received, every[rank].to(device), incoming, sizes[rank])
    expected = [every[r].split(sizes[r])[rank] for r in range(size)]
    _must_be(received, torch.cat(expected), "all_to_all_single of uneven sizes")
    parts = [torch.empty((r + 1, 2), dtype=dtype, device=device) for r in range(size)]
    dist.all_gather(parts, given(rank, (rank + 1, 2), dtype).to(device))
    for r, part in enumerate(parts):
        _must_be(part, given(r, (r + 1, 2), dtype), "all_gather of uneven sizes")


def _messages(rank: int, size: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
    every = [given(r, shape, dtype) for r in range(size)]
    ours, theirs = every[rank].to(device), torch.empty(tuple(shape), dtype=dtype, device=device)
    ring = [dist.P2POp(dist.isend, ours, (rank + 1) % size), dist.P2POp(dist.irecv, theirs, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    _must_be(theirs, every[rank - 1], "batch_isend_irecv")
    if rank == 0:
        dist.send(ours, 1)
    elif rank == 1:
        dist.recv(theirs, 0)
        _must_be(theirs, every[0], "recv")


def _groups(rank: int, size: int, device: torch.device) -> None:
    backwards = dist.new_group(list(range(size))[::-1], group_desc="backwards")
    tensor = torch.full((5,), float(rank), device=device)
    dist.all_reduce(tensor, group=backwards)
    _must_be(tensor, torch.full((5,), size * (size - 1) / 2), "all_reduce of another group")
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    tensors = [torch.full((k + 1,), float(rank), device=device) for k in range(3)]
    with dist._coalescing_manager(device=device, async_ops=True) as collected:
        for tensor in tensors:
            dist.all_reduce(tensor)
    collected.wait()
    for tensor in tensors:
        _must_be(tensor, torch.full(tensor.shape, size * (size - 1) / 2), "collected all_reduce")
    dist.barrier()


def try_all(name: str) -> None:
    """Run on each rank: every collective in one type of elements."""
    dtype = TYPES[name]
    with nccl_job() as (rank, size, device):
        for shape in SHAPES:
            _reductions(rank, size, device, shape, dtype)
            _movements(rank, size, device, shape, dtype)
            _messages(rank, size, device, shape, dtype)
        for unit in (1, 90_000):
            _uneven(rank, size, device, unit, dtype)
        _groups(rank, size, device)
