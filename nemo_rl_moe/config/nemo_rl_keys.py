# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of NeMo-RL's configurations for SFT, DPO and GRPO, each with its counterpart here.

One table, which the translator (`nemo_rl.py`) and the page of migration are made from. Keys are those of NeMo-RL's
repository of 2026-08-22.
"""

from nemo_rl_moe.config.nemo_rl_keys_algorithms import ALGORITHM_ROWS
from nemo_rl_moe.config.nemo_rl_keys_policy import POLICY_ROWS
from nemo_rl_moe.config.nemo_rl_keys_run import RUN_ROWS
from nemo_rl_moe.config.nemo_rl_row import Row

ROWS: tuple[Row, ...] = (*ALGORITHM_ROWS, *POLICY_ROWS, *RUN_ROWS)


def row_of(key: str) -> Row | None:
    """Return the row of a full key, or of the nearest section above it; None where the table has none."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    parts = key.split(".")
    above = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((_BY_KEY[section] for section in above if section in _BY_KEY), _BY_KEY.get(f"{key}.*"))


_BY_KEY = {row.theirs: row for row in reversed(ROWS)}
