# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's tensors as pieces of layout-independent full tensors.

A checkpoint contains the two moments and, for bfloat16 weights, the float32 masters. Groups and settings come from the
configuration and the schedule. The caller saves the number of updates, which all parameters share.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from nemo_rl_moe.models.megatron.checkpoint.flat_ranges import sharded_range
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import (
    MOMENTS,
    counts_for_each_parameter,
    inner_optimizers,
    make_state,
    optimizer_parts,
    step_count,
)

Sharded = Any
"""A `ShardedTensor`, or a `ShardedTensorFactory` that makes several from one tensor."""
SHARDED_TYPES = (ShardedTensor, ShardedTensorFactory)

_MASTER = "fp32_param"


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Create the state of an optimizer before its first step: zero moments and torch's counts of updates."""
    for part in optimizer_parts(optimizer):
        make_state(part)


def reset_state(optimizer: MegatronOptimizer) -> None:
    """Reset existing state to its values before the first step."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            for kind in MOMENTS:
                if kind in state:
                    state[kind].zero_()
    set_num_updates(optimizer, 0)


def set_num_updates(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Set the optimizer's number of updates for Adam's bias correction.

    Every parameter gets a separate tensor. torch increments the tensor in each step, and would increment a shared
    tensor once per parameter. (When Megatron-Core loads a checkpoint, it shares one tensor, or restores 0.)
    """
    for part in optimizer_parts(optimizer):
        for inner in inner_optimizers(part):
            if counts_for_each_parameter(inner):
                for parameter, state in inner.state.items():
                    state["step"] = step_count(parameter, num_updates)
            else:  # Transformer Engine and Apex count by group, beginning with the first step
                for group in inner.param_groups:
                    group["step"] = num_updates


def sharded_optimizer_state(optimizer: MegatronOptimizer, model_state: Mapping[str, Sharded]) -> list[dict[str, Any]]:
    """Return the optimizer's tensors that this rank updates: name -> tensor, for each part of the optimizer.

    Tensors are neither copied nor sent: each rank of a distributed optimizer saves its range of the flattened
    parameters.
    """
    by_parameter = {id(sharded.data): sharded for sharded in model_state.values()}
    return [
        _sharded_of_distributed(part, by_parameter)
        if isinstance(part, DistributedOptimizer)
        else _sharded_of_plain(part, by_parameter)
        for part in optimizer_parts(optimizer)
    ]


def put_back(optimizer: MegatronOptimizer, loaded: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Fill the optimizer with loaded tensors, by the names of `sharded_optimizer_state`.

    Args:
        loaded: Index of the part -> name -> tensor. A part without parameters is missing, such as the experts' part in
            a pipeline stage of dense layers.
    """
    for number, part in enumerate(optimizer_parts(optimizer)):
        state = loaded.get(number, {})
        if isinstance(part, DistributedOptimizer):
            _put_back_distributed(part, state)
        else:
            for name, _, _, tensor in _tensors_of_plain(part):
                tensor.data.copy_(state[name])


def _sharded_of_distributed(part: Any, by_parameter: Mapping[int, Sharded]) -> dict[str, Any]:
    """Return `{index of the parameter}.{kind of tensor}.{number of the piece}` -> piece."""
    return {
        f"{index}.{kind}.{number}": piece
        for index, (parameter, start) in enumerate(_ranges_of_distributed(part))
        for kind, values in _saved_tensors(parameter, _tensors_of_distributed(part, parameter)).items()
        for number, piece in enumerate(
            sharded_range(
                by_parameter[id(parameter)],
                start,
                values,
                prefix=f"optimizer.state.{kind}",
                replica=part.distributed_optimizer_instance_id,
            )
        )
    }


def _put_back_distributed(part: Any, loaded: Mapping[str, Tensor]) -> None:
    for index, (parameter, _) in enumerate(_ranges_of_distributed(part)):
        tensors = _tensors_of_distributed(part, parameter)
        for kind, values in _saved_tensors(parameter, tensors).items():
            names = (f"{index}.{kind}.{number}" for number in itertools.count())
            pieces = [loaded[name].flatten() for name in itertools.takewhile(loaded.__contains__, names)]
            values.copy_(torch.cat(pieces))
        if not _is_of_transformer_engine(part):
            part._set_main_param_and_optimizer_states(parameter, tensors)


def _tensors_of_distributed(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return master and moments of this rank's range of a parameter, without copies.

    Megatron-Core would copy moments in bfloat16 to float32. For all parameters at once, these copies need as much
    memory as masters and moments.
    """
    if not _is_of_transformer_engine(part):
        found: dict[str, Tensor] = part._get_main_param_and_optimizer_states(parameter)
        return found
    group, place = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
    return {"param": state["master_param"], **{kind: state[kind] for kind in MOMENTS}}


def _is_of_transformer_engine(part: Any) -> bool:
    """Return whether the optimizer stores its own masters, and moments in other formats than float32."""
    return part.config.use_precision_aware_optimizer and hasattr(part.optimizer, "get_unscaled_state")


def _ranges_of_distributed(part: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield each parameter of which this rank updates a range, and the beginning of the range in the parameter."""
    for dtypes in part.gbuf_ranges:
        for buckets in dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _saved_tensors(parameter: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name in a checkpoint -> flat tensor, for moments and master of this rank's range of a parameter."""
    # The names are the same as without sharding, so that each kind of optimizer reads the other kind's checkpoints.
    # Float32 weights have no masters.
    found = {kind: tensors[kind] for kind in MOMENTS}
    return found if parameter.dtype == torch.float32 else found | {_MASTER: tensors["param"]}


def _sharded_of_plain(part: Any, by_parameter: Mapping[int, Sharded]) -> dict[str, Any]:
    return {
        name: make_sharded_optimizer_tensor(by_parameter[id(parameter)], tensor, prefix=f"optimizer.state.{kind}")
        for name, parameter, kind, tensor in _tensors_of_plain(part)
    }


def _tensors_of_plain(part: Any) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """Yield name, model parameter, kind (moment or master) and values of each tensor of an unsharded optimizer."""
    for index, (parameter, main) in enumerate(_main_parameters(part)):
        state = part.optimizer.state[main]
        for kind in MOMENTS:
            yield f"{index}.{kind}", parameter, kind, state[kind]
        if main is not parameter:
            yield f"{index}.{_MASTER}", parameter, _MASTER, main


def _main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter of the model with its float32 master, or with itself if it has no master."""
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        for group in part.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(parameters, mains, strict=True)
    for group in part.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in group)
