# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`routing.parquet` and `routing_anomalies.jsonl`: statistics and anomalies of the captured routes at every step.

The table has a row per step and layer. In the following, a row is the captured experts of a token in a layer. A row is
usable if all its experts exist and differ. The columns are:

- `expected` to `live_slots`: number of rows of the capture of each kind (`routing/agreement/row_kinds.py`)
- `slots`: number of experts in usable rows, and `slot_chance`: share of these on which capture and router would agree
  if only the popularity of experts decided
- `margin_to_0.001` to `margin_above_1`: number of usable rows by class of the router margin, and `differing_to_0.001`
  to `differing_above_1`: number of these rows in which capture and router differ

`routing_anomalies.jsonl` has a line per anomaly. A healthy run has no such file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa

from nemo_rl_moe.routing.agreement.route_identity import AnomalyKind, RoutingAnomaly
from nemo_rl_moe.routing.agreement.row_kinds import MARGIN_EDGES, Row
from nemo_rl_moe.runs.folder.line_tail import LineTail, OfStep
from nemo_rl_moe.runs.folder.lines import LineFile
from nemo_rl_moe.runs.folder.metrics import LAST_STEP
from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.shapes import Float, Int

if TYPE_CHECKING:
    # The report reads these files without torch.
    from nemo_rl_moe.routing.agreement.statistics import RoutingReport

FOLDER_NAME = "routing.parquet"
ANOMALIES_FILE_NAME = "routing_anomalies.jsonl"
MARGIN_CLASSES = (*(f"to_{edge:g}" for edge in MARGIN_EDGES), f"above_{MARGIN_EDGES[-1]:g}")
"""Names of the classes of router margins, narrowest first."""
_KINDS = tuple(kind.name.lower() for kind in Row)
_MARGINS = tuple(f"{which}_{name}" for name in MARGIN_CLASSES for which in ("margin", "differing"))
TABLE = StepTable(
    FOLDER_NAME,
    ("step", "layer"),
    {
        **dict.fromkeys((*_KINDS, "slots"), pa.int64()),
        "slot_chance": pa.float64(),
        **dict.fromkeys(_MARGINS, pa.int64()),
    },
)
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class RoutingHistory:
    """Statistics of a run's captured routes over its steps.

    A row is the captured experts of one token in one layer. A row is usable if all its experts exist and differ.

    Attributes:
        rows: Number of rows of each kind in `Row`.
        slots: Number of experts in usable rows.
        slot_chance: Share of `slots` on which capture and router agree by chance. NaN without usable rows.
        margins: Number of usable rows, and of rows in which capture and router differ, by class of the router margin.
        layer_overlap: In a sample of tokens, share of the captured experts of one layer that the routers of another
            layer would choose. NaN if unknown. None if read from a run's folder, which does not store the overlap.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    rows: Int[np.ndarray, "steps layers kinds"]
    slots: Int[np.ndarray, "steps layers"]
    slot_chance: Float[np.ndarray, "steps layers"]
    margins: Int[np.ndarray, "steps layers classes 2"]
    layer_overlap: Float[np.ndarray, "steps layers layers"] | None = None


class RoutingWriter(StepTableWriter["RoutingReport"]):
    table = TABLE
    line_files = (ANOMALIES_FILE_NAME,)
    _anomalies: LineFile | None = None

    def write(self, step: int, artifact: "RoutingReport") -> None:
        from nemo_rl_moe.routing.agreement.statistics import slot_chance

        totals = artifact.totals
        of_kinds = dict(zip(_KINDS, totals.rows.numpy().T, strict=True))
        of_margins = dict(zip(_MARGINS, totals.margins.flatten(1).numpy().T, strict=True))
        slots = {"slots": totals.captured_experts.sum(1).numpy(), "slot_chance": slot_chance(totals).numpy()}
        self.add(step, (artifact.layers,), of_kinds | slots | of_margins)
        if artifact.anomalies:
            path = self._folder.parent / ANOMALIES_FILE_NAME
            self._anomalies = self._anomalies or LineFile(path, self._warn, self._message)
            self._anomalies.append(
                json.dumps({"step": step, "kind": anomaly.kind, "layer": anomaly.layer, "text": anomaly.text})
                for anomaly in artifact.anomalies
            )

    def close(self) -> None:
        super().close()
        if self._anomalies is not None:
            self._anomalies.close()


def read_routing(run_folder: Path, first_step: int = 0) -> RoutingHistory:
    """Return the statistics of captured routes that a run has written so far.

    Raises:
        FileNotFoundError: There is no step from `first_step` on.
    """
    found = read_steps(TABLE, run_folder, first_step)
    steps, layers = found.axes
    margins = np.stack([found.values[name] for name in _MARGINS], -1)
    return RoutingHistory(
        steps,
        layers,
        np.stack([found.values[name] for name in _KINDS], -1),
        found.values["slots"],
        found.values["slot_chance"],
        margins.reshape(*margins.shape[:2], len(MARGIN_CLASSES), 2),
    )


class AnomaliesTail(LineTail[OfStep[RoutingAnomaly]]):
    """Reader of the anomalies of captured routes, of a running or finished run."""

    def __init__(self, run_folder: Path):
        super().__init__(run_folder / ANOMALIES_FILE_NAME, _parse)


def _parse(record: Any) -> OfStep[RoutingAnomaly]:
    step, kind, layer = int(record["step"]), record["kind"], record["layer"]
    if kind not in get_args(AnomalyKind) or not 0 <= step <= LAST_STEP:
        raise ValueError("invalid kind or step")
    number = None if layer is None else int(layer)
    return OfStep(step, RoutingAnomaly(kind, str(record["text"])[:_LONGEST_TEXT], number))
