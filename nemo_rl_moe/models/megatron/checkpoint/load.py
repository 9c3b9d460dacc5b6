# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of a checkpoint into a rank's training objects or its model, in the same or another layout."""

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
from nemo_rl_moe.models.families.rules import MTP_PREFIX
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
    """Fill model, optimizer, schedule and random states, and return the counters. Every rank calls it.

    In another layout than the checkpoint's, random states stay unchanged, because they belong to ranks.

    Args:
        directory: Folder written by `start_write`.
        with_optimizer: Whether to load more than the weights. If False, the result is None.

    Raises:
        CheckpointError: The checkpoint contains anything but tensors, lacks a tensor of the model or has an additional
            tensor, lacks the optimizer, or is not reachable for every rank. Raised on every rank.
        DamagedCheckpointError: Files of the checkpoint have changed since they were written. Raised on every rank. The
            objects must not be used until another checkpoint has been loaded.
    """
    index = _index_of_all_ranks(directory, with_optimizer=with_optimizer)
    counters = TrainerCounters(0, 0, 0) if with_optimizer else None
    saved = index.state_dict_metadata
    wanted = sharded_contents(objects, counters, saved=saved)
    check_names(directory, [sharded.key for sharded in wanted["model"].values()], saved)
    return restore_contents(objects, _load(wanted, directory, index))


def load_model(chunks: Sequence[GPTModel], directory: Path, may_lack: Sequence[str] = ()) -> list[str]:
    """Fill a model without an optimizer. Every rank calls it.

    An expert bias or a value head without a tensor in the checkpoint stays unchanged.

    Args:
        may_lack: Prefixes of names that the model or the checkpoint may lack.

    Returns:
        Names of the checkpoint's tensors that the model lacks: a value head, or tensors with these prefixes.

    Raises:
        CheckpointError: See `load_checkpoint`.
    """
    index = _index_of_all_ranks(directory, with_optimizer=False)
    saved = index.state_dict_metadata.keys()
    if not adapters_in(chunks) and any(name.startswith(ADAPTER_PREFIX) for name in saved):
        raise CheckpointError(
            f"{directory}: holds adapters alone (policy.lora); set the model to their base and policy.lora.path to the"
            " checkpoint, or merge them: nemo-rl-moe convert --from hf --to hf --input BASE --adapter CHECKPOINT"
        )
    trains_mtp = any(chunk.trains_mtp for chunk in chunks)
    if not trains_mtp and MTP_PREFIX not in may_lack and any(name.startswith(MTP_PREFIX) for name in saved):
        raise CheckpointError(
            f"policy.megatron_cfg.mtp_num_layers: got null, but {directory} has trained layers of multi-token"
            " prediction; expected 1, or, where they cannot be trained, the model that nemo-rl-moe convert --from"
            f" megatron --to hf --input {directory.parent} writes, whose layers are kept unchanged"
        )
    wanted = {
        name: sharded
        for name, sharded in sharded_model(chunks, saved=saved).items()
        if sharded.key in saved or not (may_be_missing(sharded.key) or sharded.key.startswith(tuple(may_lack)))
    }
    keys = [sharded.key for sharded in wanted.values()]

    def may_be_skipped(name: str) -> bool:
        return is_of_value_head(name) or name.startswith(tuple(may_lack))

    skipped = check_names(directory, keys, saved, may_be_skipped=may_be_skipped)
    restore_model(chunks, _load({"model": wanted}, directory, index)["model"])
    return skipped


def _load(wanted: dict[str, Any], directory: Path, index: Metadata) -> dict[str, Any]:
    parts = PartsRead.of_folder(directory)
    loaded: dict[str, Any] = {}
    problem: CheckpointError | None = None
    try:
        with data_only(index, parts), warnings.catch_warnings():
            # Megatron-Core calls the deprecated function.
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            loaded = dist_checkpointing.load(wanted, str(directory))
    except CheckpointError as error:
        problem = error
    # torch's CheckpointException is a BaseException, and a damaged file can fail in any way.
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
    """Return a line for each damaged file, the same on every rank."""
    # Tensors were compared while they were read. Damage in unread tensors, such as an optimizer's, does no harm. All
    # files are compared after a failure, to name all damage, and if a rank has read a tensor that `files.json` does not
    # list.
    mine = parts.problems() if parts is not None else []
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, has_failed or (parts is not None and parts.has_unlisted)))
    if not any(problems or is_unclear for problems, is_unclear in found):
        return []
    while_reading = [problem for problems, _ in found for problem in problems]
    # A tensor may have been damaged while it was read from a correct file. The damaged tensor was used.
    return DamageSearch(directory, in_parts=True).of_all_ranks() or list(dict.fromkeys(while_reading))


def _index_of_all_ranks(directory: Path, *, with_optimizer: bool) -> Metadata:
    """Return the index after every rank has checked the folder, because a missing rank would block the others."""
    index: Metadata | None = None
    problem, fingerprint = None, None
    try:
        index, fingerprint = check_folder(directory)
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
        raise CheckpointError(f"{text} (on rank {rank}; every rank must reach the folder, as other ranks do)")
    strangers = [rank for rank, (_, seen) in enumerate(found) if seen != found[0][1]]
    if strangers:
        raise CheckpointError(
            f"{directory}: rank {strangers[0]} finds another checkpoint than rank 0; all ranks must share the folder"
        )
    assert index is not None  # no rank has a problem
    # The index is needed now. Tensors are compared while they are read.
    if damage := DamageSearch(directory, in_parts=False).of_all_ranks():
        raise DamagedCheckpointError(damage)
    return index


def _reason(error: BaseException) -> str:
    """Return one line about an error. The error itself may contain the tracebacks of all ranks."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        return "a data file holds something else than tensors"
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^(.{300}).*$", r"\1 ...", text)
