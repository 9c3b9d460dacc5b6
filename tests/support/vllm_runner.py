# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model runner of vLLM's as far as the recorder of routed experts knows it, on the host or on a card."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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

    def __init__(self, *, silent: int | None = None, device: str = "cpu") -> None:
        self.choices = torch.zeros(NUM_LAYERS, MOST_TOKENS, TOPK, dtype=torch.int32, device=device)
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
