# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of vLLM's engines, also where a CUDA graph runs in place of Python."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm import routes
from nemo_rl_moe.generation.vllm.routes import RouteRecorder

NUM_LAYERS, TOPK, MOST_TOKENS = 3, 2, 40


class Router(nn.Module):
    """A router as vLLM's: it tells its callback whom it has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.capture_fn: Any = None

    def set_capture_fn(self, capture_fn: Any) -> None:
        self.capture_fn = capture_fn


class Layer(nn.Module):
    def __init__(self, layer_id: int, choices: Tensor):
        super().__init__()
        self.layer_id, self.router, self.choices = layer_id, Router(), choices


class Capture(TorchDispatchMode):
    """Notes the copies of a forward pass, as the capture of a CUDA graph does, to run them again without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return function(*args, **(kwargs or {}))

    def replay(self) -> None:
        for target, source in self.copies:
            target.copy_(source)


class Runner:
    """A model runner whose routers choose what stands in memory of their own, at one address for ever."""

    max_num_tokens = MOST_TOKENS

    def __init__(self, *, silent: int | None = None) -> None:
        self.choices = torch.zeros(NUM_LAYERS, MOST_TOKENS, TOPK, dtype=torch.int32)
        # In another order than that of the layers.
        self._model = nn.ModuleList([Layer(number, self.choices[number]) for number in reversed(range(NUM_LAYERS))])
        self._silent = silent
        self.graph: Capture | None = None
        self.query_start_loc = SimpleNamespace(np=np.zeros(MOST_TOKENS, dtype=np.int32))
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(MOST_TOKENS, dtype=np.int32))

    def get_model(self) -> nn.Module:
        return self._model

    def model(self, size: int) -> None:
        for layer in self._model:
            if layer.layer_id != self._silent:
                layer.router.capture_fn(layer.choices[:size])

    def _model_forward(self, size: int) -> str:
        if self.graph is None:
            self.model(size)
        else:
            self.graph.replay()
        return "hidden states"

    def step(self, batch: dict[str, tuple[int, int]], chosen: Tensor) -> None:
        """Compute tokens of requests, each with the number of those before; `chosen`: `[tokens, layers, topk]`."""
        self.choices[:, : len(chosen)] = chosen.transpose(0, 1)
        self.input_batch.req_ids = list(batch)
        self.query_start_loc.np[: len(batch) + 1] = np.cumsum([0, *(size for _, size in batch.values())])
        self.input_batch.num_computed_tokens_cpu[: len(batch)] = [done for done, _ in batch.values()]
        assert self._model_forward(len(chosen)) == "hidden states"


def chosen(first: int, count: int) -> Tensor:
    """Return other numbers for each token, layer and place."""
    return first + torch.arange(count * NUM_LAYERS * TOPK).view(count, NUM_LAYERS, TOPK)


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_each_token_has_its_experts(in_a_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_FIRST_TOKENS", 2)
    runner = Runner()
    recorder = RouteRecorder(runner)
    if in_a_graph:
        with Capture() as runner.graph:
            runner.model(MOST_TOKENS)
        for layer in runner.get_model():  # type: ignore[attr-defined]
            layer.router.set_capture_fn(None)  # Python is not asked again
    runner.step({"early": (0, 4)}, chosen(900, 4))
    recorder.start()
    prompts, first, second = chosen(0, 5), chosen(100, 2), chosen(200, 2)
    runner.step({"7-x": (0, 3), "8": (0, 2)}, prompts)
    runner.step({"8": (2, 1), "7-x": (3, 1)}, first)
    runner.step({"8": (3, 1), "7-x": (4, 1)}, second)
    found = recorder.take("7", 6)
    assert found is not None
    assert found.dtype == np.int16
    expected = torch.cat([prompts[:3], first[1:], second[1:], torch.full((1, NUM_LAYERS, TOPK), -1)])
    np.testing.assert_array_equal(found, expected.numpy())
    other = recorder.take("8", 4)
    np.testing.assert_array_equal(other, torch.cat([prompts[3:], first[:1], second[:1]]).numpy())
    assert recorder.take("8", 4) is None
    assert recorder.take("early", 4) is None, "nobody was recording"


def test_only_the_rank_that_reports_copies_to_the_host() -> None:
    runner = Runner()
    recorder = RouteRecorder(runner, reports=False)
    recorder.start()
    runner.step({"7": (0, 3)}, chosen(0, 3))
    assert recorder.take("7", 3) is None


def test_a_layer_that_reports_nothing_ends_the_generation() -> None:
    runner = Runner(silent=1)
    RouteRecorder(runner).start()
    with pytest.raises(GenerationError, match="the experts of 2 of 3 MoE layers"):
        runner.step({"7": (0, 3)}, chosen(0, 3))


def test_a_dense_model_has_none() -> None:
    runner = Runner()
    runner._model = nn.ModuleList()
    recorder = RouteRecorder(runner)
    recorder.start()
    runner.step({"7": (0, 3)}, chosen(0, 3))
    assert recorder.take("7", 3) is None
