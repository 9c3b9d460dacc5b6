# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recording of routes in forward passes of training or generation, for any model with known routers.

A pass that activation checkpointing repeats is recorded once. The model's computation is unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl_moe.routing.hooks.router_margins import margins_of_call
from nemo_rl_moe.routing.metrics.load_balance_tracking import ForwardWatcher, entry_of, known_routers, watch_model
from nemo_rl_moe.routing.replay import UNKNOWN
from nemo_rl_moe.routing.routers import RouterKind, RouterLayer, padding_mask_of_call, routed_experts
from nemo_rl_moe.shapes import Bool, Float, Int


class PassKind(NamedTuple):
    is_training: bool
    has_cache: bool


@dataclass(frozen=True)
class RoutedPass:
    """Routes of one forward pass, on the host.

    Attributes:
        experts: Experts of every row, which is a token in the routers' input, int16. Slots of dropped tokens are
            `UNKNOWN`.
        margins: Score of the last chosen expert minus the best score of an unchosen expert, by layer. None if the
            router returns no logits, or chooses by scores unknown to `margins_of_call`.
        shape: (number of sequences, tokens per sequence), if rows are ordered by sequence. None if the order is
            unknown, as on a tensor-parallel rank that has only a part of the rows.
    """

    kind: PassKind
    num_cached: int
    experts: Int[Tensor, "rows layers topk"]
    margins: Float[Tensor, "rows layers"] | None
    real: Bool[Tensor, " rows"]
    shape: tuple[int, int] | None
    token_ids: Int[Tensor, " rows"] | None


class RouteRecorder(ForwardWatcher):
    """Recorder of the routes of one model's forward passes.

    Raises:
        ValueError: No router is known, or layers have different numbers of experts.
    """

    def __init__(self, model: nn.Module, wants: Callable[[PassKind], bool] = lambda kind: True):
        routers = known_routers(model)
        super().__init__([layer for layer, _ in routers])
        sizes = {(layer.num_experts, layer.topk) for layer in self.layers}
        if len(sizes) > 1:
            raise ValueError(f"layers with different numbers of experts and top-k cannot be recorded: {sorted(sizes)}")
        ((self.num_experts, self.topk),) = sizes
        self._wants = wants
        self._passes: list[RoutedPass] = []
        self._arguments: Mapping[str, Any] = {}
        self._seen: dict[RouterLayer, tuple[Tensor, Tensor | None]] = {}
        self._kind: PassKind | None = None
        self._num_cached = 0
        self._padding: Tensor | None = None
        watch_model(entry_of(model, routers[0][1]), routers, self)

    def take(self) -> list[RoutedPass]:
        """Return the passes recorded since the last call, in order."""
        passes, self._passes = self._passes, []
        return passes

    def enter_model(self, arguments: Mapping[str, Any]) -> None:
        super().enter_model(arguments)
        if self.is_recomputed():
            return
        cache = _cache_in(arguments)
        self._arguments, self._seen, self._kind, self._padding = arguments, {}, None, None
        self._num_cached = 0 if cache is None else int(cache.get_seq_length())

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Record one call of a router. Repeated calls, and calls outside the model's forward, are ignored."""
        if self.is_recomputed() or self._gradients_at_entry is None:
            return
        if self._kind is None:
            has_cache = _cache_in(self._arguments) is not None
            self._kind = PassKind(self.is_training_forward(router), has_cache)
        if not self._wants(self._kind):
            return
        with torch.no_grad():
            experts = as_numbers(routed_experts(layer, router, outputs), layer.topk)
            self._seen[layer] = experts, margins_of_call(layer, router, args, kwargs, outputs, experts)
        if layer.kind is RouterKind.MEGATRON:
            self._padding = padding_mask_of_call(args, kwargs)

    def leave_model(self) -> None:
        if self._kind is not None and len(self._seen) == len(self.layers):
            self._passes.append(self._finished(self._kind))
        if not self.is_recomputed():
            self._arguments, self._seen, self._kind = {}, {}, None
        super().leave_model()

    def _finished(self, kind: PassKind) -> RoutedPass:
        seen = [self._seen[layer] for layer in self.layers]
        experts = torch.stack([experts for experts, _ in seen], 1)
        found = [margin for _, margin in seen if margin is not None]
        margins = torch.stack(found, 1).cpu() if len(found) == len(seen) else None
        if margins is not None and not bool((margins >= 0).all()):
            margins = None  # chosen by unknown scores
        token_ids, mask = self._arguments.get("input_ids"), self._attention_mask
        shape = None
        if isinstance(token_ids, Tensor) and token_ids.ndim == 2 and token_ids.numel() == len(experts):
            shape = (token_ids.shape[0], token_ids.shape[1])
        if shape is not None and self.layers[0].kind is RouterKind.MEGATRON:
            experts = _by_sequence(experts, shape)
        real = torch.ones(len(experts), dtype=torch.bool)
        if self._padding is not None and self._padding.numel() == len(experts):
            real = ~self._padding.cpu()
            real = real if shape is None else _by_sequence(real, shape)
        elif shape is not None and mask is not None and mask.shape[1] >= self._num_cached + shape[1]:
            real = mask[:, self._num_cached : self._num_cached + shape[1]].bool().reshape(-1).cpu()
        elif shape is not None and mask is None and kind.has_cache:
            real = _seen_by_themselves(self._arguments.get("attention_mask"), shape, self._num_cached).reshape(-1).cpu()
        return RoutedPass(
            kind,
            self._num_cached,
            experts.to(torch.int16).cpu(),
            margins,
            real,
            shape,
            None if shape is None or token_ids is None else token_ids.reshape(-1).cpu(),
        )


def _cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the key-value cache among the arguments of a model of transformers, or None."""
    # The argument is called `cache` since 5.24.
    return next((arguments[name] for name in ("past_key_values", "cache") if arguments.get(name) is not None), None)


def _seen_by_themselves(masks: Any, shape: tuple[int, int], num_cached: int) -> Bool[Tensor, "batch tokens"]:
    """Return a mask of real tokens. In 4-dimensional attention masks, only real tokens attend to themselves and to no
    later token. All True without such masks.
    """
    # A cache of fixed size gets such masks, prepared before the model is entered. No token attends to padding. Some
    # kernels cannot process a row that attends to nothing. The masks then let such a row attend to every key, even to
    # later ones, to which no real token attends.
    kinds = masks.values() if isinstance(masks, Mapping) else [masks]
    found = [mask for mask in kinds if isinstance(mask, Tensor) and mask.ndim == 4]
    num_sequences, num_tokens = shape
    if not found or found[0].shape[2] != num_tokens or found[0].shape[3] < num_cached + num_tokens:
        return torch.ones(shape, dtype=torch.bool)
    mask = found[0][:, 0].expand(num_sequences, -1, -1)
    sees = mask if mask.dtype == torch.bool else mask == 0
    later = torch.ones_like(sees[0]).triu(num_cached + 1)
    return sees.diagonal(num_cached, dim1=1, dim2=2) & ~(sees & later).any(-1)


def _by_sequence(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return rows of tokens ordered by sequence, from rows that are ordered by position, as in Megatron-Core."""
    return rows.unflatten(0, shape[::-1]).transpose(0, 1).flatten(0, 1)


def as_numbers(routed: Tensor, topk: int) -> Int[Tensor, "tokens topk"]:
    """Return the ids of each token's experts, from these ids or from a boolean map `[tokens, experts]`."""
    if routed.dtype != torch.bool:
        return routed
    chosen, experts = routed.int().topk(topk, dim=-1)
    return experts.masked_fill(chosen == 0, UNKNOWN)
