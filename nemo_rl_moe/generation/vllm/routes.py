# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recording of the routed experts of every token that a vLLM engine computes, by request and position.

All of vLLM's releases, model runners and Triton kernels call the callback of its routers. The callback copies into
one buffer on the device, so that a captured CUDA graph includes the copy. Python reads the buffer once per step. vLLM's
own report (`enable_return_routed_experts`) needs its other model runner, whose sampler cannot return log-probabilities
at the temperature.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.routing.replay import UNKNOWN

_FIRST_TOKENS = 256
"""Initial capacity, in tokens, for the routes of a request. The capacity doubles as needed."""
_STEPS_ON_THE_WAY = 2
"""Maximum number of steps whose copies to the host may be running. vLLM prepares a step while the last one runs."""


@dataclass
class _Step:
    """Routes of one step, whose copy to the host may still be running.

    Attributes:
        starts: Index of the first row of each request, and at the end the number of rows.
        done: Number of tokens of each request that earlier steps computed.
        copied: CUDA event after the copy; None on CPUs.
    """

    requests: list[str]
    starts: Int[np.ndarray, " starts"]
    done: Int[np.ndarray, " requests"]
    rows: Tensor
    copied: Any

    def holds(self, request: str, num_tokens: int) -> bool:
        """Return whether this step computed some of the first tokens of a request."""
        return any(
            _is_of(each, request) and done < num_tokens for each, done in zip(self.requests, self.done, strict=True)
        )


class RouteRecorder:
    """Routes of the requests of a model runner. Only an engine's first rank records them (`reports` is true).

    On GPUs the recorder must be created before CUDA graphs are captured. A forward pass raises a GenerationError if the
    routers of some MoE layers report nothing.
    """

    def __init__(self, runner: Any, *, reports: bool = True):
        self._runner, self._reports = runner, reports
        model = runner.get_model()
        moe = [module for module in model.modules() if hasattr(getattr(module, "router", None), "set_capture_fn")]
        moe.sort(key=lambda module: int(module.layer_id))
        self._buffer: Tensor | None = None
        self._seen = [False] * len(moe)
        for position, module in enumerate(moe):
            module.router.set_capture_fn(lambda experts, position=position: self._note(position, experts))
        self._routes: dict[str, Int[np.ndarray, "tokens moe_layers topk"]] = {}
        self._taken: set[str] = set()
        self._staging: deque[Tensor] = deque()
        self._steps: deque[_Step] = deque()
        self.is_on = False
        forward = runner._model_forward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._settle(_STEPS_ON_THE_WAY - 1)
            output = forward(*args, **kwargs)
            if self.is_on and moe:
                self._stage()
            return output

        runner._model_forward = recorded

    @property
    def num_layers(self) -> int:
        return len(self._seen)

    def start(self) -> None:
        """Forget all requests, and start recording."""
        self._steps.clear()
        self._routes.clear()
        self._taken.clear()
        self.is_on = self._reports

    def take(self, request_id: str, num_tokens: int) -> Int[np.ndarray, "tokens moe_layers topk"] | None:
        """Remove and return the routes of a request's tokens, -1 if never computed; None if it has no routes."""
        # The step that runs now may have sampled one token more for the request. Nobody needs that token's routes.
        behind = next((n for n, step in enumerate(reversed(self._steps)) if step.holds(request_id, num_tokens)), None)
        if behind is not None:
            self._settle(behind)
        key = next((key for key in self._routes if _is_of(key, request_id)), None)
        if key is None:
            return None
        found = self._routes.pop(key)[:num_tokens]
        self._taken.add(key)
        whole = np.full((num_tokens, *found.shape[1:]), UNKNOWN, dtype=np.int16)
        whole[: len(found)] = found
        return whole

    def _note(self, position: int, experts: Tensor) -> None:
        """Copy a router's choice to the buffer. A CUDA graph that captures the copy repeats it at each replay."""
        if self._buffer is None:
            shape = (int(self._runner.max_num_tokens), self.num_layers, experts.shape[1])
            self._buffer = torch.full(shape, UNKNOWN, dtype=torch.int16, device=experts.device)
        self._seen[position] = True
        self._buffer[: len(experts), position].copy_(experts)

    def _stage(self) -> None:
        """Start copying the routes of the computed step to the host."""
        if self._buffer is None or not all(self._seen):
            raise GenerationError(
                f"vLLM reports the experts of {sum(self._seen)} of {self.num_layers} MoE layers: set"
                " policy.megatron_cfg.capture_routing=false, and routing_replay none"
            )
        requests = list(self._runner.input_batch.req_ids)
        starts = self._runner.query_start_loc.np[: len(requests) + 1].copy()
        # Not the model's positions, which for images are rows and columns instead of positions in the sequence.
        done = self._runner.input_batch.num_computed_tokens_cpu[: len(requests)].copy()
        on_gpu = self._buffer.is_cuda
        if not self._staging:
            shape, count = self._buffer.shape, _STEPS_ON_THE_WAY
            self._staging.extend(torch.empty(shape, dtype=torch.int16, pin_memory=on_gpu) for _ in range(count))
        rows = self._staging[0][: starts[-1]]
        self._staging.rotate()
        rows.copy_(self._buffer[: starts[-1]], non_blocking=on_gpu)
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._steps.append(_Step(requests, starts, done, rows, copied))

    def _settle(self, most: int) -> None:
        """Store the routes of the oldest steps by request, until at most `most` steps are left.

        Waits for a step's copy to the host. The copy follows the step's forward pass.
        """
        while len(self._steps) > most:
            step = self._steps.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            rows = step.rows.numpy()
            for number, request in enumerate(step.requests):
                if request in self._taken:
                    continue
                of_request = rows[step.starts[number] : step.starts[number + 1]]
                first, last = int(step.done[number]), int(step.done[number]) + len(of_request)
                self._room(request, last, of_request.shape[1:])[first:last] = of_request

    def _room(self, request: str, num_tokens: int, shape: tuple[int, ...]) -> Int[np.ndarray, "tokens moe_layers topk"]:
        """Return the rows of a request, grown to at least `num_tokens`."""
        rows = self._routes.get(request)
        if rows is None or len(rows) < num_tokens:
            size = max(num_tokens, _FIRST_TOKENS if rows is None else 2 * len(rows))
            larger = np.full((size, *shape), UNKNOWN, dtype=np.int16)
            if rows is not None:
                larger[: len(rows)] = rows
            rows = self._routes[request] = larger
        return rows


def _is_of(key: str, request_id: str) -> bool:
    """Return whether the runner's name of a request is that of the request with this id."""
    return key == request_id or key.startswith(f"{request_id}-")
