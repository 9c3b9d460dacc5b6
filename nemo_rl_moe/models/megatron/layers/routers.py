# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions to Megatron-Core's routers: groups of experts, forced routing, expert bias."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.layers.indexer import KeptTensors
from nemo_rl_moe.models.megatron.model import parallel_state as project_parallel_state
from nemo_rl_moe.models.megatron.model.releases import transformer_config_fields
from nemo_rl_moe.routing.replay import group_limited_margins


def group_limited_topk(
    scores: Tensor, topk: int, num_groups: int, group_topk: int, best_of_group: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and indices of the top experts in the best groups (DeepSeek-V2 and V3)."""
    of_groups = scores.unflatten(1, (num_groups, -1))
    group_scores = of_groups.topk(best_of_group, dim=-1).values.sum(-1)
    usable = torch.zeros_like(group_scores, dtype=torch.bool)
    usable.scatter_(1, group_scores.topk(group_topk, dim=-1, sorted=False).indices, True)
    return of_groups.masked_fill(~usable.unsqueeze(-1), float("-inf")).flatten(1).topk(topk, dim=-1)


class GroupLimitedChoice:
    """Group-limited top-k. It selects a router's experts through the interface of Megatron-Core's `RouterReplay`.

    Attributes:
        counted: `[tokens, topk]`, the experts chosen in the last call, as load for the balancing losses.
    """

    def __init__(self, best_of_group: int):
        self._best_of_group = best_of_group
        self.counted: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of each token's top experts, both `[tokens, topk]`."""
        values, self.counted = group_limited_topk(scores, topk, num_groups, group_topk, self._best_of_group)
        return values, self.counted

    def margins(self, scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
        """Return each token's margin, `[tokens]`: the smallest change of scores that changes its experts or groups."""
        return group_limited_margins(scores, topk, num_groups, group_topk, self._best_of_group)


def limit_groups(model: nn.Module, *, as_deepseek: bool) -> None:
    """Give a group-limited top-k to every router with groups. Replayed routing stays as recorded.

    Args:
        as_deepseek: Whether to score groups as DeepSeek does. A group's score is then the score of its best expert
            (DeepSeek-V2, softmax scores) or the sum of its two best scores (DeepSeek-V3, sigmoid scores). If False, it
            is the sum of its `topk / group_topk` best scores, as in Megatron-Core.
    """
    for router in model.modules():
        if not isinstance(router, TopKRouter) or not router.config.moe_router_group_topk:
            continue
        of_deepseek = 1 if router.config.moe_router_score_function == "softmax" else 2
        choice = GroupLimitedChoice(of_deepseek if as_deepseek else router.topk // router.config.moe_router_group_topk)
        replay = router.router_replay
        if replay is None:
            router.router_replay = choice
        else:
            replay.get_replay_topk = partial(_replay_or_choose, replay.get_replay_topk, choice)


def _replay_or_choose(replay: Callable[..., Any], choice: GroupLimitedChoice, *arguments: Any) -> Any:
    """Call a `RouterReplay`. Replace its last argument, the function that chooses without replay, by `choice`."""
    return replay(*arguments[:-1], choice.get_replay_topk)


def noise_in_training_only(model: nn.Module) -> None:
    """Apply the routers' input noise and the experts' capacity in training passes only.

    Megatron-Core applies both in every pass, so a validation loss would depend on chance and on the microbatches.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(module, TopKRouter) and config.moe_input_jitter_eps is not None:
            module.apply_input_jitter = partial(_in_training, module, module.apply_input_jitter)
        if isinstance(module, MoELayer) and config.moe_expert_capacity_factor is not None:
            module.forward = partial(_without_capacity_in_evaluation, module, module.forward)


def _in_training(router: TopKRouter, jitter: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    return jitter(inputs) if router.training else inputs


def _without_capacity_in_evaluation(layer: MoELayer, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    config, dispatcher = layer.config, layer.token_dispatcher
    if layer.training:
        return forward(*args, **options)
    capacity, pads = config.moe_expert_capacity_factor, dispatcher.drop_and_pad
    config.moe_expert_capacity_factor, dispatcher.drop_and_pad = None, False
    try:
        return forward(*args, **options)
    finally:
        config.moe_expert_capacity_factor, dispatcher.drop_and_pad = capacity, pads


_OF_A_DISPATCH = (
    *("probs", "routing_map", "reversed_local_input_permutation_mapping", "local_probs", "local_map"),
    *("token_probs", "token_indices", "dispatched_probs", "dispatched_indices", "dispatched_routing_map"),
    "reversed_mapping_for_combine",
)
"""Attributes by which Megatron-Core's token dispatchers pass the tensors of a microbatch from dispatch to combine."""


def release_dispatches(model: nn.Module) -> None:
    """Let token dispatchers free the tensors of a microbatch once the experts' outputs are combined.

    Megatron-Core keeps these tensors until the next forward pass. The probabilities hold the graph of a recomputation,
    and with it the recomputation's inputs and their gradients. For Qwen3-30B-A3B with microbatches of 4,096 tokens and
    `activation_checkpointing: full`, that was 1.9 GB at the end of a backward pass.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.combine_postprocess = partial(_then_release, dispatcher, dispatcher.combine_postprocess)


def _then_release(dispatcher: Any, combine: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    combined = combine(outputs)
    for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name in _OF_A_DISPATCH:
            if getattr(owner, name, None) is not None:
                setattr(owner, name, None)
    return combined


FORCED_ROUTING_FIELDS = ("moe_router_force_load_balancing", "moe_router_force_biased", "moe_router_force_hot_rank")
"""Settings that force routing: fields of TransformerConfig, or attributes set on it if the release lacks the field."""

# Added to a logit: far above real logits, and far from overflow in float32 and bfloat16.
_HOT = 1.0e4


def forced_routing_in_force(config: TransformerConfig) -> dict[str, Any]:
    """Return name -> value of the forced-routing settings that are on. In a real run, the result is empty."""
    values = {name: getattr(config, name, None) for name in FORCED_ROUTING_FIELDS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def force_routing(chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Change the routers' logits if the configuration forces routing."""
    if hasattr(moe_utils, "RandomSTEShared"):
        # Megatron-Core keeps the biases by layer number on a class, so a second model would inherit the first model's.
        moe_utils.RandomSTEShared._cache.clear()
    change = _change_of_logits(config)
    if change is None:
        return
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                _change_logits(module, change(config))


def _change_of_logits(config: TransformerConfig) -> Callable[[TransformerConfig], Callable[[Tensor], Tensor]] | None:
    if getattr(config, "moe_router_force_hot_rank", None) is not None:
        return _hot_rank
    is_supported = "moe_router_force_biased" in transformer_config_fields()  # then Megatron-Core does it
    if not is_supported and getattr(config, "moe_router_force_biased", None) is not None:
        return _biased
    return None


def _change_logits(router: Any, change: Callable[[Tensor], Tensor]) -> None:
    routing = router.routing

    def routing_of_changed_logits(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return routing(change(logits), *args, **kwargs)

    router.routing = routing_of_changed_logits


def _hot_rank(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return a function that raises the logits of one expert-parallel rank's experts above all others."""
    experts_of_rank = config.num_moe_experts // config.expert_model_parallel_size
    first = config.moe_router_force_hot_rank * experts_of_rank

    def lift(logits: Tensor) -> Tensor:
        bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        bias[first : first + experts_of_rank] = _HOT
        return logits + bias

    return lift


def _biased(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces logits by random ones with a random bias per expert, as in Megatron-Core 0.17.

    The bias is the same on all ranks.
    """
    # With a negative deviation the bias is sampled only once.
    deviation: float = config.moe_router_force_biased
    kept: list[Tensor] = []

    def add_bias(logits: Tensor) -> Tensor:
        logits = moe_utils.apply_random_logits(logits)
        if kept:
            return logits + kept[0]
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            bias = torch.empty(logits.shape[-1], dtype=logits.dtype, device=logits.device).normal_(std=abs(deviation))
        if deviation < 0:
            kept.append(bias)
        return logits + bias

    return add_bias


@contextmanager
def unconverted_state(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Exempt some tensors from a conversion of the chunks to another number format while the context is open.

    They are the buffers of routers and indexers, and parameters that stay in float32.

    Megatron-Core converts the routers' buffers together with the weights. It converts the bias back to float32, but the
    bias has been rounded by then. Token counts would stay in bfloat16, which cannot represent odd numbers above 256.
    """
    kept = [
        (module, name, buffer)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, TopKRouter | KeptTensors)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    precise = [
        (parameter, parameter.data)
        for chunk in chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "stays_in_float32", False)
    ]
    yield
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    for parameter, values in precise:
        parameter.data = values


class ExpertBias:
    """Copy of the expert bias before the last update. It undoes the update if an optimizer step is skipped, and
    measures changes.

    With every update, Megatron-Core zeroes the token counts and moves the bias of every expert whose load is not the
    mean, so a layer with an unchanged bias has not been updated.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig):
        self._routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter) and module.expert_bias is not None
        ]
        self._is_on = bool(config.moe_router_enable_expert_bias)
        self._moves = self._is_on and config.moe_router_bias_update_rate > 0
        self._kept: list[tuple[Any, Tensor]] = []
        self._at_start: list[Tensor] = []

    @torch.no_grad()
    def start_step(self) -> None:
        self._at_start = [router.expert_bias.clone() for router in self._routers]

    @torch.no_grad()
    def snapshot(self) -> None:
        self._kept = [(router, router.expert_bias.clone()) for router in self._routers]

    @torch.no_grad()
    def restore(self) -> None:
        for router, kept in self._kept:
            router.expert_bias.copy_(kept)
        self._kept = []

    @torch.no_grad()
    def around_last_update(self) -> dict[int, Float[np.ndarray, "2 experts"]]:
        """Return layer index in the model -> bias before the last update and now, for this rank's layers.

        The result is empty if the update was skipped or does not move the bias.
        """
        return {
            router.layer_number - 1: torch.stack([kept, router.expert_bias]).float().cpu().numpy()
            for router, kept in (self._kept if self._moves else ())
            if router.layer_number <= router.config.num_layers  # not of multi-token prediction
        }

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return metrics of the bias's changes in this step, none if the model has no bias. Every rank calls it.

        `expert_bias/max_abs_change` and `expert_bias/max_abs` are the largest change of an expert's bias and the
        largest bias. `expert_bias_frozen_layers` is the number of layers of all stages whose bias did not change in the
        last update. It is absent if the number is 0 or the update was skipped.
        """
        if not self._is_on:
            return {}
        device = project_parallel_state.device()
        largest, frozen = torch.zeros(2, device=device), torch.zeros((), dtype=torch.long, device=device)
        for router, before in zip(self._routers, self._at_start, strict=True):
            found = torch.stack([(router.expert_bias - before).abs().max(), router.expert_bias.abs().max()])
            largest = largest.maximum(found)
        for router, kept in self._kept:
            frozen += (router.expert_bias == kept).all()
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # stages have different layers
        metrics = dict(zip(("expert_bias/max_abs_change", "expert_bias/max_abs"), largest.tolist(), strict=True))
        if self._moves:
            if parallel_state.get_pipeline_model_parallel_world_size() > 1:
                dist.all_reduce(frozen, group=parallel_state.get_pipeline_model_parallel_group())
            if frozen > 0:
                metrics["expert_bias_frozen_layers"] = float(frozen)
        return metrics
