# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All gloo groups of a process share one network thread, and still reach the right ranks."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from nemo_rl_moe.models.megatron.model.parallel_state import shared_gloo_device
from tests.support.gloo_ranks import run_ranks

WORLD_SIZE = 3
PAIRS = [[0, 1], [1, 2], [0, 2]]


def num_network_threads() -> int:
    """Threads of this process that wait for gloo's connections."""
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def sum_in_many_groups() -> tuple[int, int, list[float]]:
    """Threads with shared devices and without, and the sum of each pair that this rank belongs to."""
    before = num_network_threads()
    with shared_gloo_device():
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        groups = [dist.new_group(pair) for pair in PAIRS]
    shared = num_network_threads() - before
    own_group = dist.new_group(list(range(WORLD_SIZE)))
    own = num_network_threads() - before - shared
    sums = []
    for pair, group in zip(PAIRS, groups, strict=True):
        if dist.get_rank() in pair:
            value = torch.tensor(10.0 ** dist.get_rank())
            dist.all_reduce(value, group=group)
            sums.append(value.item())
    dist.barrier(own_group)
    dist.destroy_process_group()
    return shared, own, sums


def test_groups_share_one_network_thread_and_keep_their_members() -> None:
    results = run_ranks(sum_in_many_groups, WORLD_SIZE, fresh=True)
    assert [(shared, own) for shared, own, _ in results] == [(1, 1)] * WORLD_SIZE
    assert [sums for _, _, sums in results] == [[11.0, 101.0], [11.0, 110.0], [110.0, 101.0]]


def test_torch_makes_groups_as_before_afterwards() -> None:
    original = distributed_c10d.ProcessGroupGloo
    with shared_gloo_device():
        assert issubclass(distributed_c10d.ProcessGroupGloo, original)
        assert distributed_c10d.ProcessGroupGloo is not original
    assert distributed_c10d.ProcessGroupGloo is original


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_of_one_machine_do_not_ask_for_the_interface_of_its_name(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may reach that one; where the name stands for the loopback interface, no socket would show it."""

    def default() -> None:
        raise AssertionError("torch's choice")

    monkeypatch.setattr(distributed_c10d.ProcessGroupGloo, "create_default_device", default)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", address)
    with shared_gloo_device():
        pass
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(AssertionError, match="torch's choice"), shared_gloo_device():
        pass
