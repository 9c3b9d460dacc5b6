# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of frameworks' data to sequences of a capture: padding, joins of prompt and response, rows of routes.

Frameworks store values per token for the full sequence or only for its response. The number of values shows which.
Unknown values are never filled in: log-probabilities of a prompt are NaN, missing routes -1. Rows that a framework has
filled with zeros stay zeros, since they cannot be distinguished from routes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.inert_pickle import PickledArray
from nemo_rl_moe.runs.folder.captured_sequences import EXPERTS, INDEXERS, UNKNOWN, CapturedSequence
from nemo_rl_moe.shapes import Bool, Float, Int, Shaped

_MOST_TOKENS = 2**24
_MOST_LAYERS = _MOST_CHOICES = 1024
_MOST_NUMBERS = 2**28
"""Largest number of values in a sequence's routes. A million tokens with 30 layers and 8 experts each fit."""
_MOST_DIMENSIONS = 64  # numpy's
_MOST_SHARED = 2**25
"""Largest number of values in nested lists that contain the same list object several times."""
_FLOATS = ("rollout_logprobs", "training_logprobs", "advantages")


def array(value: Any, where: str) -> Shaped[np.ndarray, "..."]:
    if isinstance(value, PickledArray):
        value = value.values
    if isinstance(value, list | tuple) and _num_numbers(value, {}) > _MOST_SHARED and _shares_parts(value):
        raise DataError(f"{where}: got lists that repeat the same list, with more than {_MOST_SHARED:,} numbers in all")
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
    try:
        found = np.asarray(value)
    except (ValueError, TypeError):
        found = np.empty(0, dtype=object)
    if found.dtype.kind not in "biuf":
        raise DataError(f"{where}: got {type(value).__name__} of {found.dtype}, expected numbers in rows of one length")
    return found


def _num_numbers(value: list[Any] | tuple[Any, ...], known: dict[int, int], depth: int = 0) -> int:
    """Return the number of values in nested lists. If a list object occurs repeatedly, its values count each time."""
    if not value or not isinstance(value[0], list | tuple) or depth > _MOST_DIMENSIONS:
        return len(value)
    if id(value) not in known:
        known[id(value)] = 0  # for a list that contains itself
        known[id(value)] = sum(
            _num_numbers(part, known, depth + 1) if isinstance(part, list | tuple) else 1 for part in value
        )
    return known[id(value)]


def _shares_parts(value: list[Any] | tuple[Any, ...]) -> bool:
    seen, left = set[int](), [value]
    while left:
        for part in left.pop():
            if isinstance(part, list | tuple):
                if id(part) in seen:
                    return True
                seen.add(id(part))
                left.append(part)
    return False


def expert_rows(value: Any, length: int, where: str, *, first: int = 0) -> Int[np.ndarray, "tokens layers topk"]:
    """Return the routes of a sequence, one row per token, filled with -1 for missing rows.

    Args:
        value: Up to `length` rows, `[rows, layers, topk]`. The last token may have no row, since no engine is fed it.
        first: Index of the token of the first row.

    Raises:
        DataError: The shape or the numbers do not fit routes.
    """
    rows = array(value, where)
    if (
        rows.ndim != 3
        or not 0 < rows.shape[1] <= _MOST_LAYERS
        or not 0 < rows.shape[2] <= _MOST_CHOICES
        or rows.dtype.kind == "f"
    ):
        raise DataError(f"{where}: got {rows.dtype} {list(rows.shape)}, expected integers [tokens, layers, topk]")
    if not 0 <= first <= first + len(rows) <= length <= _MOST_TOKENS:
        raise DataError(f"{where}: got {len(rows)} rows from token {first} on, expected at most {length} tokens")
    if length * rows.shape[1] * rows.shape[2] > max(_MOST_NUMBERS, 4 * rows.size):
        raise DataError(
            f"{where}: routes {list(rows.shape)} for a sequence of {length} tokens would fill"
            f" {length * rows.shape[1] * rows.shape[2]:,} numbers, expected at most"
            f" {max(_MOST_NUMBERS, 4 * rows.size):,}"
        )
    if len(rows) and (rows.max() > np.iinfo(np.int16).max or rows.min() < UNKNOWN):
        wrong = rows.min() if rows.min() < UNKNOWN else rows.max()
        most = np.iinfo(np.int16).max
        raise DataError(f"{where}: got the expert {wrong}, expected 0 to {most}, or {UNKNOWN} for none")
    found = np.full((length, *rows.shape[1:]), UNKNOWN, dtype=np.int16)
    found[first : first + len(rows)] = rows
    return found


