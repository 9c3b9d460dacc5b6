# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""prime-rl: micro batches of the file system's transport, `rollouts/step_N/rank_M.bin`, packed and padded at the end.

Layout of the main branch of August 2026, 0.8.1: `src/prime_rl/transports/rollouts/types.py` (`MicroBatch`, in
MessagePack as a list without names) and `filesystem.py` in the same folder, `src/prime_rl/trainer/batch.py` (packing:
positions of each sequence begin with 0; padding and batches that fill up a rank train on no token),
`orchestrator/trajectories.py` (missing routes are 0).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import array, sequence
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_FIELDS = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids")
_ROUTE_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def claims(content: Any) -> bool:
    """Return True if the content of a file is a list of prime-rl's micro batches."""
    if not isinstance(content, list) or not content or not isinstance(content[0], list):
        return False
    first = content[0][: len(_FIELDS)]
    return len(first) == len(_FIELDS) and all(
        isinstance(values, list) and len(values) == len(first[0]) for values in first
    )


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    for number, batch in enumerate(content):
        place = f"{where}: micro batch {number}"
        if not claims([batch]):
            raise DataError(
                f"{place}: got {type(batch).__name__}, expected a list that begins with the lists {', '.join(_FIELDS)},"
                " all of one length"
            )
        tokens, mask, advantages, logprobs, positions = (
            array(values, f"{place}: {field}") for values, field in zip(batch, _FIELDS, strict=False)
        )
        routes = _routes(batch, len(tokens), place)
        starts = np.flatnonzero(positions == 0).tolist()
        for first, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            part = slice(first, end)
            if not mask[part].any():
                continue  # padding, or a copy that gives every rank the same number of batches
            yield sequence(
                f"{number}-{first}",
                f"{place}: token {first}",
                end - first,
                None,
                token_ids=tokens[part],
                loss_mask=mask[part],
                advantages=advantages[part],
                rollout_logprobs=logprobs[part],
                rollout_experts=None if routes is None else routes[part],
            )


def _routes(batch: list[Any], length: int, place: str) -> np.ndarray | None:
    """Return the routes of a micro batch. They are a field `[content, shape, type]`, at an index that depends on the
    release.
    """
    for field in batch[len(_FIELDS) :]:
        if isinstance(field, list) and len(field) == 3 and isinstance(field[0], bytes):
            content, shape, kind = field
            if kind not in _ROUTE_TYPES:
                raise DataError(f"{place}: routed_experts: got {kind!r}, expected one of {', '.join(_ROUTE_TYPES)}")
            values = np.frombuffer(content, dtype=kind)
            if len(shape) != 3 or shape[0] != length or values.size != np.prod(shape):
                raise DataError(f"{place}: routed_experts: got {shape}, expected [{length}, layers, topk]")
            return values.reshape(shape)
    return None
