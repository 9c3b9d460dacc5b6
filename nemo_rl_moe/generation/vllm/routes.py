# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of what a vLLM engine computes: every token that goes through its model, by request and position.

vLLM reports routes itself (`enable_return_routed_experts`) with a model runner and kernels that CPUs do not have. The
callback of its routers is there in all of them, as long as no graph is captured around it.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.routing.replay import UNKNOWN


class RouteRecorder:
    """Routes of the requests that a model runner has in work.

    Raises:
        GenerationError: The model has MoE layers whose routers report nothing.
    """

    def __init__(self, runner: Any, max_tokens: int):
        self._runner, self._max_tokens = runner, max_tokens
        model = runner.get_model()
        moe = [module for module in model.modules() if hasattr(getattr(module, "router", None), "set_capture_fn")]
        moe.sort(key=lambda module: int(module.layer_id))
        self._chosen: list[Tensor | None] = [None] * len(moe)
        for position, module in enumerate(moe):
            module.router.set_capture_fn(lambda experts, position=position: self._note(position, experts))
        self._routes: dict[str, Int[np.ndarray, "tokens moe_layers topk"]] = {}
        self._batch: tuple[list[str], Int[np.ndarray, " starts"], Int[np.ndarray, " requests"]] | None = None
        self.is_on = False
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    @property
    def num_layers(self) -> int:
        return len(self._chosen)

    def start(self) -> None:
        """Begin anew, with no requests."""
        self._routes.clear()
        self.is_on = True

    def take(self, request_id: str, num_tokens: int) -> Int[np.ndarray, "tokens moe_layers topk"] | None:
        """Return the routes of a request's tokens, -1 where never computed; None where there are none at all."""
        key = next((key for key in self._routes if key == request_id or key.startswith(f"{request_id}-")), None)
        return None if key is None else self._routes.pop(key)[:num_tokens].copy()

    def _note(self, position: int, experts: Tensor) -> None:
        if self.is_on:
            self._chosen[position] = experts.to(torch.int16)

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.is_on:
            requests = list(self._runner.input_batch.req_ids)
            starts = self._runner.query_start_loc.np[: len(requests) + 1].copy()
            # Not the model's positions: where images have rows and columns, these are no places in the sequence.
            done = self._runner.input_batch.num_computed_tokens_cpu[: len(requests)].copy()
            self._batch = requests, starts, done

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if self._batch is None:
            return
        (requests, starts, done), self._batch = self._batch, None
        chosen = [experts for experts in self._chosen if experts is not None]
        if len(chosen) < self.num_layers or any(len(experts) < starts[-1] for experts in chosen):
            raise GenerationError(
                f"vLLM reports the experts of {len(chosen)} of {self.num_layers} MoE layers: set"
                " policy.megatron_cfg.capture_routing=false, and routing_replay none"
            )
        if not chosen:
            return
        routes = torch.stack([experts[: starts[-1]] for experts in chosen], 1).cpu().numpy()
        self._chosen = [None] * self.num_layers
        for number, request in enumerate(requests):
            rows = slice(starts[number], starts[number + 1])
            end = done[number] + starts[number + 1] - starts[number]
            if request not in self._routes:
                self._routes[request] = np.full((self._max_tokens, *routes.shape[1:]), UNKNOWN, dtype=np.int16)
            self._routes[request][done[number] : end] = routes[rows]
