# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Asks the fake card whether it is one: python -m tests.fake_card.self_test. Nothing else means anything before.

Exits with a line that says why, if torch was not tried, if its libraries are not the fake card's, or if what the card
computes is not what the host computes.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable

from tests.fake_card.build import require_tried_torch
from tests.fake_card.environment import card_environment, shared_folder


def _libraries_are_fake() -> None:
    import torch

    assert torch.cuda.is_available(), "torch sees no card"
    for library, symbol in (("libcudart.so.13", "fake_card_launches"), ("libnccl.so.2", "fake_card_collectives")):
        assert hasattr(ctypes.CDLL(library), symbol), f"{library} is not the fake card's"
    assert torch.cuda.get_device_capability() == (9, 0)


def _memory_is_counted() -> None:
    import torch

    before = torch.cuda.memory_allocated()
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 << 20
    free, total = torch.cuda.mem_get_info()
    assert total - free >= 3 << 20
    assert torch.ones(4).pin_memory().is_pinned()
    del held
    assert torch.cuda.memory_allocated() == before


def _numbers_are_right() -> None:
    import torch

    def outcome(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(6, 5, generator=generator).to(device).requires_grad_()
        weights = torch.randn(5, 4, generator=generator).to(device).requires_grad_()
        hidden = torch.nn.functional.silu(inputs @ weights)
        best = hidden.topk(2, dim=1)
        loss = torch.nn.functional.cross_entropy(hidden, best.indices[:, 1]) + best.values.square().mean()
        loss.backward()
        parts = torch.cat([hidden.detach().t().contiguous().view(-1), hidden.detach()[hidden.detach() > 0]])
        return [each.cpu() for each in (loss.detach(), parts, inputs.grad, weights.grad, best.indices)]

    for found, expected in zip(outcome("cuda"), outcome("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _products_of_bfloat16_are_summed_in_float32() -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 3, generator=generator).bfloat16() for _ in range(2))
    expected = (first.float() @ second.float()).bfloat16()
    first, second = first.cuda(), second.cuda()
    written, added = torch.empty_like(first[0]), torch.zeros_like(first[1])
    torch.mm(first[0], second[0], out=written)
    added.addmm_(first[1], second[1])
    for found in (first @ second, torch.stack([written, added])):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def _backward_runs_in_threads_of_the_card() -> None:
    import threading

    import torch

    seen = set()
    tensor = torch.ones(3, device="cuda", requires_grad=True)
    tensor.register_hook(lambda gradient: seen.add(threading.get_ident()))
    (tensor * 2).sum().backward()
    assert seen == {*seen} - {threading.get_ident()}, "the backward pass ran in the main thread"
    assert tensor.grad is not None
    assert tensor.grad.cpu().tolist() == [2.0, 2.0, 2.0]


def _random_states_are_the_card_s() -> None:
    import torch

    torch.cuda.manual_seed(3)
    on_host = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first, second = (torch.rand(8, device="cuda").cpu() for _ in range(2))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="cuda").cpu(), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), on_host)


def _waits_are_reported() -> None:
    import warnings

    import torch

    flags = torch.tensor([True, False], device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (flags & flags).any()
        assert not found, "an operation that does not wait is reported"
        flags.nonzero()
        flags[0].item()
    torch.cuda.set_sync_debug_mode("default")
    assert len(found) == 2, f"{len(found)} waits instead of 2"


CHECKS: tuple[Callable[[], None], ...] = (
    _libraries_are_fake,
    _memory_is_counted,
    _numbers_are_right,
    _products_of_bfloat16_are_summed_in_float32,
    _backward_runs_in_threads_of_the_card,
    _random_states_are_the_card_s,
    _waits_are_reported,
)


def main() -> int:
    """Run the checks in a process that sees a card; return the exit code."""
    release = require_tried_torch()
    if sys.argv[1:] == ["--inside"]:
        for check in CHECKS:
            check()
        print(f"[fake card] torch {release}: {len(CHECKS)} checks of the card itself passed")
        return 0
    with shared_folder() as folder:
        command = [sys.executable, "-m", "tests.fake_card.self_test", "--inside"]
        return subprocess.run(command, env=card_environment(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
