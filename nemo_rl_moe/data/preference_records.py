# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One line of preference data: a prompt with a better and a worse response, and what is wrong when it is not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_moe.data.records import Example, Message, RecordError, kind_of, parse_turns
from nemo_rl_moe.errors import DataError

PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
RESPONSES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceRecord:
    """Two responses to one prompt.

    Attributes:
        sample_id: Where it came from: `file:line`, or `dataset[split]:row`.
        chosen: The prompt with the better response.
        rejected: The prompt with the worse one.
    """

    sample_id: str
    chosen: Example
    rejected: Example


def parse_preference(record: object, sample_id: str) -> PreferenceRecord:
    """Checks one decoded record and gives it the shape that the rest of the package works with.

    `prompt`, `chosen` and `rejected` are each a text or a list of messages. Where both responses repeat the prompt, as
    in data sets that hold whole conversations, it counts once; where there is no `prompt`, it is the messages that both
    conversations begin with. Further keys are ignored.

    Raises:
        RecordError: The record cannot be used.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"the line is {kind_of(record)}, expected an object with prompt, chosen and rejected")
    missing = [name for name in RESPONSES if record.get(name) is None]
    if missing:
        keys = ", ".join(str(key) for key in record) or "none"
        raise RecordError(f"the line has no {' and no '.join(missing)}; its keys: {keys}")
    chosen = parse_turns(record["chosen"], "chosen", "assistant")
    rejected = parse_turns(record["rejected"], "rejected", "assistant")
    prompt = _prompt_of(record, chosen, rejected)
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise RecordError("chosen and rejected are the same: there is nothing to prefer")
    texts = [record.get(name) for name in PREFERENCE_COLUMNS]
    plain = [str(text) for text in texts] if all(isinstance(text, str) for text in texts) else None
    return PreferenceRecord(
        sample_id,
        _example(sample_id, "chosen", prompt, chosen, (plain[0], plain[1]) if plain else None),
        _example(sample_id, "rejected", prompt, rejected, (plain[0], plain[2]) if plain else None),
    )


def preference_columns(path: str, names: Sequence[str]) -> list[str]:
    """Which columns of a table to read.

    Raises:
        DataError: It has no pairs.
    """
    if any(name not in names for name in RESPONSES):
        raise DataError(f"{path}: has no chosen and rejected; its columns: {', '.join(names) or 'none'}")
    return [name for name in PREFERENCE_COLUMNS if name in names]


def _prompt_of(
    record: Mapping[str, object], chosen: Sequence[Message], rejected: Sequence[Message]
) -> Sequence[Message]:
    if record.get("prompt") is not None:
        return parse_turns(record["prompt"], "prompt", "user")
    shared = 0
    # The last turn of each is its response, whatever stands before it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise RecordError("the line has no prompt, and chosen and rejected do not begin with the same messages")
    return list(chosen[:shared])


def _example(
    sample_id: str, name: str, prompt: Sequence[Message], response: Sequence[Message], plain: tuple[str, str] | None
) -> Example:
    if not any(message["role"] == "assistant" for message in response):
        raise RecordError(f"{name} has no assistant turn: there is no response")
    return Example(f"{sample_id} ({name})", (*prompt, *response), len(prompt), plain)
