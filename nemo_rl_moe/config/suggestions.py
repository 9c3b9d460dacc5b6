# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Suggestions for misspelt keys and values."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

from nemo_rl_moe.masking import MASK, is_secret, masked_text

# Below these, a suggestion confuses more than it helps. A key elsewhere must be nearer than one in the same section.
SAME_SECTION_CUTOFF = 0.6
ELSEWHERE_CUTOFF = 0.75
LONGEST_WORD = 200
"""Longest word that is compared with others, and shown whole: the time of a comparison grows with the square."""


def shortened(text: str) -> str:
    """Shorten a text for a message to its beginning and its length, if it is longer than `LONGEST_WORD`."""
    return text if len(text) <= LONGEST_WORD else f"{text[:60]}... ({len(text):,} characters)"


def quoted(text: str, place: Sequence[str | int]) -> str:
    """Return a value as a message quotes it: shortened, and masked where a part of its place names a secret."""
    hides = any(is_secret(str(part)) for part in place)
    return repr(shortened(MASK if hides else masked_text(text)))


def nearest(wrong: str, allowed: Iterable[str], cutoff: float = SAME_SECTION_CUTOFF) -> str | None:
    """Return the allowed word most like `wrong`, or None when none is similar."""
    if len(wrong) > LONGEST_WORD:
        return None
    matches = get_close_matches(wrong, list(allowed), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_key(wrong: str, known: Sequence[str]) -> str | None:
    """Return the nearest known full key: in the same section, otherwise anywhere."""
    if len(wrong) > LONGEST_WORD:
        return None
    section, _, name = wrong.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    sibling = nearest(name, siblings)
    if sibling is not None:
        return siblings[sibling]
    if siblings:  # the section is right: what lies in it, or above it, is alike by its section alone
        known = [key for key in known if key not in siblings.values() and not f"{section}.".startswith(f"{key}.")]

    def likeness(key: str) -> tuple[float, float]:
        return (
            SequenceMatcher(None, name, key.rpartition(".")[2]).ratio(),
            SequenceMatcher(None, wrong, key).ratio(),
        )

    if not known:
        return None
    best = max(known, key=likeness)
    return best if likeness(best)[0] >= ELSEWHERE_CUTOFF else nearest(wrong, known, ELSEWHERE_CUTOFF)


def did_you_mean(suggestion: str | None) -> str:
    """Return the ending of an error line with `suggestion`; empty without one."""
    return f"; did you mean {suggestion}?" if suggestion else ""
