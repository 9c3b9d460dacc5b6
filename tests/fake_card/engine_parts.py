# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of this project that run in vLLM's processes on a GPU, each on the rank of one card."""

from types import SimpleNamespace
from typing import Any

import torch

from nemo_rl_moe.generation.vllm.releases import report_logprobs_at_temperature
from nemo_rl_moe.generation.vllm.routes import RouteRecorder
from tests.support.vllm_runner import Runner, chosen

NUM_STEPS = 5


def waits_of_recorder() -> tuple[list[list[int]], list[Any]]:
    """Return the steps whose copies were waited for until each forward pass and after taking a request's routes.

    The request has a token in each step but the last, which vLLM has begun before it knew of the end. Also returns the
    routes.
    """
    runner = Runner(device="cuda")
    recorder = RouteRecorder(runner)
    recorder.start()
    events: list[torch.cuda.Event] = []
    waited: list[int] = []
    wait = torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = lambda event: (waited.append(events.index(event)), wait(event))[1]
    try:
        found = []
        for step in range(NUM_STEPS):
            runner.step({"7-x": (step, 1), "8-x": (step, 1)}, chosen(100 * step, 2).to("cuda"))
            events.append(recorder._steps[-1].copied)
            found.append(list(waited))
        routes = recorder.take("7", NUM_STEPS - 1)
        assert routes is not None
        return [*found, list(waited)], routes.tolist()
    finally:
        torch.cuda.Event.synchronize = wait


def memory_of_logprobs(num_rows: int, vocabulary: int) -> int:
    """Return the bytes that log-probabilities of bfloat16 logits take at most, beside their result."""

    def compute(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1, dtype=torch.float32)

    sampler = SimpleNamespace(forward=None, compute_logprobs=compute)
    report_logprobs_at_temperature(SimpleNamespace(sampler=sampler)).value = 0.7
    logits = torch.randn(num_rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = sampler.compute_logprobs(logits)
    beside = torch.cuda.max_memory_allocated() - before - int(found.nbytes)
    torch.testing.assert_close(found.cpu(), compute(logits.cpu().float() / 0.7))
    return beside
