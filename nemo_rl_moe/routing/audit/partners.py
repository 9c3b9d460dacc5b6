# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of training, found for those of the rollout by their token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.dump_files import CapturedRoutes, Files
from nemo_rl_moe.runs.folder.captured_sequences import (
    UNKNOWN,
    CapturedSequence,
)

_OF_TRAINING = ("training_experts", "margins", "training_logprobs", "repeated_experts", "repeated_logprobs")


class Partners:
    """Sequences of training files. Each is the *partner* of the rollout's sequence with the same token ids."""

    def __init__(self, files: Files | CapturedRoutes, step: int):
        self._path, self._missing, self._joined = files.path, 0, 0
        steps: Sequence[int] = (step,) if step in files.steps else list(files.steps) if len(files.steps) == 1 else ()
        self._columns: dict[bytes, list[Mapping[str, np.ndarray]]] = {}
        for number in steps:
            for part in files.read(number):
                for sequence in part:
                    if "token_ids" in sequence.columns:
                        self._columns.setdefault(token_key(sequence.columns), []).append(_as_training(sequence))

    def joined(self, sequence: CapturedSequence) -> CapturedSequence:
        """Return the sequence with the columns of its partner, the training sequence with the same token ids.

        If several training sequences have these ids, each is the partner of one sequence.
        """
        if "token_ids" not in sequence.columns:
            raise DataError(f"--training {self._path}: sequence {sequence.name} has no token ids to find it by")
        found = self._columns.get(token_key(sequence.columns))
        if not found:
            self._missing += 1
            routes = sequence.columns.get("rollout_experts")
            if routes is None:
                return sequence
            # If one sequence lacked this column, it would count as missing in all other sequences too.
            unknown = np.full((sequence.num_tokens, *routes.shape[1:]), UNKNOWN, dtype=np.int16)
            return replace(sequence, columns={**sequence.columns, "training_experts": unknown})
        self._joined += 1
        return replace(sequence, columns={**sequence.columns, **(found.pop(0) if len(found) > 1 else found[0])})

    def reported(self, step: int) -> str:
        """Return a notice about sequences that the training files lack, or an empty text."""
        if self._missing and not self._joined:
            raise DataError(f"--training {self._path}: has the token ids of no sequence of step {step}")
        total = self._joined + self._missing
        return f"step {step}: --training has {self._joined} of {total} sequences" if self._missing else ""


def token_key(columns: Mapping[str, np.ndarray]) -> bytes:
    """Return a key that is equal for sequences with the same token ids."""
    return np.asarray(columns["token_ids"], dtype=np.int64).tobytes()


def _as_training(sequence: CapturedSequence) -> Mapping[str, np.ndarray]:
    """Return the columns of training. If a format (such as verl's) has only one column of routes, it is training's."""
    found = {name: sequence.columns[name] for name in _OF_TRAINING if name in sequence.columns}
    if "training_experts" not in found and "rollout_experts" in sequence.columns:
        found["training_experts"] = sequence.columns["rollout_experts"]
    if "advantages" in sequence.columns:
        found["advantages"] = sequence.columns["advantages"]
    return found
