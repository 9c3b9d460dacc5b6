# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Error lines about unknown keys."""

from collections.abc import Sequence

from nemo_rl_moe.config.renamed_keys import new_key_in_words
from nemo_rl_moe.config.suggestions import did_you_mean, nearest_key, shortened


def unknown_key(name: str, known: Sequence[str]) -> str:
    """Return the error line about an unknown full key.

    The line gives the first of these that exists: the key's new name, the counterpart of a key of NeMo-RL, TRL or verl,
    a similar key, the keys of its section.
    """
    # These modules read tables, which takes time and is only needed for errors.
    from nemo_rl_moe.config.nemo_rl_keys import counterpart_of
    from nemo_rl_moe.config.other_frameworks import counterpart_elsewhere

    if (renamed := new_key_in_words(name)) is not None:
        return f"{shortened(name)}: is now called {renamed}"
    counterpart = counterpart_of(name) or counterpart_elsewhere(name, known)
    return f"{shortened(name)}: unknown key{counterpart or _nearest_or_allowed(name, known)}"


def key_with_dots(written: str, known: Sequence[str]) -> str | None:
    """Return the error line about a known key that a file writes with dots, or None if `written` is no such key."""
    if "." not in written or written not in known:
        return None
    *sections, last = written.split(".")
    nested = "".join(f"{section}: {{" for section in sections) + f"{last}: ...{'}' * len(sections)}"
    return f"{shortened(written)}: a file has no keys with dots; write {shortened(nested)}"


def _nearest_or_allowed(wrong: str, known: Sequence[str]) -> str:
    if (suggestion := nearest_key(wrong, known)) is not None:
        return did_you_mean(suggestion)
    section = wrong.rpartition(".")[0]
    allowed = dict.fromkeys(key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section)
    return f"; allowed here: {', '.join(allowed)}" if allowed else ""
