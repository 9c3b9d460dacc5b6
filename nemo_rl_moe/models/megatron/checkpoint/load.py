# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint into the training objects of a rank, in the layout that wrote it or in another."""

import pickle
import re
from pathlib import Path

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron.checkpoint.contents import (
    COUNTERS_KEY,
    TrainerCounters,
    TrainingObjects,
    random_key,
    restore_contents,
    sharded_contents,
)
from nemo_rl_moe.models.megatron.checkpoint.data_only import data_only, read_index

# isort: split
from megatron.core import dist_checkpointing


def load_checkpoint(objects: TrainingObjects, directory: Path, *, with_optimizer: bool) -> TrainerCounters | None:
    """Fills model, optimizer, schedule and random states. Every rank calls it.

    In another layout than the checkpoint's the random states stay as they are: they belong to ranks.

    Args:
        objects: What to fill.
        directory: A folder that `start_write` has filled.
        with_optimizer: False reads the weights alone.

    Returns:
        The counters; None with the weights alone.

    Raises:
        CheckpointError: The checkpoint is damaged, holds anything but tensors, belongs to another model, or lacks the
            optimizer.
    """
    names = read_index(directory).state_dict_metadata.keys()
    if with_optimizer and COUNTERS_KEY not in names:
        raise CheckpointError(f"{directory}: was saved without the optimizer (checkpointing.save_optimizer: false)")
    wanted = sharded_contents(
        objects,
        TrainerCounters(0, 0, 0) if with_optimizer else None,
        is_loading=True,
        random=random_key("torch") in names,
    )
    try:
        with data_only():
            loaded = dist_checkpointing.load(wanted, str(directory))
    except CheckpointError:
        raise
    # CheckpointException of torch is a BaseException; a damaged file can fail in any way.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"{directory}: cannot be loaded: {_reason(error)}") from error
    return restore_contents(objects, loaded)


def _reason(error: BaseException) -> str:
    """One line out of what may be the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        return "a data file holds something else than tensors"
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^(.{300}).*$", r"\1 ...", text)
