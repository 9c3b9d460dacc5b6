# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of a checkpoint into a rank's training objects or its model, in the layout that wrote it or another one."""

import pickle
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.metadata import Metadata

from nemo_rl_moe.checked_reading import PartsRead
from nemo_rl_moe.errors import CheckpointError, DamagedCheckpointError
from nemo_rl_moe.models.megatron.checkpoint.contents import (
    COUNTERS_KEY,
    TrainerCounters,
    TrainingObjects,
    check_names,
    is_of_value_head,
    may_be_missing,
    restore_contents,
    restore_model,
    sharded_contents,
    sharded_model,
)
from nemo_rl_moe.models.megatron.checkpoint.index import check_folder, data_only
from nemo_rl_moe.models.megatron.lora.adapter import adapters_in
from nemo_rl_moe.models.megatron.lora.checkpoint_names import PREFIX as ADAPTER_PREFIX
from nemo_rl_moe.models.megatron.model.agreement import DamageSearch


def load_checkpoint(objects: TrainingObjects, directory: Path, *, with_optimizer: bool) -> TrainerCounters | None:
    """Fill model, optimizer, schedule and random states. Every rank calls it.

    In another layout than the checkpoint's the random states stay: they belong to ranks.

    Args:
        directory: Written by `start_write`.
        with_optimizer: False reads the weights alone.

    Returns:
        None with the weights alone.

    Raises:
        CheckpointError: The checkpoint holds anything but tensors, lacks a tensor of the model or holds one too many,
            lacks the optimizer, or is not where every rank can reach it. Raised on every rank.
        DamagedCheckpointError: Its files are not what was written. Raised on every rank; the objects must not be used
            before another checkpoint has been loaded.
    """
    index = _index_of_all_ranks(directory, with_optimizer=with_optimizer)
    counters = TrainerCounters(0, 0, 0) if with_optimizer else None
    saved = index.state_dict_metadata.keys()
    wanted = sharded_contents(objects, counters, saved=saved)
    check_names(directory, [sharded.key for sharded in wanted["model"].values()], saved)
    return restore_contents(objects, _load(wanted, directory, index))


def load_model(chunks: Sequence[GPTModel], directory: Path) -> list[str]:
    """Fill a model alone, before it has an optimizer. Every rank calls it.

    An expert bias without a tensor in the checkpoint stays zero, and a value head unchanged.

    Returns:
        Tensors of a value head in the checkpoint, which the model has not and which are left out.

    Raises:
        CheckpointError: See `load_checkpoint`.
    """
    index = _index_of_all_ranks(directory, with_optimizer=False)
    saved = index.state_dict_metadata.keys()
    if not adapters_in(chunks) and any(name.startswith(ADAPTER_PREFIX) for name in saved):
        raise CheckpointError(
            f"{directory}: holds adapters alone (policy.lora); name their base as the model and the checkpoint in"
            " policy.lora.path, or merge them: nemo-rl-moe convert --from hf --to hf --input BASE --adapter CHECKPOINT"
        )
    wanted = {
        name: sharded
        for name, sharded in sharded_model(chunks, saved=saved).items()
        if sharded.key in saved or not may_be_missing(sharded.key)
    }
    keys = [sharded.key for sharded in wanted.values()]
    left_out = check_names(directory, keys, saved, may_be_left_out=is_of_value_head)
    restore_model(chunks, _load({"model": wanted}, directory, index)["model"])
    return left_out


def _load(wanted: dict[str, Any], directory: Path, index: Metadata) -> dict[str, Any]:
    parts = PartsRead.of_folder(directory)
    loaded: dict[str, Any] = {}
    problem: CheckpointError | None = None
    try:
        with data_only(index, parts), warnings.catch_warnings():
            # Megatron-Core's own call of torch.
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            loaded = dist_checkpointing.load(wanted, str(directory))
    except CheckpointError as error:
        problem = error
    # CheckpointException of torch is a BaseException; a damaged file can fail in any way.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        problem = CheckpointError(f"{directory}: cannot be loaded: {_reason(error)}")
        problem.__cause__ = error
    if damage := _damage_of_all_ranks(directory, parts, has_failed=problem is not None):
        raise DamagedCheckpointError(damage)
    if problem is not None:
        raise problem
    return loaded


def _damage_of_all_ranks(directory: Path, parts: PartsRead | None, *, has_failed: bool) -> list[str]:
    """Return the list damaged files, a line each, equal on every rank."""
    # Tensors were compared while they were read. Tensors that no rank has read, such as an optimizer's, do no harm.
    # Everything is compared after a failure, to name all damage, and where a rank has read what `files.json` does not
    # list.
    mine = parts.problems() if parts is not None else []
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, has_failed or (parts is not None and parts.has_unlisted)))
    if not any(problems or is_unclear for problems, is_unclear in found):
        return []
    while_reading = [problem for problems, _ in found for problem in problems]
    # What was damaged on its way alone, and is whole now, was used nonetheless.
    return DamageSearch(directory, in_parts=True).of_all_ranks() or list(dict.fromkeys(while_reading))


def _index_of_all_ranks(directory: Path, *, with_optimizer: bool) -> Metadata:
    """Return the index once every rank has checked the folder: a missing rank would block the others."""
    index: Metadata | None = None
    problem, fingerprint = None, None
    try:
        checked = check_folder(directory)
        index, fingerprint = checked.index, checked.fingerprint
        if with_optimizer and COUNTERS_KEY not in index.state_dict_metadata:
            problem = f"{directory}: was saved without the optimizer (checkpointing.save_optimizer: false)"
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # such as a lack of memory
        problem = f"{directory}: cannot be read: {_reason(error)}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (problem, fingerprint))
    problems = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
    if len(problems) == len(found):
        raise CheckpointError(problems[0])
    for rank, text in problems.items():
        raise CheckpointError(f"{text} (on rank {rank}; every rank must reach the folder, and others do)")
    strangers = [rank for rank, (_, seen) in enumerate(found) if seen != found[0][1]]
    if strangers:
        raise CheckpointError(
            f"{directory}: rank {strangers[0]} finds another checkpoint than rank 0; all ranks must share the folder"
        )
    assert index is not None  # no rank has a problem
    # The index is used at once; tensors are compared while they are read.
    if damage := DamageSearch(directory, in_parts=False).of_all_ranks():
        raise DamagedCheckpointError(damage)
    return index


def _reason(error: BaseException) -> str:
    """Return one line from what may be the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        return "a data file holds something else than tensors"
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^(.{300}).*$", r"\1 ...", text)
