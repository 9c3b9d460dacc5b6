# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL: `train_data_step*.jsonl`, and the batch of a training step saved with `torch.save`, padded on the right.

Layout of the main branch of August 2026, after 0.7: `nemo_rl/algorithms/grpo.py` (fields, under two sets of names),
`nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`: one sequence per line, each field a batch of one),
`nemo_rl/models/generation/interfaces.py` (missing routes are -1). By default the JSONL has no `routed_experts`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.inert_pickle import Inert
from nemo_rl_moe.routing.audit.adapters.layout import array, padded_column, sequence
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_COLUMNS = {
    "rollout_experts": "routed_experts",
    "rollout_logprobs": "generation_logprobs",
    "training_logprobs": "prev_logprobs",
    "advantages": "advantages",
}
_BATCH = "nemo_rl.distributed.batched_data_dict.BatchedDataDict"


def _fields(content: Any) -> Any:
    if isinstance(content, Inert) and content.path == _BATCH and isinstance(content.state, dict):
        return content.state.get("data")
    return content


def claims(content: Any) -> bool:
    """Return True for a batch, or lines of `train_data_step*.jsonl`."""
    found = _fields(content[0] if isinstance(content, list) and content else content)
    return isinstance(found, dict) and {"generation_logprobs", "input_lengths"} <= found.keys()


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    if not isinstance(content, list):
        yield from _batch(_fields(content), where, 0)
        return
    for number, line in enumerate(content):
        if not isinstance(line, dict):
            raise DataError(f"{where}: line {number + 1}: got {type(line).__name__}, expected an object")
        yield from _batch(line, f"{where}: line {number + 1}", int(line.get("idx", number)))


def _batch(batch: Mapping[str, Any], where: str, first: int) -> Iterator[CapturedSequence]:
    tokens = _one_of(batch, ("input_ids", "token_ids"), where)
    lengths = _one_of(batch, ("input_lengths",), where).reshape(-1)
    if tokens.ndim != 2 or len(lengths) != len(tokens) or (lengths > tokens.shape[1]).any():
        raise DataError(
            f"{where}: input_lengths: got {lengths.tolist()[:8]}, expected one length per row of token ids"
            f" {list(tokens.shape)}"
        )
    shape = (tokens.shape[0], tokens.shape[1])
    mask = _one_of(batch, ("token_mask", "token_loss_mask"), where) != 0
    used = array(batch.get("sample_mask", batch.get("sample_loss_mask", np.ones(len(tokens)))), where).reshape(-1)
    columns = {name: padded_column(batch, field, shape, where) for name, field in _COLUMNS.items()}
    rewards = array(batch["rewards"], f"{where}: rewards").reshape(-1) if batch.get("rewards") is not None else None
    for number, length in enumerate(lengths.astype(int).tolist()):
        own = {name: values[number, :length] for name, values in columns.items() if values is not None}
        yield sequence(
            str(first + number),
            f"{where}: sequence {number}",
            length,
            None,
            None if rewards is None else rewards[number],
            token_ids=tokens[number, :length],
            loss_mask=mask[number, :length] & bool(used[number]),
            **own,
        )


def _one_of(batch: Mapping[str, Any], fields: tuple[str, ...], where: str) -> np.ndarray:
    for field in fields:
        if batch.get(field) is not None:
            return array(batch[field], f"{where}: {field}")
    raise DataError(f"{where}: {' or '.join(fields)}: missing, expected numbers of each sequence")
