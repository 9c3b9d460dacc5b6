# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""verl's trainer with a TransferQueue: `tq_batch.pt` of `skip.rollout_tq.enable=true`, sequences without padding.

Layout of the main branch of August 2026, 0.10.0.dev, whose default is this trainer (`trainer.use_v1`):
`verl/utils/skip/rollout_skip.py` (`RolloutTqSkip.prepare_data`, a file in `{step}/{part}/`),
`verl/trainer/ppo/v1/agent_loop_tq.py` (fields), `verl/utils/tensordict_utils.py` (`list_of_dict_to_tensordict`: a
nested tensor, or a plain one if all sequences have the same length), `AgentLoopOutput.as_dict` (unrecorded rows of
routes, such as the last token's, are 0).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.inert_pickle import Inert
from nemo_rl_moe.routing.audit.adapters.layout import sequence
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

FILE_NAME = "tq_batch.pt"
COLUMNS = {
    "loss_mask": "response_mask",
    "rollout_experts": "routed_experts",
    "rollout_logprobs": "rollout_log_probs",
    "training_logprobs": "old_log_probs",
    "advantages": "advantages",
}
"""Column of a capture -> its field name in verl, the same with and without a TransferQueue."""


def claims_queue(content: Any) -> bool:
    """Return True for a TransferQueue's batch with its keys."""
    return isinstance(content, dict) and {"tensordict", "keys", "tags"} <= content.keys()


def read_queue(content: Mapping[str, Any], where: str) -> Iterator[CapturedSequence]:
    keys, tags = content["keys"], content["tags"]
    fields = {name: _of_each(values, len(keys)) for name, values in _fields(content["tensordict"], where).items()}
    if fields.get("input_ids") is None or fields.get("responses") is None:
        raise DataError(f"{where}: got the fields {', '.join(fields)}; expected input_ids and responses of each key")
    for number, key in enumerate(keys):
        own = {name: values[number] for name, values in fields.items() if values is not None}
        length, response = len(own["input_ids"]), len(own["responses"])
        scores = own.get("rm_scores")
        yield sequence(
            str(key),
            f"{where}: {key}",
            length,
            length - response,
            None if scores is None else float(scores.sum()),
            token_ids=own["input_ids"],
            weight_versions=_version(tags[number] if number < len(tags) else None, response),
            **{column: own.get(field) for column, field in COLUMNS.items()},
        )


def _fields(made: Any, where: str) -> Mapping[str, Any]:
    state = made.args[1] if isinstance(made, Inert) and len(made.args) > 1 else getattr(made, "state", None)
    found = state.get("_tensordict") if isinstance(state, dict) else None
    if not isinstance(found, dict):
        raise DataError(f"{where}: tensordict: got {type(made).__name__}, expected a TensorDict")
    return found


def _of_each(values: Any, count: int) -> Sequence[torch.Tensor] | None:
    """Return a field's tensors, one per sequence, or None if the field does not have `count` of them."""
    if isinstance(values, torch.Tensor | list) and len(values) == count:
        return list(values)
    return None


def _version(tag: Any, response: int) -> list[int] | None:
    """Return the weight version of each token of a response. None if several versions sampled it."""
    first, last = (tag.get("min_global_steps"), tag.get("max_global_steps")) if isinstance(tag, dict) else (None, None)
    return [first] * response if isinstance(first, int) and first == last else None
