# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Leaves out prompts that have been there before; published sets may hold each problem a hundred times."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.records import BadLine

_DIGEST_BYTES = 16


class RepeatFilter:
    """Lets each prompt through once, and counts the others.

    Two prompts are the same when the model is asked the same and the response is compared with the same.

    Args:
        env_name: Name of the environment, which decides what a response is compared with.

    Attributes:
        num_repeated: Prompts left out so far.
    """

    def __init__(self, env_name: str):
        self.num_repeated = 0
        self._env_name = env_name
        self._seen: set[bytes] = set()

    def first_of_each(self, lines: Iterable[PromptRecord | BadLine]) -> Iterator[PromptRecord | BadLine]:
        """The lines in order, without repeated prompts; bad lines all pass."""
        for line in lines:
            if isinstance(line, BadLine) or self._is_new(line):
                yield line
            else:
                self.num_repeated += 1

    def _is_new(self, prompt: PromptRecord) -> bool:
        # Digests, because the texts of a million prompts would fill the memory. Lone surrogates, which a JSON file may
        # hold, have no UTF-8; `repr` escapes them.
        content = repr((prompt.is_text, prompt.messages, self._compared_with(prompt)))
        digest = blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def _compared_with(self, prompt: PromptRecord) -> Any:
        if self._env_name == "callable":
            return prompt.record  # the user's function may read any of it
        return prompt.record["answer"], prompt.record.get("metadata") if self._env_name == "reasoning_gym" else None
