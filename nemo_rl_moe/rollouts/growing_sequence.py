# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The token sequences of a trajectory while they grow."""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl_moe.data.continuation import Extension
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import CAPTURED, GeneratedSequence
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence


class GrowingSequence:
    """One sequence while it grows, from first tokens that are not trained on.

    Attributes:
        token_ids: All tokens so far.
        num_first: Number of tokens with which the sequence began.
        captured: Attribute of a sequence (`CAPTURED`) -> what the model chose for the tokens for which the engine has
            run a forward pass. The engine may report nothing.
    """

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.captured: dict[str, StoredRows] = {}
        self._kept_tokens: StoredRows | None = None
        self.num_first = len(token_ids)
        self.add_given(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def has_sampled(self) -> bool:
        """Whether the model has sampled a token of the sequence."""
        return any(version != NOT_SAMPLED for version in self._versions)

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not sample. They are not trained on."""
        self.token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [NOT_SAMPLED] * len(token_ids)

    def add_sampled(self, found: GeneratedSequence) -> None:
        """Add a response of the model. It is trained on."""
        self.token_ids += found.token_ids.tolist()
        self._logprobs += found.logprobs.tolist()
        self._versions += np.broadcast_to(np.asarray(found.weight_version), len(found.token_ids)).tolist()
        for name in CAPTURED:
            if (of_pass := getattr(found, name)) is not None:
                # No pass has seen the last token. An engine may still report a meaningless row for it.
                rows = of_pass.before(len(self) - 1)
                # Earlier tokens keep the choices with which they were sampled.
                self.captured[name] = self.captured[name].followed_by(rows) if name in self.captured else rows
        if found.kept_tokens is not None:
            before = self._kept_tokens
            self._kept_tokens = found.kept_tokens if before is None else before.followed_by(found.kept_tokens)

    def remove_given(self, size: int) -> None:
        """Remove the last tokens, which `add_given` has added."""
        for values in (self.token_ids, self._logprobs, self._versions):
            del values[len(values) - size :]

    def finished(self, model_inputs: Mapping[str, ModelInput]) -> TokenSequence:
        """Return the sequence as it is now, with further inputs of the model. Sampled tokens are trained on."""
        versions = np.array(self._versions, dtype=np.int64)
        return TokenSequence(
            token_ids=np.array(self.token_ids, dtype=np.int64),
            loss_mask=versions != NOT_SAMPLED,
            logprobs=np.array(self._logprobs, dtype=np.float32),
            weight_versions=versions,
            model_inputs=dict(model_inputs),
            kept_tokens=self._kept_tokens,
            **self.captured,
        )


class GrowingSequences:
    """The sequences of a trajectory. Usually the last one grows. Requests of an agent may continue any of them."""

    def __init__(self, token_ids: Sequence[int]):
        self._sequences = [GrowingSequence(token_ids)]

    @property
    def last(self) -> GrowingSequence:
        """The sequence that grows."""
        return self._sequences[-1]

    def begin(self, token_ids: Sequence[int]) -> GrowingSequence:
        """Begin another sequence with tokens that are not trained on, and return it."""
        self._sequences.append(GrowingSequence(token_ids))
        return self.last

    def size_before(self, extension: Extension, replaced: Extension | None) -> int:
        """Return how many tokens the sequence will have before an extension, the tokens of new messages.

        Args:
            replaced: Earlier extension after the same turn, which the new one replaces. None if there is none.
        """
        if extension.begins_anew:
            return 0
        if replaced is None:
            return len(self.last)
        return len(self._sequences[-2]) if replaced.begins_anew else len(self.last) - len(replaced.token_ids)

    def extend(self, extension: Extension, replaced: Extension | None) -> None:
        """Add an extension (the tokens of new messages) to the last sequence, or begin another sequence with it.

        Args:
            replaced: Earlier extension after the same turn, which the new one replaces. None if there is none.
        """
        if replaced is not None and replaced.begins_anew:
            self._sequences.pop()
        elif replaced is not None:
            self.last.remove_given(len(replaced.token_ids))
        if extension.begins_anew:
            self.begin(extension.token_ids)
        else:
            self.last.add_given(extension.token_ids)

    @property
    def kept(self) -> list[GrowingSequence]:
        """Sequences with sampled tokens, or the first one if there are none."""
        return [each for each in self._sequences if each.has_sampled] or self._sequences[:1]

    def finished(self, model_inputs: Mapping[str, ModelInput]) -> tuple[TokenSequence, ...]:
        """Return the sequences in `kept` as they are now, with further inputs of the model."""
        return tuple(sequence.finished(model_inputs) for sequence in self.kept)
