# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Contents of a checkpoint: names of a model's tensors, optimizer, counters and random states.

The names do not depend on the model's modules. Transformer Engine keeps a norm's weight in the linear layer after the
norm, except before experts. Megatron-Core's own modules have separate norms. Their layer specs save these norms under
the names of Transformer Engine's dense layers, also before experts, but not with multi-latent attention. In this
project every norm has the name of a separate module.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import masters_from_weights
from nemo_rl_moe.models.megatron.checkpoint.optimizer_state import (
    SHARDED_TYPES,
    Sharded,
    ensure_state,
    put_back,
    reset_state,
    set_num_updates,
    sharded_optimizer_state,
)
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.lora.checkpoint_names import sharded_adapters, sharded_value_head
from nemo_rl_moe.models.megatron.model.agreement import union_of_ranks
from nemo_rl_moe.models.megatron.model.value_head import PREFIX as VALUE_HEAD_PREFIX
from nemo_rl_moe.models.megatron.weights.parameter_layout import plain_norm_name
from nemo_rl_moe.models.safetensors_folder import listed

COUNTERS_KEY = "trainer.counters"
RANDOM_PREFIX = "random."
_NOT_THE_MODEL_S = ("optimizer.", "trainer.", RANDOM_PREFIX)
_EXPERT_BIAS = ".router.expert_bias"


def model_names(saved: Iterable[str]) -> dict[str, str]:
    """Return this project's name of each model tensor -> its name in the checkpoint, which may be Megatron-Core's."""
    return {plain_norm_name(name): name for name in saved if _is_the_model_s(name)}


def may_be_missing(name: str) -> bool:
    """Return whether a model may start without a tensor: an expert bias starts at zero, a value head at random."""
    return name.endswith(_EXPERT_BIAS) or is_of_value_head(name)


def is_of_value_head(name: str) -> bool:
    """Return whether a tensor belongs to a value head. Only models in some roles have a value head."""
    return name.startswith(VALUE_HEAD_PREFIX)


