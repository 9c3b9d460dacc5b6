# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from tests.support.gloo_ranks import run_ranks

CPU = torch.device("cpu")
LARGEST_EXACT = 2**53


def reduce_parts(world_size: int) -> dict[str, Any]:
    """Each rank fills its own places; returns what all of them read."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    collectives: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d":
                collectives.append(str(function))
            return function(*args, **(kwargs or {}))

    parts = [
        torch.zeros(world_size, 2, dtype=torch.long),
        torch.full((3,), 0.5 * rank),
        torch.zeros(0, 4),
        torch.tensor(LARGEST_EXACT // world_size - rank % 2, dtype=torch.long),
        torch.arange(6).reshape(2, 3).T,
    ]
    parts[0][rank] = torch.tensor([rank, 1])
    before = [part.clone() for part in parts]
    with Log():
        sums = sum_over_ranks(parts, CPU)
    unchanged = all(torch.equal(part, earlier) for part, earlier in zip(parts, before, strict=True))
    result = {
        "sums": [each.tolist() for each in sums],
        "types": {str(each.dtype) for each in sums},
        "collectives": len(collectives),
        "unchanged": unchanged,
    }
    dist.destroy_process_group()
    return result


@pytest.mark.megatron
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_everything_in_one_collective(world_size: int) -> None:
    for result in run_ranks(reduce_parts, world_size, world_size):
        own, halves, nothing, large, transposed = result["sums"]
        assert own == [[rank, 1] for rank in range(world_size)]
        assert halves == [0.5 * sum(range(world_size))] * 3
        assert nothing == []
        assert large == LARGEST_EXACT - world_size // 2, "counts are exact"
        assert transposed == [[0, 3 * world_size], [world_size, 4 * world_size], [2 * world_size, 5 * world_size]]
        assert result["types"] == {"torch.float64"}
        assert result["collectives"] == (0 if world_size == 1 else 1)
        assert result["unchanged"]


def test_without_a_process_group() -> None:
    parts = [torch.tensor([1, 2]), torch.tensor(0.25), torch.tensor([[True, False]])]
    sums = sum_over_ranks(parts, CPU)
    assert [each.tolist() for each in sums] == [[1.0, 2.0], 0.25, [[1.0, 0.0]]]
    assert [each.shape for each in sums] == [part.shape for part in parts]
    assert parts[0].tolist() == [1, 2]


def test_an_accelerator_is_asked_once() -> None:
    """Tensors without data, on a device that need not exist: only copies to the host leave it."""
    copies: list[torch.Size] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            sources = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"]
            if sources and isinstance(result, torch.Tensor) and result.device.type == "cpu":
                copies.append(result.shape)
            return result

    with FakeTensorMode():
        device = torch.device("cuda", 0)
        parts = [torch.zeros(4, 3, 2, dtype=torch.long, device=device), torch.zeros(5, device=device)]
        with Log():
            sums = sum_over_ranks(parts, device)
        assert [each.device for each in sums] == [CPU, CPU]
    assert copies == [torch.Size([29])]
