# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that count routed experts on the device, outside of the graph, without a host synchronisation."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nemo_rl_moe.routing.metrics.expert_load_recorder import add_assignments
from nemo_rl_moe.routing.metrics.load_statistics import LayerLoad
from nemo_rl_moe.routing.routers import (
    RouterKind,
    RouterLayer,
    padding_mask_of_call,
    routed_experts,
    routers_of,
    unread_routers,
)
from nemo_rl_moe.shapes import Int


class ForwardWatcher:
    """Base class of observers of a model's forward passes, with hooks on the model and its routers.

    A watcher holds no module, so that a watched model is freed like any other.
    """

    def __init__(self, layers: Sequence[RouterLayer]):
        self.layers = list(layers)
        self._handles: list[RemovableHandle] = []
        # None outside of the model's forward, such as if a loop calls only a part of the model.
        self._gradients_at_entry: bool | None = None
        self._attention_mask: Tensor | None = None

    def enter_model(self, arguments: Mapping[str, Any]) -> None:
        self._gradients_at_entry = torch.is_grad_enabled()
        mask = arguments.get("attention_mask")
        # Masks with more dimensions hold pairs of attended tokens, not padding.
        self._attention_mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def leave_model(self) -> None:
        self._gradients_at_entry = self._attention_mask = None

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        raise NotImplementedError

    def keep(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @staticmethod
    def is_recomputed() -> bool:
        """Return True inside a backward pass, because forward passes there are repeated by activation checkpointing."""
        return bool(torch._C._current_graph_task_id() != -1)

    def is_training_forward(self, router: nn.Module) -> bool:
        """Return True in a training forward of a router, and False if activation checkpointing repeats it."""
        if not router.training or self.is_recomputed():
            return False
        # Checkpointing may run the first pass of a layer without gradients, so the mode at the model's entry counts.
        return torch.is_grad_enabled() if self._gradients_at_entry is None else self._gradients_at_entry


class LoadCounter(ForwardWatcher):
    """Counter of the tokens that each expert of one model gets in training."""

    def __init__(self, layers: Sequence[RouterLayer]):
        super().__init__(layers)
        self._counts: dict[RouterLayer, Int[Tensor, " experts"]] = {}

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        if not self.is_training_forward(router):
            return
        routed = routed_experts(layer, router, outputs)
        if layer.kind is RouterKind.MEGATRON:
            padding = padding_mask_of_call(args, kwargs)
            valid = None if padding is None else ~padding
        else:
            valid = valid_tokens(self._attention_mask, len(routed))
        counts = self._counts.get(layer)
        if counts is None:
            counts = self._counts[layer] = torch.zeros(layer.num_experts, dtype=torch.long, device=routed.device)
        add_assignments(counts, routed, valid)

    def take_counts(self, device: torch.device) -> Int[Tensor, " all_experts"]:
        """Return the counts of all layers, concatenated, and reset them to zero."""
        counts, self._counts = self._counts, {}
        for layer in self.layers:
            if layer not in counts:
                counts[layer] = torch.zeros(layer.num_experts, dtype=torch.long, device=device)
        return torch.cat([counts[layer].to(device) for layer in self.layers])


def watch_model(model: nn.Module, routers: Sequence[tuple[RouterLayer, nn.Module]], watcher: ForwardWatcher) -> None:
    parameters = list(inspect.signature(model.forward).parameters)

    def enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watcher: ForwardWatcher) -> None:
        watcher.enter_model({**dict(zip(parameters, args, strict=False)), **kwargs})

    def leave(model: nn.Module, args: Any, output: Any, watcher: ForwardWatcher) -> None:
        watcher.leave_model()

    watcher.keep(model.register_forward_pre_hook(_Hook(watcher, enter), with_kwargs=True))
    watcher.keep(model.register_forward_hook(_Hook(watcher, leave), always_call=True))
    for layer, router in routers:
        watcher.keep(router.register_forward_hook(_router_hook(watcher, layer), with_kwargs=True))


def _router_hook(watcher: ForwardWatcher, layer: RouterLayer) -> "_Hook":
    def add(router: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any, watcher: ForwardWatcher) -> None:
        watcher.add(layer, router, args, kwargs, outputs)

    return _Hook(watcher, add)


