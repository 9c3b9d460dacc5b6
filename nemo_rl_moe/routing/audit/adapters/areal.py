# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""AReaL: `trajectory_debug.dump_rollout_data=true`, a list of batches saved with `torch.save`, padded on the right.

Layout of the main branch of September 2026: `areal/trainer/rl_trainer.py` (`_save_trajectory`: `step_000012.pt`, in
SPMD mode one file per rank), `areal/workflow/rlvr.py` (fields; log-probabilities are 0 and versions -1 on prompts),
`areal/engine/r3/preprocess.py`: a missing row, such as the last token's, repeats the previous one. `r3_routing_valid`
is false for a sequence that misses more rows than the last one. Such a sequence has no routes here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import array, padded_column, padded_sequences, real_tokens
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedSequence

_COLUMNS = {
    "loss_mask": "loss_mask",
    "rollout_logprobs": "logprobs",
    "weight_versions": "versions",
}
_NEEDED = {"input_ids", "attention_mask", "loss_mask", "logprobs", "versions"}


def claims(content: Any) -> bool:
    """Return True if the content of a file is a batch of AReaL, or a list of batches."""
    batches = content if isinstance(content, list) else [content]
    return bool(batches) and isinstance(batches[0], dict) and batches[0].keys() >= _NEEDED


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    for number, batch in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}: trajectory {number}"
        if not isinstance(batch, dict):
            raise DataError(f"{place}: got {type(batch).__name__}, expected a dictionary of tensors")
        yield from _batch(batch, place, number)


def _batch(batch: Mapping[str, Any], where: str, number: int) -> Iterator[CapturedSequence]:
    real = real_tokens(batch.get("attention_mask", ()), f"{where}: attention_mask")
    shape = (real.shape[0], real.shape[1])
    columns = {name: padded_column(batch, field, shape, where) for name, field in _COLUMNS.items()}
    columns["token_ids"] = padded_column(batch, "input_ids", shape, where)
    experts = padded_column(batch, "routed_experts", shape, where)
    if experts is not None:
        experts = experts.astype(np.int32)
        experts[np.arange(len(real)), real.shape[1] - 1 - real[:, ::-1].argmax(1)] = UNKNOWN
        if batch.get("r3_routing_valid") is not None:
            experts[~array(batch["r3_routing_valid"], f"{where}: r3_routing_valid").astype(bool).reshape(-1)] = UNKNOWN
        columns["rollout_experts"] = experts
    rewards = array(batch["rewards"], f"{where}: rewards").reshape(-1) if batch.get("rewards") is not None else None
    per_token = None if rewards is None or len(rewards) != len(real) else _at_first(rewards, real)
    yield from padded_sequences(where, real, columns, per_token, [str(number)] * len(real))


def _at_first(rewards: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return rewards per token: a sequence's reward at its first token, and 0 at its other tokens."""
    found = np.zeros(real.shape)
    found[np.arange(len(real)), real.argmax(1)] = rewards
    return found
