# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""verl: a saved `DataProto`, padded on both sides.

Layout of release 0.9.1, and the same in 0.7: `verl/protocol.py` (`DataProto.save_to_disk`, a pickle around a
consolidated `TensorDict`, or around arrays with `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`),
`verl/experimental/agent_loop/agent_loop.py` (prompts padded on the left, responses on the right, `routed_experts` of
all positions, 0 if the engine returned none), `verl/trainer/ppo/ray_trainer.py` (columns that the trainer adds). Files
of `trainer.rollout_data_dir` contain only texts. For the trainer with a TransferQueue see `verl_queue.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.routing.audit.adapters.inert_pickle import Inert, read_pickle
from nemo_rl_moe.routing.audit.adapters.layout import padded_column, padded_sequences, real_tokens
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.routing.audit.adapters.verl_queue import COLUMNS, claims_queue, read_queue
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_REWARDS = ("token_level_scores", "token_level_rewards", "rm_scores")


def claims(content: Any) -> bool:
    """Return True for a `DataProto`, a dictionary of its tensors, a queue's batch, or texts of `rollout_data_dir`."""
    if isinstance(content, Inert):
        return content.path == "verl.protocol.DataProto"
    if isinstance(content, list):
        return (
            bool(content) and isinstance(content[0], dict) and {"input", "output", "gts", "score"} <= content[0].keys()
        )
    return claims_queue(content) or (
        isinstance(content, dict) and {"responses", "attention_mask", "input_ids"} <= content.keys()
    )


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    if isinstance(content, list):
        raise DataError(f"{where}: has only texts, no routes; expected a file of batch.save_to_disk(FILE)")
    if claims_queue(content):
        yield from read_queue(content, where)
        return
    batch, names = _batch_of_proto(content, where) if isinstance(content, Inert) else (content, None)
    real = real_tokens(batch.get("attention_mask", ()), f"{where}: attention_mask")
    tokens = padded_column(batch, "input_ids", real.shape, where)
    responses = padded_column(batch, "responses", real.shape, where)
    columns = {name: padded_column(batch, field, real.shape, where) for name, field in COLUMNS.items()}
    rewards = next((padded_column(batch, field, real.shape, where) for field in _REWARDS if field in batch), None)
    if tokens is None or responses is None:
        raise DataError(f"{where}: got the fields {', '.join(map(str, batch))}; expected input_ids and responses")
    yield from padded_sequences(where, real, {"token_ids": tokens} | columns, rewards, names)


def _batch_of_proto(content: Inert, where: str) -> tuple[Mapping[str, Any], Any]:
    """Return the tensors of a `DataProto` by name, and the names of its prompts, if it has any."""
    try:
        packed, others, _ = content.state
        if isinstance(packed, tuple):
            leaves = _of_arrays(packed)
        else:
            leaves = _of_storage(read_pickle(packed, where) if isinstance(packed, bytes) else packed)
        names = others.get("uid")
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise DataError(f"{where}: a DataProto whose tensors cannot be read: {one_line(error)}") from error
    return leaves, None if names is None else names.values


def _of_storage(made: Inert) -> dict[str, torch.Tensor]:
    """Return the tensors of a consolidated `TensorDict`, which share one storage and are padded to 8 bytes each."""
    description, storage = made.args[:2]
    leaves = description["leaves"].items()
    return {name: _tensor(storage[first:last], dtype, shape) for name, (dtype, shape, first, last, *_) in leaves}


def _of_arrays(packed: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch of `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`, which stores bytes as arrays."""
    _, _, encoded = packed
    found = {}
    for name, (dtype, shape_or_pieces, *content) in encoded.items():
        if content:  # a nested tensor has a layout and pieces here, and is not in a padded batch
            found[name] = _tensor(torch.from_numpy(content[0].values.copy()), dtype, shape_or_pieces)
    return found


def _tensor(content: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of this type and shape at the beginning of some bytes, without the padding after it."""
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"got {dtype!r}, expected a type of numbers")
    return content[: prod(shape) * kind.itemsize].view(kind).reshape(shape)
