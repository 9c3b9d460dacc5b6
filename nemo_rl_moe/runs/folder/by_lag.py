# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`by_lag.parquet`: statistics of a step's tokens by their lag, the age in steps of the weights that sampled them.

Its columns are `step`, `lag` (the lowest lag of the class) and `LAG_STATISTICS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter
from nemo_rl_moe.shapes import Float
from nemo_rl_moe.token_lag import LOWEST_LAGS

LAG_STATISTICS = (
    "num_valid_tokens",
    "sampling_logp_difference",
    "gen_kl_error",
    "kl_staleness",
    "clip_fraction",
    "effective_samples",
    "live_agreement",
)
FOLDER_NAME = "by_lag.parquet"
TABLE = StepTable(FOLDER_NAME, ("step", "lag"), dict.fromkeys(LAG_STATISTICS, pa.float64()), is_signed=True)


@dataclass(frozen=True)
class LagTable:
    """Statistics of a step's trained tokens by their lag.

    Lag is the number of optimizer steps between the weights that sampled a token and the weights that train on it.

    Attributes:
        of: Name in `LAG_STATISTICS` -> value for each class of lags. NaN if unknown or without tokens.
    """

    of: Mapping[str, Float[np.ndarray, " classes"]]


class LagWriter(StepTableWriter[LagTable]):
    table = TABLE

    def write(self, step: int, artifact: LagTable) -> None:
        self.add(step, (LOWEST_LAGS,), {name: artifact.of[name] for name in LAG_STATISTICS})
