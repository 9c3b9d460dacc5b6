# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""slime and miles: debug dumps of rollouts and of training, concatenated without padding.

Layouts of slime 0.3.1 (`slime/observability/rollout_data_utils.py`: `save_debug_rollout_data`; `train_data_utils.py`:
`save_debug_train_data`, format 2) and of miles, August 2026 (`miles/ray/rollout/debug_data.py`,
`miles/utils/train_dump_utils.py`: one file per rank; Parquet: `miles_parquet.py`). Routes have one row less than there
are tokens. Dumps of training have no routes, but `log_probs`. `weight_versions` has the version of each request.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import sequence
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_COLUMNS = {
    "loss_mask": ("loss_mask", "loss_masks"),
    "rollout_experts": ("rollout_routed_experts",),
    "rollout_indexer": ("rollout_indexer_topk",),
    "rollout_logprobs": ("rollout_log_probs",),
    "training_logprobs": ("log_probs",),
    "advantages": ("advantages",),
}


def claims(content: Any) -> bool:
    """Return True for a dump with samples, or with the data of one rank."""
    return isinstance(content, dict) and "rollout_id" in content and bool({"samples", "rollout_data"} & content.keys())


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    samples = content.get("samples")
    if samples is None:
        samples = _samples_of_rank(content["rollout_data"], where)
    for number, sample in enumerate(samples):
        place = f"{where}: sample {number}"
        if not isinstance(sample, dict) or "tokens" not in sample:
            raise DataError(f"{place}: tokens: missing, expected a list of token ids")
        tokens, response = sample["tokens"], _first(sample, ("response_length", "response_lengths"))
        if response is None or not 0 <= int(response) <= len(tokens):
            raise DataError(f"{place}: response_length: got {response}, expected a number up to {len(tokens)}")
        columns = {name: _first(sample, fields) for name, fields in _COLUMNS.items()}
        name = str(
            _first(sample, ("index", "sample_index")) if "index" in sample or "sample_index" in sample else number
        )
        reward = _first(sample, ("reward", "raw_reward", "rewards"))
        prompt = len(tokens) - int(response)
        columns["weight_versions"] = _version(sample.get("weight_versions"), int(response))
        yield sequence(name, place, len(tokens), prompt, reward, token_ids=tokens, **columns)


def _version(versions: Any, response: int) -> list[int] | None:
    """Return the weight version of each token of a response. None if several versions sampled it."""
    try:
        found = {int(version) for version in versions or ()}
    except (TypeError, ValueError):
        return None
    return list(found) * response if len(found) == 1 else None


def _first(sample: Mapping[str, Any], fields: Sequence[str]) -> Any:
    return next((sample[field] for field in fields if sample.get(field) is not None), None)


def _samples_of_rank(data: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a dictionary per sample, from one list per field. Lists of another length are skipped."""
    try:
        count = len(data["tokens"])
    except (KeyError, TypeError):
        raise DataError(f"{where}: rollout_data: tokens: missing, expected token ids of each sample") from None
    columns = {name: values for name, values in data.items() if isinstance(values, list) and len(values) == count}
    return [{name: values[number] for name, values in columns.items()} for number in range(count)]
