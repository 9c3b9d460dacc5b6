# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes of responses that several weight versions sampled: does a row come from its token's version or the newest one?

A request that a refit interrupts continues with new weights. Some engines return the routes of each pass (miles#2278),
others the routes of the last prefill over all tokens (verl#6029). Tokens that the newest version of their sequence
sampled show how far the routers of training agree with routes of this version. The agreement of older tokens is
compared with that of their own version and of the newest one.
"""

import numpy as np

from nemo_rl_moe.metrics import with_prefix
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN
from nemo_rl_moe.shapes import Bool, Int

_LEAST_ROWS, _LEAST_DIFFERENCE, _SIGMAS, _SAMPLED = 200, 0.01, 6.0, 512
_OWN, _NEWEST = 0.25, 0.75
PREFIX = "moe/routing/versions/"


class VersionRows:
    """Counts of one step: (version that sampled a token, newest version of its sequence) -> number of usable rows, and
    number of rows whose experts the routers of training would choose too.

    A row has the experts, in one layer, of the token before the sampled token.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], Int[np.ndarray, " 2"]] = {}

    def add(
        self,
        capture: Int[np.ndarray, "tokens layers topk"],
        live: Int[np.ndarray, "tokens layers topk"],
        versions: Int[np.ndarray, " tokens"],
        trained: Bool[np.ndarray, " tokens"],
        lengths: Int[np.ndarray, " sequences"],
    ) -> None:
        """Add some concatenated sequences. The version of a row is the version that sampled the next token."""
        ends = lengths.cumsum()
        starts = ends - lengths
        newest = np.repeat(np.maximum.reduceat(np.where(trained, versions, UNKNOWN), starts), lengths)
        leads = np.concatenate([trained[1:], [False]])
        leads[ends - 1] = False
        places = np.flatnonzero(leads)
        pairs = np.stack([versions[places + 1], newest[places]])
        for own, last in np.unique(pairs, axis=1).T.tolist():
            chosen = places[(pairs[0] == own) & (pairs[1] == last)]
            chosen = chosen[:: len(chosen) // _SAMPLED + 1]
            rows = np.sort(np.stack([capture[chosen], live[chosen]]), -1)
            usable = (rows[..., 0] != UNKNOWN).all(0)
            same = usable & (rows[0] == rows[1]).all(-1)
            found = self._counts.setdefault((own, last), np.zeros(2, dtype=np.int64))
            found += (usable.sum(), same.sum())

    def metrics(self) -> dict[str, float]:
        """Return the agreement of older tokens' routes with training, and two expected values of this agreement.

        One is expected if the weights that sampled the tokens chose the routes, the other if the newest weights did.
        Empty if the expected values do not differ clearly.
        """
        of_version = {own: counts for (own, last), counts in self._counts.items() if own == last}
        total, expected = np.zeros(2), np.zeros(2)
        for (own, last), counts in self._counts.items():
            both = [of_version.get(version, (0, 0)) for version in (own, last)]
            if own == last or min(rows for rows, _ in both) < _LEAST_ROWS:
                continue
            total += counts
            expected += [counts[0] * same / rows for rows, same in both]
        rows = total[0]
        if rows < _LEAST_ROWS:
            return {}
        of_own, of_newest = (expected / rows).tolist()
        # Rows of a token are not independent, so the error is computed for a quarter of the rows.
        error = 2 * (of_newest * (1 - of_newest) / rows + of_own * (1 - of_own) / rows) ** 0.5
        if abs(of_newest - of_own) < max(_LEAST_DIFFERENCE, _SIGMAS * error):
            return {}
        found = {
            "rows": rows,
            "agreement": total[1] / rows,
            "agreement_of_own": of_own,
            "agreement_of_newest": of_newest,
        }
        return with_prefix(PREFIX.removesuffix("/"), {name: float(value) for name, value in found.items()})


def version_note(rows: float, agreement: float, of_own: float, of_newest: float) -> str:
    """Return a line that names the version of the weights to which the routes of older tokens belong."""
    place = (agreement - of_own) / (of_newest - of_own)
    compared = (
        f"routes agree with training in {agreement:.3f} of {rows:,.0f} rows, routes of their own version would in"
    )
    compared += f" {of_own:.3f}, of the newest in {of_newest:.3f}"
    if place <= _OWN:
        held = "each token carries the routes of the version that sampled it"
    elif place >= _NEWEST:
        held = "all tokens carry the routes of the newest version"
    else:
        held = "neither the own version's routes nor the newest one's"
    better = "newest" if of_newest > of_own else "own version's"
    return f"responses of several weight versions: {held}: older tokens' {compared}; the {better} fit training better"