class _Hook:
    """Hook that does nothing in a copied or pickled module, since the copy is another model and is not watched."""

    def __init__(self, watcher: ForwardWatcher | None = None, function: Callable[..., None] | None = None):
        self._watcher, self._function = watcher, function

    def __call__(self, *args: Any) -> None:
        if self._watcher is not None and self._function is not None:
            self._function(*args, self._watcher)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def valid_tokens(attention_mask: Tensor | None, num_tokens: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.numel() != num_tokens:
        raise ValueError(
            f"an attention_mask of {list(attention_mask.shape)} cannot mark which of a router's {num_tokens} tokens "
            "are padding: it needs one entry for each"
        )
    return attention_mask.reshape(-1).bool()


def entry_of(model: nn.Module, router: nn.Module) -> nn.Module:
    """Return the innermost module that contains the router and takes token ids. Some training loops call this module
    instead of the model.
    """
    modules = dict(model.named_modules())
    path = next(name for name, module in modules.items() if module is router)
    while path:
        path = path.rpartition(".")[0]
        if "input_ids" in inspect.signature(modules[path].forward).parameters:
            return modules[path]
    return model


# Kept outside of the models, so that it is not copied, saved or moved with them.
_COUNTERS: WeakKeyDictionary[nn.Module, LoadCounter] = WeakKeyDictionary()


def known_routers(model: nn.Module) -> list[tuple[RouterLayer, nn.Module]]:
    """Return the MoE layers of a model with their routers.

    Raises:
        ValueError: The model has no MoE layer whose router is known.
    """
    routers = routers_of(model)
    if routers:
        return routers
    if unread := unread_routers(model):
        raise ValueError(
            f"{type(model).__name__} chooses experts in modules whose choice cannot be read: {', '.join(unread)}; "
            "known are Megatron-Core's TopKRouter, and transformers' ...TopKRouter, HunYuanMoEV1Gate, Llama4Router and "
            "DeepseekV4HashRouter"
        )
    raise ValueError(
        f"{type(model).__name__} has no MoE layer to track: none of its modules is a router of Megatron-Core "
        "(TopKRouter) or of transformers (Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE, DeepSeek-V3 and others with a "
        "...TopKRouter)"
    )


def enable_load_balance_tracking(model: nn.Module) -> int:
    """Start counting the routed experts of a model. A second call changes nothing.

    Args:
        model: The module that the training loop calls, or a wrapper of it. If a model consists of several chunks
            (virtual pipeline stages), call it for each chunk.

    Returns:
        The number of MoE layers.

    Raises:
        ValueError: The model has no MoE layer whose router is known.
    """
    counter = _find_counter(model)
    if counter is None:
        routers = known_routers(model)
        counter = _COUNTERS[model] = LoadCounter([layer for layer, _ in routers])
        watch_model(entry_of(model, routers[0][1]), routers, counter)
    return len(counter.layers)


def disable_load_balance_tracking(model: nn.Module) -> None:
    for module in model.modules():
        counter = _COUNTERS.pop(module, None)
        if counter is not None:
            counter.remove_hooks()


def collect_expert_loads(
    model: nn.Module, dp_group: dist.ProcessGroup | None = None
) -> dict[int, LayerLoad] | dict[str, LayerLoad]:
    """Return the expert loads of all microbatches since the last collection, and reset the counts.

    Args:
        model: The argument of `enable_load_balance_tracking`, or a wrapper around it.
        dp_group: Ranks with different tokens of the same layers (data parallel, and sequence or context parallel if
            used). Counts are summed over the group in one collective, which all its ranks must enter.

    Returns:
        The counts of each MoE layer, in order, on the host (int64). Keys are global layer indices from 0:
        Megatron-Core's layer numbers, or the numbers in the module paths. If the paths have no distinct numbers, keys
        are the paths. `aux_loss` is None, since transformers has one loss for all layers, and Megatron-Core keeps its
        losses in a tracker.

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
    return loads  # type: ignore[return-value]  # all keys are of one type


def _find_counter(model: nn.Module) -> LoadCounter | None:
    return next((_COUNTERS[module] for module in model.modules() if module in _COUNTERS), None)
