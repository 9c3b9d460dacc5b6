# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes of the same tokens at different steps: how far the weights of engine and trainer have moved.

Routes of a token depend only on the weights and on the tokens up to it. Sequences of different steps share prefixes (a
chat template, a repeated prompt). So the routes of these prefixes, by the engine and by the trainer, can be compared
with the routes of an earlier step. An engine that gets no weights repeats its routes while the trainer's routes change.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.metrics import with_prefix
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedRows
from nemo_rl_moe.shapes import Bool, Int

_MOST_TOKENS, _MOST_KEYS, _MOST_FRESH = 64, 4096, 8192
_LEAST_MOVED, _LEAST_RATIO = 30, 4
"""Least number of rows that training must have changed, and its least ratio to rows in which both sides differed."""


@dataclass(frozen=True)
class PrefixRows:
    """Routes of the prefixes of one step's sequences. A row has the experts of one prefix's last token in all layers.

    Attributes:
        places: Token ids of a prefix -> index of its row in `rows`.
        rows: Routes by the rollout and by training, with experts in ascending order.
        versions: Version of the rollout's weights, -1 if unknown.
        fresh: Number of response tokens x layers with routes of both rollout and training, and how many of these
            differ.
    """

    places: Mapping[bytes, int]
    rows: Int[np.ndarray, "2 tokens layers topk"]
    versions: Int[np.ndarray, " tokens"]
    fresh: tuple[int, int]


class PrefixCollector:
    """Collects the routes of the prefixes of one step's sequences. A repeated prefix is collected once."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._rows: list[np.ndarray] = []
        self._versions: list[int] = []
        self._fresh = np.zeros(2, dtype=np.int64)

    def add(self, rows: CapturedRows) -> None:
        """Add some sequences. Does nothing if they lack token ids, or the routes of the rollout or of training."""
        named = ("token_ids", "rollout_experts", "training_experts")
        if not all(name in rows.columns for name in named):
            return
        ids = rows.columns["token_ids"].astype(np.int32)
        rollout, training = (rows.columns[name] for name in named[1:])
        versions, trained = rows.columns.get("weight_versions"), rows.columns.get("loss_mask")
        ends = rows.lengths.cumsum()
        for first, end in zip((ends - rows.lengths).tolist(), ends.tolist(), strict=True):
            length = end - first
            prompt = length if trained is None else int(trained[first:end].argmax())
            begins = slice(first, first + min(prompt, _MOST_TOKENS))
            version = -1 if versions is None or prompt == length else int(versions[first + prompt])
            if self._fresh[0] < _MOST_FRESH * rollout.shape[1]:
                response = slice(first + prompt, min(first + prompt + _MOST_TOKENS, end - 1))
                both, usable = _sorted(rollout[response], training[response])
                differs = (both[0] != both[1]).any(-1)[usable]
                self._fresh += (differs.size, differs.sum())
            if len(self._places) < _MOST_KEYS:
                both, usable = _sorted(rollout[begins], training[begins])
                for place in np.flatnonzero(usable.all(-1)).tolist():
                    key = ids[first : first + place + 1].tobytes()
                    if key not in self._places:
                        self._places[key] = len(self._rows)
                        self._rows.append(both[:, place])
                        self._versions.append(version)

    def finished(self) -> PrefixRows | None:
        if not self._rows:
            return None
        number, differing = self._fresh.tolist()
        return PrefixRows(self._places, np.stack(self._rows, 1), np.array(self._versions), (number, differing))


def _sorted(
    rollout: Int[np.ndarray, "tokens layers topk"], training: Int[np.ndarray, "tokens layers topk"]
) -> tuple[Int[np.ndarray, "2 tokens layers topk"], Bool[np.ndarray, "tokens layers"]]:
    """Return both routes with experts in ascending order, and a mask of the rows that both contain."""
    both = np.sort(np.stack([rollout, training]), -1)
    return both, (both[..., 0] != UNKNOWN).all(0)


class PrefixHistory:
    """Prefixes of earlier steps: of all recent steps, and of some older steps."""

    def __init__(self) -> None:
        self._earlier: list[tuple[int, PrefixRows]] = []

    def compared(self, step: int, now: PrefixRows | None) -> dict[str, float]:
        """Add the next step, and return the shares of rows whose routes have changed since an earlier step.

        The shares are computed for the engine and for training. The earlier step is the latest one since which training
        has changed at least 30 rows, and at least four times as many rows as differed between engine and training at
        that step. Empty without such a step.
        """
        if now is None:
            return {}
        found: dict[str, float] = {}
        for since, before in reversed(self._earlier):
            found = _moved(since, before, now)
            if found:
                break
        self._earlier.append((step, now))
        self._thin_out()
        return with_prefix("moe/engine", found)

    def _thin_out(self) -> None:
        """Keep the first step, the last 8 steps and, of older steps, two for each doubling of their age."""
        kept, of_power = [], dict[int, int]()
        for age, pair in enumerate(reversed(self._earlier)):
            power = (age + 1).bit_length()
            of_power[power] = of_power.get(power, 0) + 1
            if age < 8 or of_power[power] <= 2 or pair is self._earlier[0]:
                kept.append(pair)
        self._earlier = kept[::-1]


def _moved(since: int, before: PrefixRows, now: PrefixRows) -> dict[str, float]:
    pairs = [(place, now.places[key]) for key, place in before.places.items() if key in now.places]
    if not pairs:
        return {}
    then_at, now_at = np.array(pairs).T
    # Rows of one version of the weights are equal, so they are not compared.
    moves = (before.versions[then_at] == UNKNOWN) | (before.versions[then_at] != now.versions[now_at])
    then, new = before.rows[:, then_at[moves]], now.rows[:, now_at[moves]]
    engine, trainer = (then != new).any(-1)
    differed, differs = ((of[0] != of[1]).any(-1) for of in (then, new))
    moved = int(trainer.sum())
    if moved < _LEAST_MOVED or moved < _LEAST_RATIO * int(differed.sum()):
        return {}
    number, differing = now.fresh
    fresh = {"fresh_differing_share": differing / number} if number else {}
    return fresh | {
        "since_step": float(since),
        "prefix_rows": float(trainer.size),
        "trainer_moved_share": moved / trainer.size,
        "engine_moved_share": float(engine.mean()),
        "prefix_differing_share": float(differs.mean()),
    }
