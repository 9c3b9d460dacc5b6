# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that should be bitwise equal, and if not, the layer in which routes of a token differ first."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from nemo_rl_moe.errors import counted
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedRows

_MOST_LAYERS = 4


class ExactCounts:
    """Counts of unequal log-probabilities in one step in which rollout and training have the same weights.

    Attributes:
        tokens: Number of trained tokens, and number of tokens with unequal log-probabilities.
        sequences: Number of all sequences, and number of sequences with an unequal token.
        parted: Layer -> number of sequences whose routes first differ in this layer, before their first unequal token.
            The key None counts sequences with equal routes: attention, a dense layer or the output layer differs.
    """

    def __init__(self, layers: Sequence[int]):
        self._layers = layers
        self.tokens, self.sequences = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
        self.parted: Counter[int | None] = Counter()

    def add(self, rows: CapturedRows, trained: np.ndarray) -> None:
        """Count some sequences. `trained` is the mask of trained tokens, `[tokens]`. Other tokens do not count."""
        names = ("rollout_logprobs", "training_logprobs")
        if not all(name in rows.columns for name in names):
            return
        rollout, training = (rows.columns[name] for name in names)
        unequal = trained & (rollout != training)
        ends = rows.lengths.cumsum()
        self.tokens += (trained.sum(), unequal.sum())
        for first, end in zip((ends - rows.lengths).tolist(), ends.tolist(), strict=True):
            places = np.flatnonzero(unequal[first:end])
            self.sequences += (1, len(places) > 0)
            if len(places):
                self.parted[self._first_layer(rows, first, first + int(places[0]))] += 1

    def _first_layer(self, rows: CapturedRows, first: int, token: int) -> int | None:
        """Return the layer of the first different routes in the tokens from `first` up to `token`, or None."""
        names = ("rollout_experts", "training_experts")
        if not all(name in rows.columns for name in names):
            return None
        rollout, training = (np.sort(rows.columns[name][first:token], -1) for name in names)
        known = (rollout[..., 0] != UNKNOWN) & (training[..., 0] != UNKNOWN)
        differs = np.argwhere(known & (rollout != training).any(-1))
        return int(self._layers[differs[0][1]]) if len(differs) else None

    def metrics(self) -> dict[str, float]:
        """Return the number `unequal_logprobs` and its share, if there are tokens to compare."""
        total, unequal = self.tokens.tolist()
        if not total:
            return {}
        return {"unequal_logprobs": float(unequal), "unequal_logprobs_share": unequal / total}

    def anomalies(self) -> list[RoutingAnomaly]:
        """Report unequal log-probabilities."""
        (total, unequal), (sequences, with_unequal) = self.tokens.tolist(), self.sequences.tolist()
        if not unequal:
            return []
        places = [
            "the routes before are equal (attention, a dense layer or the output layer differs)"
            if layer is None
            else f"routes first differ in layer {layer}"
            for layer, _ in self.parted.most_common(_MOST_LAYERS)
        ]
        numbers = [number for _, number in self.parted.most_common(_MOST_LAYERS)]
        where = ", ".join(f"in {number} {place}" for number, place in zip(numbers, places, strict=True))
        text = (
            f"{unequal:,} of {total:,} log-probs of rollout and training are not equal, in"
            f" {with_unequal} of {counted(sequences, 'sequence')}: {where}"
        )
        return [RoutingAnomaly("exact", text)]
