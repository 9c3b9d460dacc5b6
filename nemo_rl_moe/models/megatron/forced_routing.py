# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forced routing for benchmarks and drills: what Megatron-Core's own flags do not cover on the installed version.

It acts on the router's logits, so all behind them (top-k, auxiliary losses, dropping, dispatch) is the real thing.
Training under it is meaningless.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.versions import transformer_config_fields

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

FORCED_ROUTING_FIELDS = (
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_router_force_hot_rank",
)
"""Each is a field of TransformerConfig or, where this version has none, an attribute set on it."""

# Added to a logit; far above any real one, far below where float32 or bfloat16 lose the others to infinity.
_HOT = 1.0e4


def forced_routing_in_force(config: TransformerConfig) -> dict[str, Any]:
    """The forced-routing settings that are on; empty in a real run."""
    values = {name: getattr(config, name, None) for name in FORCED_ROUTING_FIELDS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def force_routing(chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Changes the routers' logits as the configuration says; does nothing in a real run."""
    if hasattr(moe_utils, "RandomSTEShared"):
        # Megatron keeps the biases by layer number on a class, so that a second model would inherit the first one's.
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
    own_flag = "moe_router_force_biased" in transformer_config_fields()
    if not own_flag and getattr(config, "moe_router_force_biased", None) is not None:
        return _biased
    return None


def _change_logits(router: Any, change: Callable[[Tensor], Tensor]) -> None:
    routing = router.routing

    def routing_of_changed_logits(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return routing(change(logits), *args, **kwargs)

    router.routing = routing_of_changed_logits


def _hot_rank(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Lifts the logits of one expert-parallel rank's experts above all others."""
    experts_of_rank = config.num_moe_experts // config.expert_model_parallel_size
    first = config.moe_router_force_hot_rank * experts_of_rank

    def lift(logits: Tensor) -> Tensor:
        bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        bias[first : first + experts_of_rank] = _HOT
        return logits + bias

    return lift


def _biased(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Random logits with a random bias on each expert, the same on all ranks, as Megatron-Core does it from 0.17 on.

    A negative deviation draws the bias once and keeps it.
    """
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
