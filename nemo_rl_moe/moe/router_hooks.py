# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that count what routers choose: on the device, outside of the graph, without waiting for it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nemo_rl_moe.moe.assignment_counts import add_assignments
from nemo_rl_moe.moe.routers import RouterKind, RouterLayer, chosen_experts, own_padding_mask


class LoadCounter:
    """The counts of one model, and what its running forward pass is.

    Holds no module: a model that is tracked is freed like any other.

    Attributes:
        layers: The MoE layers, in the order of the counts.
    """

    def __init__(self, layers: Sequence[RouterLayer]):
        self.layers = list(layers)
        self._counts: dict[RouterLayer, Int[Tensor, " experts"]] = {}
        self._handles: list[RemovableHandle] = []
        # None while the model itself does not run, only a part of it.
        self._gradients_at_entry: bool | None = None
        self._attention_mask: Tensor | None = None

    def enter_model(self, attention_mask: Tensor | None) -> None:
        """The model's forward begins."""
        self._gradients_at_entry = torch.is_grad_enabled()
        # Masks of more dimensions say who sees whom, not what is padding.
        self._attention_mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None

    def leave_model(self) -> None:
        """The model's forward is over, or failed."""
        self._gradients_at_entry = self._attention_mask = None

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Adds one call of a router, unless it is none of a training forward."""
        if not router.training or not self._first_pass_with_gradients():
            return
        chosen = chosen_experts(layer, router, outputs)
        if layer.kind is RouterKind.MEGATRON:
            padding = own_padding_mask(args, kwargs)
            valid = None if padding is None else ~padding
        else:
            valid = _valid_tokens(self._attention_mask, len(chosen))
        counts = self._counts.get(layer)
        if counts is None:
            counts = self._counts[layer] = torch.zeros(layer.num_experts, dtype=torch.long, device=chosen.device)
        add_assignments(counts, chosen, valid)

    def take_counts(self, device: torch.device) -> Int[Tensor, " all_experts"]:
        """The counts of all layers one after the other, zero where nothing ran; they start again at zero."""
        counts, self._counts = self._counts, {}

        def of_layer(layer: RouterLayer) -> Tensor:
            if layer in counts:
                return counts[layer].to(device)
            return torch.zeros(layer.num_experts, dtype=torch.long, device=device)

        return torch.cat([of_layer(layer) for layer in self.layers])

    def keep(self, handle: RemovableHandle) -> None:
        """Remembers a hook for `remove_hooks`."""
        self._handles.append(handle)

    def remove_hooks(self) -> None:
        """Leaves the model as it was before `watch_model`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _first_pass_with_gradients(self) -> bool:
        # Inside of a backward pass runs only what activation checkpointing repeats.
        if torch._C._current_graph_task_id() != -1:
            return False
        # Checkpointing may run the first pass of a layer without gradients: what counts is how the model was entered.
        return torch.is_grad_enabled() if self._gradients_at_entry is None else self._gradients_at_entry


def watch_model(model: nn.Module, routers: Sequence[tuple[RouterLayer, nn.Module]]) -> LoadCounter:
    """Puts the hooks on the model and its routers.

    Args:
        model: What the training loop calls.
        routers: Its MoE layers with their routers.
    """
    counter = LoadCounter([layer for layer, _ in routers])
    parameters = list(inspect.signature(model.forward).parameters)
    position = parameters.index("attention_mask") if "attention_mask" in parameters else None

    def enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counter: LoadCounter) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None and position is not None and position < len(args):
            mask = args[position]
        counter.enter_model(mask if isinstance(mask, Tensor) else None)

    def leave(model: nn.Module, args: Any, output: Any, counter: LoadCounter) -> None:
        counter.leave_model()

    counter.keep(model.register_forward_pre_hook(_Hook(counter, enter), with_kwargs=True))
    counter.keep(model.register_forward_hook(_Hook(counter, leave), always_call=True))
    for layer, router in routers:
        counter.keep(router.register_forward_hook(_router_hook(counter, layer), with_kwargs=True))
    return counter


def _router_hook(counter: LoadCounter, layer: RouterLayer) -> "_Hook":
    def add(router: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any, counter: LoadCounter) -> None:
        counter.add(layer, router, args, kwargs, outputs)

    return _Hook(counter, add)


class _Hook:
    """A hook that loses its counter when its module is copied or pickled: the copy is another model, not tracked."""

    def __init__(self, counter: LoadCounter | None = None, function: Callable[..., None] | None = None):
        self._counter, self._function = counter, function

    def __call__(self, *args: Any) -> None:
        if self._counter is not None and self._function is not None:
            self._function(*args, self._counter)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _valid_tokens(attention_mask: Tensor | None, num_tokens: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.numel() != num_tokens:
        raise ValueError(
            f"an attention_mask of {list(attention_mask.shape)} cannot tell which of a router's {num_tokens} tokens "
            "are padding: it needs one entry for each"
        )
    return attention_mask.reshape(-1).bool()
