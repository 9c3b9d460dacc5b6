# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Process groups of the parallel layout, and a rank's coordinates in it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroupGloo, Store, TCPStore, distributed_c10d

from nemo_rl_moe.config.schema_policy import MegatronConfig
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.rank_results import ParallelCoordinates

BACKLOG = 4096
"""Maximum number of connections to the rendezvous store that wait to be accepted."""


def rendezvous_store(rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Open the key-value store by which the ranks find each other, at MASTER_ADDR and MASTER_PORT.

    Rank 0 serves the store only at that address. torch's default listens on all interfaces without credentials, so
    strangers could read and write its keys. Under a launcher such as torchrun, the launcher's store is used.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    # The store takes over the socket, and closes it.
    listener = socket.create_server(found[:2], family=family, backlog=BACKLOG)
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def shared_gloo_device() -> Iterator[None]:
    """Use one network device, and so one thread, for all gloo process groups created while the context is open.

    A device's thread wakes up a hundred times a second. The threads of Megatron-Core's twenty groups would take 4% of a
    worker's core. torch.distributed has no option for sharing.
    """
    # The same choice as torch's for a single group.
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [ProcessGroupGloo.create_device(interface=name) for name in names.split(",") if name]
    address = os.environ.get("MASTER_ADDR", "")
    if not devices and (address == "localhost" or address.startswith("127.")):
        # The default is the interface of the machine's host name, which other machines may reach.
        devices = [ProcessGroupGloo.create_device(hostname=address)]
    devices = devices or [ProcessGroupGloo.create_default_device()]

    class SharedDeviceGloo(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    # The replacement is a class, not a function, because torch also uses this name in isinstance().
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


OF_SHARE, OF_RANK = "nemo-rl-moe-share", "nemo-rl-moe-rank"
"""Names of random states. `OF_SHARE` is equal on the ranks of a tensor-parallel group, and differs between groups.
`OF_RANK` differs on all ranks."""


def initialize_parallel_state(megatron: MegatronConfig, rank: int, world_size: int, local_rank: int, seed: int) -> None:
    if not cpu_backend.ACTIVE:
        torch.cuda.set_device(local_rank)
    minutes = megatron.distributed_timeout_minutes
    timeout = timedelta(minutes=minutes)
    dist.init_process_group(
        "gloo" if cpu_backend.ACTIVE else "nccl",
        store=rendezvous_store(rank, world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        # These groups are not used here, and a wrong host name would break them in a run over NCCL.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=minutes,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    # The random states of Megatron-Core and torch are equal on all data-parallel ranks.
    tracker, share = get_cuda_rng_tracker(), rank // megatron.tensor_model_parallel_size
    tracker.add(OF_SHARE, seed + 10_000 + share)
    tracker.add(OF_RANK, seed + 1_000_000 + rank)


def parallel_coordinates() -> ParallelCoordinates:
    return ParallelCoordinates(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        context_rank=parallel_state.get_context_parallel_rank(),
    )


def device() -> torch.device:
    """Return the device that this rank computes on."""
    return torch.device("cpu") if cpu_backend.ACTIVE else torch.device("cuda", torch.cuda.current_device())


def destroy_parallel_state() -> None:
    """Leave all process groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
