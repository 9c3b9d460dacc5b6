# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults that hang or crash a job on GPUs are found on the fake card, and named with both ranks' lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_card import faults
from tests.fake_card.ranks import run_on_cards
from tests.support.gloo_ranks import RankError

LINES = Path(faults.__file__).read_text(encoding="utf-8").splitlines()


def _site(text: str, *, behind: Callable[[], object]) -> str:
    """Return where a line of a fault is, as messages say it."""
    first = next(n for n, line in enumerate(LINES) if line.startswith(f"def {behind.__name__}("))
    return f"tests/fake_card/faults.py:{next(n for n in range(first, len(LINES)) if text in LINES[n]) + 1}"


def _message(fault: Callable[[], object], world_size: int = 2, **environment: str) -> str:
    with pytest.raises(RankError) as error:
        run_on_cards(fault, world_size, timeout_s=200, **environment)
    return str(error.value)


DIFFERENCES: dict[Callable[[], object], tuple[tuple[str, str], tuple[str, str]]] = {
    faults.skipped_collective: (
        ("AllReduce of 8 float32, sum", "torch.zeros(8"),
        ("AllReduce of 9 float32, max", "torch.zeros(9"),
    ),
    faults.other_operation: (
        ("AllReduce of 8 float32, sum", "all_reduce"),
        ("AllGather of 8 float32", "all_gather"),
    ),
    faults.other_size: (
        ("AllReduce of 8 float32, sum", "all_reduce"),
        ("AllReduce of 9 float32, sum", "all_reduce"),
    ),
    faults.other_type: (
        ("AllReduce of 8 float32, sum", "all_reduce"),
        ("AllReduce of 8 bfloat16, sum", "all_reduce"),
    ),
    faults.other_root: (
        ("Broadcast of 8 float32, root rank 0", "dist.broadcast"),
        ("Broadcast of 8 float32, root rank 1", "dist.broadcast"),
    ),
}


@pytest.mark.parametrize("fault", DIFFERENCES, ids=lambda fault: fault.__name__)
def test_a_difference_between_ranks_names_both_calls(fault: Callable[[], object]) -> None:
    message = _message(fault)
    assert "ranks differ in the communicator of ranks [0, 1]" in message
    for rank, (call, line) in enumerate(DIFFERENCES[fault]):
        assert f"rank {rank}: {call} at {_site(line, behind=fault)}" in message


def test_split_sizes_that_differ_are_named() -> None:
    message = _message(faults.other_split_sizes)
    site = _site("all_to_all_single", behind=faults.other_split_sizes)
    assert "ranks differ" in message
    assert f"rank 1: send of 3 float32, to rank 0 at {site}" in message
    assert f"rank 0: receive of 4 float32, from rank 1 at {site}" in message


def test_groups_in_another_order_are_named_when_all_ranks_wait() -> None:
    message = _message(faults.wrong_order, FAKE_CARD_STALL_S="3")
    site = _site("torch.zeros(8", behind=faults.wrong_order)
    assert "NCCL would wait for ever" in message
    for rank in (0, 1):
        assert f"rank {rank}: waits in AllReduce of 8 float32, sum at {site}" in message


@pytest.mark.parametrize("fault", [faults.dead_rank, faults.skipped_collective_of_the_same_kind])
def test_a_rank_that_has_ended_is_named(fault: Callable[[], object]) -> None:
    message = _message(fault)
    assert "rank 1 has ended, and is waited for in the communicator of ranks [0, 1]" in message
    assert f"rank 0: waits in AllReduce of 8 float32, sum at {_site('all_reduce', behind=fault)}" in message
    assert "rank 1: has ended; last " in message


def test_a_rank_that_waits_elsewhere_is_named_after_the_limit() -> None:
    message = _message(faults.waits_outside, FAKE_CARD_TIMEOUT_S="5")
    assert "nothing came for 5 seconds in the communicator of ranks [0, 1]" in message
    assert "rank 1: is outside; last " in message


@pytest.mark.parametrize("fault", [faults.tensor_on_the_host, faults.index_of_the_host_into_a_kernel])
def test_a_tensor_that_is_left_on_the_host_is_named(fault: Callable[[], object]) -> None:
    message = _message(fault, 1)
    assert "Expected all tensors to be on the same device, but found cpu and cuda:0" in message
    assert fault.__name__ in message


def test_a_tensor_of_the_host_is_refused_by_the_process_group() -> None:
    message = _message(faults.host_tensor_for_nccl)
    assert "No backend type associated with device type cpu" in message
    assert "host_tensor_for_nccl" in message


def test_an_allocation_above_the_card_is_cuda_s_error() -> None:
    message = _message(faults.allocation_above_the_card, 1)
    assert "CUDA out of memory. Tried to allocate 954.00 MiB. GPU 0 has a total capacity of 79.16 GiB" in message
    assert "allocation_above_the_card" in message


def test_a_full_card_gives_all_of_it_back() -> None:
    (numbers,) = run_on_cards(faults.memory_of_a_full_card, 1, FAKE_CARD_GB="3.5")
    assert numbers == {"free": 3.5, "refused at": pytest.approx(3.0, abs=0.01), "free again": 3.5}
