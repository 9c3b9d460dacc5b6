# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults that hang or crash a job on GPUs. Each function runs on two ranks, and rank 1 is at fault."""

import os

import torch
import torch.distributed as dist

from tests.fake_card.collectives import nccl_job


def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of both ranks, which have met already."""
    tensor, expert = (dist.new_group([0, 1], group_desc=name) for name in ("tensor parallel", "expert parallel"))
    for group in (tensor, expert):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return tensor, expert


def skipped_collective() -> None:
    """Rank 1 leaves one out, and is a step ahead from then on."""
    with nccl_job() as (rank, _, device):
        if rank == 0:
            dist.all_reduce(torch.zeros(8, device=device))
        dist.all_reduce(torch.zeros(9, device=device), op=dist.ReduceOp.MAX)


def skipped_collective_of_the_same_kind() -> None:
    """Rank 1 leaves one out of three alike, so that the last one of rank 0 has nobody."""
    with nccl_job() as (rank, _, device):
        for _ in range(3 - rank):
            dist.all_reduce(torch.zeros(8, device=device))
        if rank == 1:
            os._exit(0)


def wrong_order() -> None:
    """Rank 1 takes two groups in the other order: each rank waits for the other for ever."""
    with nccl_job() as (rank, _, device):
        groups = _groups()
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(torch.zeros(8, device=device), group=group)


def other_operation() -> None:
    """Rank 1 gathers where rank 0 adds up."""
    with nccl_job() as (rank, _, device):
        given = torch.zeros(8, device=device)
        if rank == 0:
            dist.all_reduce(given)
        else:
            dist.all_gather_into_tensor(torch.zeros(16, device=device), given)


def other_size() -> None:
    """Rank 1 has one element more."""
    with nccl_job() as (rank, _, device):
        dist.all_reduce(torch.zeros(8 + rank, device=device))


def other_type() -> None:
    """Rank 1 has another type of elements."""
    with nccl_job() as (rank, _, device):
        dist.all_reduce(torch.zeros(8, device=device, dtype=torch.bfloat16 if rank else torch.float32))


def other_root() -> None:
    """Each rank broadcasts what it has itself."""
    with nccl_job() as (rank, _, device):
        dist.broadcast(torch.zeros(8, device=device), rank)


def other_split_sizes() -> None:
    """Rank 1 sends another number of rows than rank 0 receives."""
    with nccl_job() as (rank, _, device):
        received = torch.zeros(9 if rank else 8, device=device)
        splits = ([4, 5], [3, 5]) if rank else ([4, 4], [4, 4])
        dist.all_to_all_single(received, torch.zeros(8, device=device), *splits)


def dead_rank() -> None:
    """Rank 1 dies."""
    with nccl_job() as (rank, _, device):
        dist.barrier()
        if rank == 1:
            os._exit(7)
        dist.all_reduce(torch.zeros(8, device=device))


def waits_outside() -> None:
    """Rank 1 waits for a message of another job's store while rank 0 waits for rank 1."""
    with nccl_job() as (rank, _, device):
        dist.barrier()
        if rank == 1:
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).get("what nobody sets")
        dist.all_reduce(torch.zeros(8, device=device))


def tensor_on_the_host() -> None:
    """A mask that was left on the host."""
    hidden = torch.ones(4, 3, device="cuda")
    _ = hidden * torch.ones(4, 1)


def index_of_the_host_into_a_kernel() -> None:
    """Token ids that were left on the host."""
    torch.nn.functional.embedding(torch.tensor([1, 2]), torch.ones(4, 3, device="cuda"))


def host_tensor_for_nccl() -> None:
    """A count that was left on the host, and is added up over ranks."""
    with nccl_job():
        dist.all_reduce(torch.zeros(1))


def allocation_above_the_card() -> int:
    """Rows of 1 GB until the card is full; return how many it took."""
    return len([torch.empty(10**9, dtype=torch.uint8, device="cuda") for _ in range(200)])


def memory_of_a_full_card() -> dict[str, float]:
    """Return what the card says before, when it is full, and when all has been given back."""
    numbers = {"free": torch.cuda.mem_get_info()[0] / 1e9}
    held = [torch.empty(10**9, dtype=torch.uint8, device="cuda") for _ in range(3)]
    try:
        torch.empty(10**9, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        numbers["refused at"] = torch.cuda.memory_allocated() / 1e9
    del held
    torch.cuda.empty_cache()
    return numbers | {"free again": torch.cuda.mem_get_info()[0] / 1e9}
