# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the experts' loads in anybody's training loop, through forward hooks on the routers.

Knows the routers of Megatron-Core (`TopKRouter` and classes derived from it) and those of transformers 5
(`...TopKRouter` in Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE, DeepSeek-V3 and others built like them), and imports neither.
The hooks add nothing to the graph or the state dict and never wait for the device.

What counts: forward passes of a model in training mode with gradients enabled, each once; passes that activation
checkpointing repeats in the backward pass do not count again, nor do evaluation and generation.

What does not count: padding, where it is known. For transformers that is the 2-D `attention_mask` (0 or False is
padding) that the tracked model is called with; without one every token counts. Megatron-Core's routers are told by
their own `padding_mask`.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl_moe.moe.layer_load import LayerLoad
from nemo_rl_moe.moe.router_hooks import LoadCounter, watch_model
from nemo_rl_moe.moe.routers import routers_of

# Kept outside of the models: nothing of it is copied, saved or moved with them.
_COUNTERS: WeakKeyDictionary[nn.Module, LoadCounter] = WeakKeyDictionary()


def enable_load_balance_tracking(model: nn.Module) -> int:
    """Starts counting. Calling it again changes nothing.

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
    """Stops counting and forgets what was counted. Does nothing where nothing is tracked."""
    for module in model.modules():
        counter = _COUNTERS.pop(module, None)
        if counter is not None:
            counter.remove_hooks()


def collect_expert_loads(
    model: nn.Module, dp_group: dist.ProcessGroup | None = None
) -> dict[int, LayerLoad] | dict[str, LayerLoad]:
    """The loads since the last collection, all microbatches added up; counting starts again at zero.

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
