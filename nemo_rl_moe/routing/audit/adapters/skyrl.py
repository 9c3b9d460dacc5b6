# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""SkyRL: `dump_data_batch=true`, a pickled `TrainingInputBatch`, padded on the left.

Layout of the main branch of August 2026, after 0.4: `skyrl/train/trainer.py` (`dump_data`),
`skyrl/backends/skyrl_train/training_batch.py` (`TensorBatch`, a dictionary of bytes by name),
`skyrl/train/dataset/preprocess.py` (columns of responses are at the right). `router_padding_mask` marks the tokens
without routes, whose rows hold the first experts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.inert_pickle import Inert, read_pickle
from nemo_rl_moe.routing.audit.adapters.layout import array, padded_column, padded_sequences, real_tokens
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedSequence

_COLUMNS = {
    "loss_mask": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "training_logprobs": "action_log_probs",
    "advantages": "advantages",
}


def _state(content: Any) -> Any:
    """Return the state of a pickled batch, or None. Newer releases pickle the state as an argument of a function."""
    if not isinstance(content, Inert) or not content.path.startswith(("skyrl.", "skyrl_train.")):
        return None
    state = content.args[1] if content.state is None and len(content.args) > 1 else content.state
    return state if isinstance(state, dict) and "batch_dict" in state else None


def claims(content: Any) -> bool:
    """Return True if the content of a file is a batch of SkyRL, or a dictionary of its tensors."""
    return _state(content) is not None or (
        isinstance(content, dict) and {"sequences", "attention_mask"} <= content.keys()
    )


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    state = _state(content)
    batch = content if state is None else {name: _tensor(name, v, where) for name, v in state["batch_dict"].items()}
    real = real_tokens(batch.get("attention_mask", ()), f"{where}: attention_mask")
    tokens = padded_column(batch, "sequences", real.shape, where)
    if tokens is None:
        raise DataError(f"{where}: sequences: missing, expected token ids [sequences, tokens]")
    columns = {name: padded_column(batch, field, real.shape, where) for name, field in _COLUMNS.items()}
    experts = padded_column(batch, "rollout_expert_indices", real.shape, where)
    unrouted = padded_column(batch, "router_padding_mask", real.shape, where)
    if experts is not None and unrouted is not None:
        experts = np.where(unrouted.astype(bool)[..., None, None], UNKNOWN, experts.astype(np.int32))
    columns["rollout_experts"] = experts
    rewards = padded_column(batch, "rewards", real.shape, where)
    yield from padded_sequences(where, real, {"token_ids": tokens} | columns, rewards)


def _tensor(name: str, packed: Any, where: str) -> np.ndarray | None:
    """Return a tensor from its bytes, or None for something else, such as a list of tensors of images."""
    if not isinstance(packed, Mapping) or "data" not in packed:
        return None
    try:
        if packed.get("format") == "torch":
            return array(read_pickle(packed["data"], where), f"{where}: {name}")
        return np.frombuffer(packed["data"], dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: {name}: cannot be read as a tensor: {error}") from error