def sequence(
    name: str, where: str, length: int, prompt_length: int | None, reward: Any = None, **columns: Any
) -> CapturedSequence:
    """Return a sequence of a capture.

    Args:
        prompt_length: Number of tokens before the response. None: every column covers the full sequence.
        columns: Name -> values for the full sequence or for the response. A column that is None is skipped.

    Raises:
        DataError: A column has another length, or the sequence has no token or far too many.
    """
    if not 0 < length <= _MOST_TOKENS or not 0 <= (prompt_length or 0) <= length:
        raise DataError(
            f"{where}: got {prompt_length} prompt tokens and {length} in all, expected 1 to {_MOST_TOKENS} in all"
        )
    found: dict[str, np.ndarray] = {}
    for column, value in columns.items():
        if value is None:
            continue
        place = f"{where}: {column}"
        if column in EXPERTS:
            found[column] = expert_rows(value, length, place)
            continue
        if column in INDEXERS:
            found[column] = _positions(value, length, place)
            continue
        values = array(value, place)
        rows = [length] if prompt_length is None else [length, length - prompt_length]
        if len(values) not in rows:
            raise DataError(f"{place}: got {len(values)} values, expected {' or '.join(map(str, rows))}")
        if len(values) < length:
            values = _after_prompt(values, length, column)
        found[column] = values.astype(np.float32) if column in _FLOATS else values
    if "loss_mask" in found:
        found["loss_mask"] = found["loss_mask"].astype(bool)
    elif prompt_length:
        found["loss_mask"] = np.arange(length) >= prompt_length
    if isinstance(reward, torch.Tensor | np.generic) and np.ndim(reward) == 0:
        reward = reward.item()
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    return CapturedSequence(name, length, found, float(reward) if is_number else None)


def _positions(value: Any, length: int, where: str) -> Int[np.ndarray, "tokens layers k"]:
    """Return the positions that a sparse attention's indexer chose for each token. Tokens without a row have -1."""
    rows = array(value, where)
    if rows.ndim != 3 or rows.dtype.kind == "f" or not length - 1 <= len(rows) <= length:
        raise DataError(f"{where}: got {rows.dtype} {list(rows.shape)}, expected integers [{length - 1}, layers, k]")
    found = np.full((length, *rows.shape[1:]), UNKNOWN, dtype=np.int32)
    found[: len(rows)] = rows
    return found


def _after_prompt(
    values: Shaped[np.ndarray, "response ..."], length: int, column: str
) -> Shaped[np.ndarray, "tokens ..."]:
    unknown = np.nan if column in _FLOATS else 0
    whole = np.full((length, *values.shape[1:]), unknown, dtype=np.float32 if column in _FLOATS else values.dtype)
    whole[length - len(values) :] = values
    return whole


def real_tokens(mask: Any, where: str) -> Bool[np.ndarray, "sequences tokens"]:
    found: np.ndarray = array(mask, where).astype(bool)
    starts = found & ~np.pad(found, ((0, 0), (1, 0)))[:, :-1] if found.ndim == 2 else found
    if found.ndim != 2 or (starts.sum(1) != 1).any():
        raise DataError(f"{where}: got {list(found.shape)}, expected [sequences, tokens], one run of ones per row")
    return found


def padded_column(
    batch: Mapping[str, Any], field: str, shape: tuple[int, int], where: str
) -> Shaped[np.ndarray, "sequences tokens ..."] | None:
    value = batch.get(field)
    if value is None:
        return None
    values = array(value, f"{where}: {field}")
    if values.ndim < 2 or values.shape[0] != shape[0] or values.shape[1] > shape[1]:
        raise DataError(
            f"{where}: {field}: got {list(values.shape)}, expected {shape[0]} rows of at most {shape[1]} tokens"
        )
    missing = shape[1] - values.shape[1]
    if not missing:
        return values
    known = field.endswith("mask") or values.dtype.kind != "f"
    before = np.full((shape[0], missing, *values.shape[2:]), 0 if known else np.nan, dtype=values.dtype)
    return np.concatenate([before, values], axis=1)


def padded_sequences(
    where: str,
    real: Bool[np.ndarray, "sequences tokens"],
    columns: Mapping[str, Shaped[np.ndarray, "sequences tokens ..."] | None],
    rewards: Float[np.ndarray, "sequences tokens"] | None = None,
    prompts: Sequence[str] | None = None,
) -> Iterator[CapturedSequence]:
    """Yield the sequences of a batch without its padding.

    Args:
        rewards: Reward of each token, to be added up per sequence. NaN means unknown and is skipped.
        prompts: Name of each sequence's prompt.
    """
    for number, mask in enumerate(real):
        own = {name: values[number][mask] for name, values in columns.items() if values is not None}
        reward = None if rewards is None else float(np.nansum(rewards[number][mask]))
        name = str(number) if prompts is None else f"{prompts[number]}-{number}"
        yield sequence(name, f"{where}: sequence {number}", int(mask.sum()), None, reward, **own)
