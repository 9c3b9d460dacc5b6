# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routers of Megatron-Core and transformers, recognised by class name, and the routed experts in their outputs.

Imports neither library.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_moe.routing.metrics.metric_keys import natural_order, number_in_name
from nemo_rl_moe.shapes import Bool, Int


class RouterKind(Enum):
    """Library of a router. For transformers, also the form of its output."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    TRANSFORMERS_LOGITS = "transformers, logits last"


# Routers of transformers with unusual names: Hunyuan, and the first layers of DeepSeek-V4.
_WITH_INDICES = frozenset({"hunyuanmoev1gate", "deepseekv4hashrouter"})
# Llama-4 returns logits, of which the highest are chosen.
_WITH_LOGITS = frozenset({"llama4router"})
_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|MoE\w*Gate|TopKGating|SparseMoeBlock|SparseMoE|CDMoE)$")


@dataclass(frozen=True)
class RouterLayer:
    """One MoE layer.

    Attributes:
        key: Global layer index from 0, or the router's module path.
        kind: Library of the router.
    """

    key: int | str
    kind: RouterKind
    num_experts: int
    topk: int


def router_kind(module: nn.Module) -> RouterKind | None:
    """Return the library of a router, recognised by the names of its class and base classes. None for other modules."""
    names = {cls.__name__.lower() for cls in type(module).__mro__}
    if "topkrouter" in names and hasattr(module, "layer_number"):
        return RouterKind.MEGATRON
    if not hasattr(module, "top_k"):
        return None
    if names & _WITH_LOGITS:
        return RouterKind.TRANSFORMERS_LOGITS
    is_known = names & _WITH_INDICES or any(name.endswith("topkrouter") for name in names)
    return RouterKind.TRANSFORMERS if is_known else None


def unread_routers(model: nn.Module) -> list[str]:
    """Return the class names of unknown modules that look like routers or choose experts."""
    names = {type(module).__name__ for module in model.modules() if router_kind(module) is None}
    return sorted(name for name in names if _LOOKS_LIKE_A_ROUTER.search(name))


def routers_of(model: nn.Module) -> list[tuple[RouterLayer, nn.Module]]:
    """Return all MoE layers of a model with their routers, in the order of their keys.

    Keys are the layers' indices if these are known and distinct, otherwise the module paths in natural order.
    """
    found = [
        (name, module, kind) for name, module in model.named_modules() if (kind := router_kind(module)) is not None
    ]
    found.sort(key=lambda entry: natural_order(entry[0]))
    indices = [_layer_index(name, module, kind) for name, module, kind in found]
    if None in indices or len(set(indices)) < len(indices):
        indices = [None] * len(found)
    layers = [
        (RouterLayer(name if index is None else index, kind, _num_experts(module), _topk(module, kind)), module)
        for (name, module, kind), index in zip(found, indices, strict=True)
    ]
    return sorted(layers, key=lambda entry: entry[0].key) if None not in indices else layers


def routed_experts(
    layer: RouterLayer, router: nn.Module, outputs: Any
) -> Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"]:
    """Return each token's experts from a router's output, as a map or indices. Unused capacity does not count.

    If sequences share tokens (`token_copies`), the result has a row for each copy.

    Raises:
        TypeError: The output contains neither a map nor indices.
    """
    tensors = [output for output in outputs if isinstance(output, Tensor)] if isinstance(outputs, tuple | list) else []
    if layer.kind is RouterKind.MEGATRON:
        assignments = next((output for output in tensors[1:2] if not output.is_floating_point()), None)
        if assignments is not None and assignments.dtype == torch.bool and _pads_to_capacity(router):
            # The map then marks all slots of every expert. Slots without a routed token have probability 0.
            assignments = assignments & (tensors[0].detach() != 0)
    elif layer.kind is RouterKind.TRANSFORMERS_LOGITS:
        assignments = tensors[-1].topk(layer.topk, dim=-1).indices if tensors else None
    else:
        integers = [output for output in tensors if not output.is_floating_point() and output.dtype != torch.bool]
        assignments = integers[-1] if integers else None
    if assignments is None:
        raise TypeError(f"the router {type(router).__name__} of layer {layer.key} returned no choice of experts")
    if assignments.ndim > 2:
        assignments = assignments.reshape(-1, assignments.shape[-1])
    copies = token_copies(router)
    return assignments if copies is None else assignments[copies]


def token_copies(router: nn.Module) -> Int[Tensor, " copies"] | None:
    """Return the router's token for each token of the sequences, without padding, if sequences share tokens.

    A trainer that computes shared prefixes once sets the attribute `token_copies` of the routers. A shared token then
    counts once for each of its sequences.
    """
    return getattr(router, "token_copies", None)


def mask_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the padding mask in the arguments of a Megatron-Core router's forward, if any."""
    mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    return mask if isinstance(mask, Tensor) else None


def padding_mask_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bool[Tensor, " tokens"] | None:
    """Return the padding mask of a Megatron-Core router's arguments, flattened. True is padding."""
    mask = mask_of_call(args, kwargs)
    return None if mask is None else mask.reshape(-1).bool()


def moe_layer_indices(config: Any) -> list[int]:
    """Return the global 0-based indices of the MoE layers in the decoder, the same on every pipeline stage."""
    if config.num_moe_experts is None:
        return []
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
    return [index for index, has_experts in enumerate(pattern) if has_experts]


def _layer_index(name: str, module: nn.Module, kind: RouterKind) -> int | None:
    if kind is RouterKind.MEGATRON and isinstance(module.layer_number, int):
        return module.layer_number - 1
    return number_in_name(name)


def _num_experts(router: nn.Module) -> int:
    # LongCat-Flash's second number has also its experts without weights, which are chosen as the others are.
    return max(int(router.num_experts), int(getattr(router, "n_routed_experts", None) or 0))  # type: ignore[arg-type]


def _topk(module: nn.Module, kind: RouterKind) -> int:
    return int(module.topk if kind is RouterKind.MEGATRON else module.top_k)  # type: ignore[arg-type]


def _pads_to_capacity(router: nn.Module) -> bool:
    return bool(getattr(getattr(router, "config", None), "moe_pad_expert_input_to_capacity", False))
