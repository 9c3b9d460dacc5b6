# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Removal of repeated prompts, which are equal to the model and to code and libraries that read a record."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.data.prompt_records import ROW, PromptRecord
from nemo_rl_moe.data.record_values import is_list
from nemo_rl_moe.data.records import BadLine

_DIGEST_BYTES = 16
_ITEMS_OF_LIBRARIES = (ROW, "metadata")
_NUMBERS_OF_ITEMS = ("example_id", "source_index")


class RepeatFilter:
    """Drops repeated prompts. Some published data sets contain a problem a hundred times.

    Two prompts are equal if the model sees the same tokens, code and libraries read the same record, and responses are
    compared with the same answer. If records have a response under `response_key`, it must be the same too.
    """

    def __init__(self, env: EnvironmentConfig, response_key: str | None = None):
        self.num_repeated = 0
        self.first: str | None = None
        """Sample ids of the first dropped prompt, and of the prompt that it repeats."""
        self._env, self._response_key = env, response_key
        self._seen: dict[bytes, str] = {}

    def first_of_each(self, lines: Iterable[PromptRecord | BadLine]) -> Iterator[PromptRecord | BadLine]:
        """Yield the lines in order, without repeated prompts. Bad lines are yielded too."""
        for line in lines:
            if isinstance(line, BadLine) or (equal := self._seen_as(line)) is None:
                yield line
            else:
                self.num_repeated += 1
                self.first = self.first or f"{line.sample_id}, as {equal}"

    def _seen_as(self, prompt: PromptRecord) -> str | None:
        """Return the sample id of an equal prompt, or None if the prompt is new."""
        images = [image.identity() for image in prompt.images]
        shown = (prompt.is_text, prompt.messages, images, prompt.inputs)
        digest = digest_of((shown, what_is_read(prompt, self._env), self._compared_with(prompt)))
        if digest in self._seen:
            return self._seen[digest]
        self._seen[digest] = prompt.sample_id
        return None

    def _compared_with(self, prompt: PromptRecord) -> object:
        given = prompt.record.get(self._response_key) if self._response_key is not None else None
        metadata = prompt.record.get("metadata") if isinstance(self._env.reward, ReasoningGymConfig) else None
        return prompt.record["answer"], metadata, given


def what_is_read(prompt: PromptRecord, env: EnvironmentConfig) -> object:
    """Return a prompt's record if code or a library may read any part of it, else None.

    Item numbers in a library's own data are omitted.
    """
    if not env.reads_whole_records:
        return None
    own = {key: _without_numbers(value) for key, value in prompt.record.items() if key in _ITEMS_OF_LIBRARIES}
    return {**prompt.record, **own}


def _without_numbers(item: object) -> object:
    return {key: item[key] for key in item if key not in _NUMBERS_OF_ITEMS} if isinstance(item, Mapping) else item


def digest_of(value: object) -> bytes:
    """Return a digest of a value. The digest does not depend on the order of keys.

    Digests are kept instead of values, since the values of a million prompts would fill the memory.
    """
    # `repr` escapes lone surrogates, which a JSON file may contain and UTF-8 cannot encode.
    return blake2b(repr(_in_order(value)).encode(), digest_size=_DIGEST_BYTES).digest()


def _in_order(value: object) -> object:
    if isinstance(value, Mapping):
        return {"keys": sorted((repr(key), _in_order(item)) for key, item in value.items())}
    return [_in_order(item) for item in value] if is_list(value) else value
