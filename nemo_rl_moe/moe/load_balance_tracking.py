# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that count routed experts: on the device, outside of the graph, without a host synchronisation."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nemo_rl_moe.moe.load_statistics import LayerLoad
from nemo_rl_moe.moe.recorder import add_assignments
from nemo_rl_moe.moe.routers import RouterKind, RouterLayer, padding_mask_of_call, routed_experts, routers_of


class LoadCounter:
    """Assignment counts of one model, and the state of its running forward pass.

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
        """Notes the start of the model's forward."""
        self._gradients_at_entry = torch.is_grad_enabled()
        # Masks of more dimensions say who sees whom, not what is padding.
        self._attention_mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None

    def leave_model(self) -> None:
        """Notes the end of the model's forward, also of one that failed."""
        self._gradients_at_entry = self._attention_mask = None

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Adds one call of a router, unless it is none of a training forward."""
        if not router.training or not self._first_pass_with_gradients():
            return
        routed = routed_experts(layer, router, outputs)
        if layer.kind is RouterKind.MEGATRON:
            padding = padding_mask_of_call(args, kwargs)
            valid = None if padding is None else ~padding
        else:
            valid = _valid_tokens(self._attention_mask, len(routed))
        counts = self._counts.get(layer)
        if counts is None:
            counts = self._counts[layer] = torch.zeros(layer.num_experts, dtype=torch.long, device=routed.device)
        add_assignments(counts, routed, valid)

    def take_counts(self, device: torch.device) -> Int[Tensor, " all_experts"]:
        """The counts of all layers one after the other, zero where nothing ran; they start again at zero."""
        counts, self._counts = self._counts, {}

        def of_layer(layer: RouterLayer) -> Tensor:
            if layer in counts:
                return counts[layer].to(device)
            return torch.zeros(layer.num_experts, dtype=torch.long, device=device)

        return torch.cat([of_layer(layer) for layer in self.layers])

    def keep(self, handle: RemovableHandle) -> None:
        """Registers a hook for `remove_hooks`."""
        self._handles.append(handle)

    def remove_hooks(self) -> None:
        """Removes all hooks from the model."""
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


# Kept outside of the models: nothing of it is copied, saved or moved with them.
_COUNTERS: WeakKeyDictionary[nn.Module, LoadCounter] = WeakKeyDictionary()


def enable_load_balance_tracking(model: nn.Module) -> int:
    """Starts counting the routed experts of a model. Calling it again changes nothing.

    Args:
        model: The module that the training loop calls, or a wrapper of it. Of a model in several chunks (virtual
            pipeline stages), each chunk for itself.

    Returns:
        The number of MoE layers.

    Raises:
        ValueError: The model has no MoE layer whose router is known.
    """
    counter = _find_counter(model)
    if counter is None:
        routers = routers_of(model)
        if not routers:
            raise ValueError(
                f"{type(model).__name__} has no MoE layer to track: none of its modules is a router of Megatron-Core "
                "(TopKRouter) or of transformers (Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE, DeepSeek-V3 and others with a "
                "...TopKRouter)"
            )
        counter = _COUNTERS[model] = watch_model(model, routers)
    return len(counter.layers)


def disable_load_balance_tracking(model: nn.Module) -> None:
    """Stops counting and drops the counts. Does nothing for a model that is not tracked."""
    for module in model.modules():
        counter = _COUNTERS.pop(module, None)
        if counter is not None:
            counter.remove_hooks()


def collect_expert_loads(
    model: nn.Module, dp_group: dist.ProcessGroup | None = None
) -> dict[int, LayerLoad] | dict[str, LayerLoad]:
    """Expert loads since the last collection, all microbatches added up; counting starts again at zero.

    Args:
        model: What `enable_load_balance_tracking` was given, or a wrapper around it.
        dp_group: The ranks that hold different tokens of the same layers (data parallel; with sequence or context
            parallel these axes too). Counts are summed over it in one collective, which all its ranks must enter.

    Returns:
        For each MoE layer in order its counts on the host (int64). Keys are global layer indices, from 0:
        Megatron-Core's own, or the number in the module's path. Where the paths have no distinct numbers, keys are the
        paths. `aux_loss` is None: transformers has one loss for all layers together, Megatron-Core keeps its own in a
        tracker.

    Raises:
        ValueError: Tracking is not enabled.
    """
    counter = _find_counter(model)
    if counter is None:
        raise ValueError(f"load balance tracking is not enabled on this {type(model).__name__}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    packed = counter.take_counts(device)
    if dp_group is not None and dist.get_world_size(dp_group) > 1:
        dist.all_reduce(packed, group=dp_group)
    on_host = packed.cpu().split([layer.num_experts for layer in counter.layers])
    loads: dict[int | str, LayerLoad] = {
        layer.key: {"expert_load": counts, "aux_loss": None, "n_experts": layer.num_experts, "topk": layer.topk}
        for layer, counts in zip(counter.layers, on_host, strict=True)
    }
    return loads  # type: ignore[return-value]  # keys are of one kind, which the loop above cannot tell


def _find_counter(model: nn.Module) -> LoadCounter | None:
    return next((_COUNTERS[module] for module in model.modules() if module in _COUNTERS), None)