def check_names(
    directory: Path,
    wanted: Iterable[str],
    saved: Iterable[str],
    *,
    may_be_skipped: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Compare the names that the ranks need with the names in a checkpoint. Every rank calls it.

    Args:
        directory: Folder that the error message names.
        wanted: Names that this rank needs.
        may_be_skipped: Function of a name in the checkpoint: whether the name may be unused.

    Returns:
        Unused names in the checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, or has a tensor that no rank uses and that may not be skipped.
            Raised on every rank.
    """
    asked_for = union_of_ranks(dict.fromkeys(wanted)).keys()
    held = {name for name in saved if _is_the_model_s(name)}
    problems = []
    if missing := sorted(asked_for - held):
        problems.append(f"lacks tensors of the model ({len(missing)}): {listed(missing)}")
    skipped = sorted(name for name in held - asked_for if may_be_skipped(name))
    if extra := sorted(held - asked_for - {*skipped}):
        problems.append(f"holds tensors that the model has no place for ({len(extra)}): {listed(extra)}")
    if problems:
        raise CheckpointError(
            f"{directory}: {'; '.join(problems)}; config.json and policy.megatron_cfg must describe the model that was "
            "saved"
        )
    return skipped


def _is_the_model_s(name: str) -> bool:
    return not name.startswith(_NOT_THE_MODEL_S)


_TRACKED = "tracked."


def random_states() -> dict[str, Tensor]:
    """Return copies of the random states of torch, the GPU if there is one, and Megatron-Core's named generators."""
    states = {"torch": torch.get_rng_state()}
    if not cpu_backend.ACTIVE:
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    states |= {f"{_TRACKED}{name}": state for name, state in tracked.items() if isinstance(state, Tensor)}
    return {name: state.cpu().clone() for name, state in states.items()}


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore all or some of the random states of `random_states`."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and not cpu_backend.ACTIVE:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    tracked = tracker.get_states()
    tracked |= {name.removeprefix(_TRACKED): s for name, s in states.items() if name.startswith(_TRACKED)}
    tracker.set_states(tracked)


@dataclass(frozen=True)
class TrainingObjects:
    """Objects of one rank that training changes. The chunks are without the data-parallel wrapper."""

    chunks: Sequence[GPTModel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


@dataclass(frozen=True)
class TrainerCounters:
    """Numbers of optimizer steps that changed the weights, of `train` calls, and of learning-rate scheduler steps."""

    num_updates: int
    num_calls: int
    scheduler_ticks: int


def layout_name() -> str:
    """Return the name of the parallel layout. Random states belong to the ranks of one layout."""
    sizes = {
        "world": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if (context := parallel_state.get_context_parallel_world_size()) > 1:
        sizes["cp"] = context
    return "_".join(f"{name}{size}" for name, size in sizes.items())


def random_key(name: str) -> str:
    return f"{RANDOM_PREFIX}{layout_name()}.rank{dist.get_rank()}.{name}"


def sharded_model(chunks: Sequence[GPTModel], *, saved: Collection[str] = ()) -> dict[str, Sharded]:
    """Return the model's parameters and buffers without copies. If the model has adapters, return only the adapters and
    the value head.

    Names contain layer numbers, so that another pipeline layout finds them.

    Args:
        saved: For loading, the names in the checkpoint.
    """
    tensors: dict[str, Sharded] = {**sharded_adapters(chunks)}
    if tensors:
        return {**tensors, **sharded_value_head(chunks)}
    for index, chunk in enumerate(chunks):
        found = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        # Transformer Engine's extra state is not a tensor, and only its 8-bit formats use it.
        tensors |= {f"{index}.{name}": s for name, s in found.items() if isinstance(s, SHARDED_TYPES)}
    names = model_names(saved)
    for sharded in tensors.values():
        name = plain_norm_name(sharded.key)
        sharded.key = names.get(name, name)
    return tensors


def sharded_contents(
    objects: TrainingObjects, counters: TrainerCounters | None, *, saved: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return this rank's part of a checkpoint. All ranks call it.

    Args:
        objects: Their tensors are saved, or filled when loading.
        counters: Counters to include, with the optimizer and random states. None if only the model's weights are part
            of the checkpoint.
        saved: For loading, the names in the checkpoint, with torch's description of each tensor. Random states are only
            loaded if the checkpoint has them for this layout, rank and device type.
    """
    contents: dict[str, Any] = {"model": sharded_model(objects.chunks, saved=saved or ())}
    if counters is None:
        return contents
    ensure_state(objects.optimizer)
    contents["optimizer"] = dict(enumerate(sharded_optimizer_state(objects.optimizer, contents["model"])))
    values = torch.tensor([counters.num_updates, counters.num_calls, counters.scheduler_ticks])
    contents["counters"] = ShardedTensor.from_rank_offsets(COUNTERS_KEY, values, replica_id=dist.get_rank())
    contents["random"] = {
        name: ShardedTensor.from_rank_offsets(random_key(name), state)
        for name, state in random_states().items()
        if saved is None or _fits(saved.get(random_key(name)), state)
    }
    return contents


def _fits(described: Any, state: Tensor) -> bool:
    """Return whether a saved random state is one of the same kind of device: their sizes differ."""
    return described is not None and described.size == state.shape


@torch.no_grad()
def restore_model(chunks: Sequence[GPTModel], loaded: dict[str, Tensor]) -> None:
    """Fill the model with loaded tensors, by the names of `sharded_model`."""
    live = sharded_model(chunks)
    for name, tensor in loaded.items():
        live[name].data.copy_(tensor)


@torch.no_grad()
def restore_contents(objects: TrainingObjects, loaded: dict[str, Any]) -> TrainerCounters | None:
    """Fill the objects with loaded tensors, by the names of `sharded_contents`.

    Returns the counters, or None if only weights were loaded.
    """
    restore_model(objects.chunks, loaded["model"])
    if "counters" not in loaded:
        reset_state(objects.optimizer)  # an earlier load of a damaged checkpoint may have filled it
        masters_from_weights(objects.optimizer)
        return None
    num_updates, num_calls, scheduler_ticks = loaded["counters"].tolist()
    put_back(objects.optimizer, loaded.get("optimizer", {}))
    set_num_updates(objects.optimizer, num_updates)
    objects.scheduler.num_steps = scheduler_ticks
    objects.scheduler.step(0)  # sets the learning rate and the weight decay of every group
    restore_random_states(loaded.get("random", {}))
    return TrainerCounters(num_updates, num_calls, scheduler_ticks)
