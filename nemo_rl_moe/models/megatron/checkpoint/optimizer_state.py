# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's tensors as pieces of full tensors that do not depend on the layout.

Of an optimizer only tensors are kept: the two moments and, beside bfloat16 weights, the float32 masters. Its groups and
their settings are the configuration's and the schedule's, so they are never read from a checkpoint; the number of
updates, the same for every parameter, is kept once by the caller.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

Sharded = Any
"""A `ShardedTensor`, or a `ShardedTensorFactory` that makes some of one tensor."""
SHARDED_TYPES = (ShardedTensor, ShardedTensorFactory)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "fp32_param"
# A format that can be read in any layout; gathered over gloo into host memory, where the snapshot lives anyway.
_DISTRIBUTED = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained one is made of, without those that hold no parameters."""
    parts: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Makes the state of an optimizer that has not taken a step: moments of zero, and torch's count of updates.

    Megatron-Core makes the moments alone; torch's Adam, which takes them for a state of its own, then misses its count.
    """
    for part in optimizer_parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for parameter, state in part.optimizer.state.items():
                if "step" not in state:
                    state["step"] = _step_count(parameter, 0)


def reset_state(optimizer: MegatronOptimizer) -> None:
    """Makes what state there is that of an optimizer which has not taken a step."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            for kind in _MOMENTS:
                if kind in state:
                    state[kind].zero_()
    set_num_updates(optimizer, 0)


def set_num_updates(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Sets the optimizer's number of updates, which Adam's bias correction needs.

    Every parameter gets a tensor of its own: torch adds to it in each step, so one that parameters share would count as
    many updates a step as it has owners. (Megatron-Core's own loading shares one, or restores 0.)
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for parameter, state in part.optimizer.state.items():
                state["step"] = _step_count(parameter, num_updates)
        else:  # Transformer Engine and Apex count by group, from the first step on
            for group in part.optimizer.param_groups:
                group["step"] = num_updates


def _step_count(parameter: Tensor, num_updates: int) -> Tensor:
    # Fused, as `_fuse_adam` makes it, it counts where the parameter is.
    device = parameter.device if parameter.is_cuda else torch.device("cpu")
    return torch.tensor(float(num_updates), dtype=torch.float32, device=device)


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: Mapping[str, Sharded], *, is_loading: bool
) -> list[dict[str, Any]]:
    """Every tensor of the optimizer, a dictionary for each of its parts. All ranks call it: shards are gathered.

    Args:
        optimizer: With its state made.
        model_state: The model's parameters themselves, sharded.
        is_loading: The tensors are to be filled and not to be read.
    """
    return [
        _sharded_of_distributed(part, model_state, is_loading)
        if isinstance(part, DistributedOptimizer)
        else _sharded_of_plain(part, model_state)
        for part in optimizer_parts(optimizer)
    ]


def put_back(optimizer: MegatronOptimizer, loaded: Sequence[dict[str, Any]]) -> None:
    """Fills the optimizer with tensors that were read under the names of `sharded_optimizer_state`."""
    for part, state in zip(optimizer_parts(optimizer), loaded, strict=True):
        if isinstance(part, DistributedOptimizer):
            by_index: dict[int, dict[str, Tensor]] = {}
            for name, tensor in state.items():
                number, _, kind = name.partition(".")
                by_index.setdefault(int(number), {})[kind] = tensor
            for index, parameter in enumerate(_parameters_of_distributed(part)):
                # Beside float32 weights there are no masters: it updates the weights themselves.
                by_index[index].setdefault(_MASTER, parameter.detach())
            part.load_parameter_state_from_fully_reshardable(by_index)
        else:
            live = {name: tensor for name, _, _, tensor in _tensors_of_plain(part)}
            for name, tensor in state.items():
                live[name].data.copy_(tensor)


def _sharded_of_distributed(part: Any, model_state: Mapping[str, Sharded], is_loading: bool) -> dict[str, Any]:
    """Keys are `{index of the parameter}.{kind of tensor}`; empty on ranks that hand their shard to another one."""
    by_index = part.sharded_param_state_fully_reshardable(dict(model_state), is_loading, _DISTRIBUTED) or {}
    parameters = _parameters_of_distributed(part)
    contents = {}
    for index, tensors in by_index.items():
        for kind, sharded in tensors.items():
            if kind in _MOMENTS:
                contents[f"{index}.{kind}"] = sharded
            elif parameters[index].dtype != torch.float32:
                # Under the name that it has without sharding, so that either kind of optimizer reads the other's.
                key = sharded.key.replace(f"optimizer.state.{kind}.", f"optimizer.state.{_MASTER}.", 1)
                contents[f"{index}.{_MASTER}"] = replace(sharded, key=key)
    return contents


def _parameters_of_distributed(part: Any) -> list[Tensor]:
    """The model's parameters in the order in which Megatron-Core counts them."""
    return [parameter for buffer in part.buffers for parameter in buffer.param_index_map]


def _sharded_of_plain(part: Any, model_state: Mapping[str, Sharded]) -> dict[str, Any]:
    by_parameter = {id(sharded.data): sharded for sharded in model_state.values()}
    return {
        name: make_sharded_optimizer_tensor(by_parameter[id(parameter)], tensor, prefix=f"optimizer.state.{kind}")
        for name, parameter, kind, tensor in _tensors_of_plain(part)
    }


def _tensors_of_plain(part: Any) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """A name, the model's parameter, the kind of tensor, and the tensor itself."""
    for index, (parameter, main) in enumerate(_main_parameters(part)):
        state = part.optimizer.state[main]
        for kind in _MOMENTS:
            yield f"{index}.{kind}", parameter, kind, state[kind]
        if main is not parameter:
            yield f"{index}.{_MASTER}", parameter, _MASTER, main


def _main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of the model with the one that the optimizer updates in its place."""
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        for group in part.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(parameters, mains, strict=True)
    for group in part.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in group)
