# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Suggestions for misspelt keys and values."""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

from nemo_rl_moe.masking import MASK, is_secret, masked_text

# With less similarity, a suggestion confuses more than it helps. A key of another section must be more similar.
SAME_SECTION_CUTOFF = 0.6
ELSEWHERE_CUTOFF = 0.75
LONGEST_WORD = 200
"""Number of characters of the longest word that is compared with others and shown in full. The time of a comparison
grows with the square of the length."""


_NAMES = """
adafactor apo bco cpo dapo dppo dpo drgrpo exo gmpo grpo gspo ipo kto lion maxrl muon nca opo orpo ppo raft reinforce
remax rloo sapo sgd shampoo simpo slic soap sppo vapo
"""
OTHER_ALGORITHMS = frozenset(_NAMES.split())
"""Names of algorithms, losses and optimizers. None of these is a misspelling of another name."""
_WORDS = re.compile(r"[^\W_]+")
_MOST_NEIGHBOURS = 5


def shortened(text: str) -> str:
    """Return a text, shortened to its beginning and its length if it has more than `LONGEST_WORD` characters."""
    return text if len(text) <= LONGEST_WORD else f"{text[:60]}... ({len(text):,} characters)"


def quoted(text: str, place: Sequence[str | int]) -> str:
    """Return a value as messages quote it: shortened, and masked if a part of its key names a secret."""
    hides = any(is_secret(str(part)) for part in place)
    return repr(shortened(MASK if hides else masked_text(text)))


def nearest(wrong: str, allowed: Iterable[str], cutoff: float = SAME_SECTION_CUTOFF) -> str | None:
    """Return the most similar allowed word that the user may have meant, or None.

    A word may be meant if at most a third of its letters differ, or if one of the two has all words of the other.
    """
    if len(wrong) > LONGEST_WORD or wrong.lower() in OTHER_ALGORITHMS:
        return None
    alike = get_close_matches(wrong, list(allowed), n=_MOST_NEIGHBOURS, cutoff=cutoff)
    return next((word for word in alike if _may_mean(wrong.lower(), word.lower())), None)


def _may_mean(wrong: str, word: str) -> bool:
    parts, meant = set(_WORDS.findall(wrong)), set(_WORDS.findall(word))
    return parts <= meant or meant <= parts or edits(wrong, word) <= max(1, min(len(wrong), len(word)) // 3)


def edits(first: str, second: str) -> int:
    """Return the number of edits that turn one word into the other: insert, delete or replace a letter, or swap two
    neighbours."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        before, above, row = row, before, [i]
        for j, other in enumerate(second, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                row[j] = min(row[j], above[j - 2] + 1)
    return row[-1]


def nearest_key(wrong: str, known: Sequence[str]) -> str | None:
    """Return the most similar known full key, or None. Keys of the same section come first."""
    if len(wrong) > LONGEST_WORD:
        return None
    section, _, name = wrong.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    sibling = nearest(name, siblings)
    if sibling is not None:
        return siblings[sibling]
    if siblings:  # the section is right, so keys in it or above it would be similar only because of the section
        known = [key for key in known if key not in siblings.values() and not f"{section}.".startswith(f"{key}.")]

    def likeness(key: str) -> tuple[float, float]:
        return (
            SequenceMatcher(None, name, key.rpartition(".")[2]).ratio(),
            SequenceMatcher(None, wrong, key).ratio(),
        )

    if not known:
        return None
    best = max(known, key=likeness)
    last = best.rpartition(".")[2]
    if siblings and sum(key.rpartition(".")[2] == last for key in known) > 1:
        return nearest(wrong, known, ELSEWHERE_CUTOFF)  # several sections have such a key
    return best if likeness(best)[0] >= ELSEWHERE_CUTOFF else nearest(wrong, known, ELSEWHERE_CUTOFF)


def did_you_mean(suggestion: str | None) -> str:
    """Return the end of an error line with `suggestion`, or an empty text."""
    return f"; did you mean {suggestion}?" if suggestion else ""
