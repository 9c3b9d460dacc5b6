# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of the captures of its rollouts: read back number for number, rewound with the run."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.runs.folder.line_tail import by_step
from nemo_rl_moe.runs.folder.routing import ANOMALIES_FILE_NAME, FOLDER_NAME, AnomaliesTail, RoutingWriter, read_routing
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.support.clocks_and_disks import files_no_longer_than
from tests.support.made_runs import routing_report

LATE = RoutingAnomaly("token", "routes are one token late")
OF_LAYER_2 = RoutingAnomaly("layer", "layer 3 carries layer 2's routes", 3)
# Of 39 rows in each layer: 4 and 8 differ, 3 are missing in the second layer, and 2 hold expert 0 alone.
REPORT = routing_report([4, 8], missing=[0, 3], zero=[0, 2], layers=[1, 3])


@pytest.fixture
def writer(tmp_path: Path) -> RoutingWriter:
    return RoutingWriter(tmp_path, pytest.fail)


def test_numbers_are_read_back(writer: RoutingWriter, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_routing(tmp_path)
    writer.write(1, REPORT)
    writer.write(2, routing_report([0, 39], layers=[1, 3], replays=True))
    found = read_routing(tmp_path)
    assert (found.steps.tolist(), found.layers.tolist()) == ([1, 2], [1, 3])
    np.testing.assert_array_equal(found.rows[0], REPORT.totals.rows)
    assert found.rows[0, 1, [Row.EXPECTED, Row.USABLE, Row.MISSING, Row.ZERO, Row.LIVE_SAME]].tolist() == [
        39,
        34,
        3,
        2,
        26,
    ]
    assert found.rows[1, :, [Row.TAKEN_SAME, Row.LIVE_SAME]].T.tolist() == [[39, 39], [39, 0]]
    assert found.slots.tolist() == [[78, 68], [78, 78]]
    np.testing.assert_array_equal(found.margins[0], REPORT.totals.margins)
    assert found.margins[0, 1, [0, 5]].tolist() == [[8, 8], [26, 0]]
    assert read_routing(tmp_path, 2).steps.tolist() == [2]


def test_a_layer_without_usable_rows_has_no_chance_of_agreement(writer: RoutingWriter, tmp_path: Path) -> None:
    writer.write(1, routing_report([0, 0], missing=[0, 39]))
    chance = read_routing(tmp_path).slot_chance[0]
    assert 0 < chance[0] < 1
    assert np.isnan(chance[1])


def test_other_tools_read_one_table(writer: RoutingWriter, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer.write(step, REPORT)
    rows = pd.read_parquet(tmp_path / FOLDER_NAME)
    assert len(rows) == 6
    row = rows[(rows.step == 2) & (rows.layer == 3)].iloc[0]
    assert (row.expected, row.usable, row.missing, row.zero, row.live_same) == (39, 34, 3, 2, 26)
    assert (row["margin_to_0.001"], row["differing_to_0.001"], row["margin_to_0.3"]) == (8, 8, 26)


def test_anomalies_are_kept_with_their_step_and_a_healthy_run_has_no_file(
    writer: RoutingWriter, tmp_path: Path
) -> None:
    path = tmp_path / ANOMALIES_FILE_NAME
    writer.write(1, REPORT)
    assert not path.exists()
    assert AnomaliesTail(tmp_path).read().records == []
    writer.write(2, routing_report([0], anomalies=[LATE, OF_LAYER_2]))
    tail = AnomaliesTail(tmp_path)
    assert by_step(tail.read().records) == {2: [LATE, OF_LAYER_2]}
    writer.write(4, routing_report([0], anomalies=[LATE]))
    assert by_step(tail.read().records) == {4: [LATE]}
    writer.close()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"step": 1, "kind": "layer", "text": "no layer"}',
        '{"step": 1, "kind": "weather", "layer": null, "text": ""}',
        '{"step": -1, "kind": "token", "layer": null, "text": ""}',
        '{"step": 1, "kind": ["token"], "layer": null, "text": ""}',
    ],
)
def test_damaged_lines_of_anomalies_are_counted(tmp_path: Path, line: str) -> None:
    good = json.dumps({"step": 3, "kind": "token", "layer": None, "text": LATE.text})
    (tmp_path / ANOMALIES_FILE_NAME).write_text(f"{line}\n{good}\n{good[:-9]}")
    found = AnomaliesTail(tmp_path).read()
    assert (by_step(found.records), found.num_damaged) == ({3: [LATE]}, 1)


def test_table_and_anomalies_are_rewound_and_go_on(writer: RoutingWriter, tmp_path: Path) -> None:
    for step in range(1, 7):
        writer.write(step, routing_report([step], anomalies=[LATE] if step in (3, 5) else []))
    writer.close()
    rewind_run_folder(tmp_path, 3)
    assert read_routing(tmp_path).steps.tolist() == [1, 2, 3]
    assert list(by_step(AnomaliesTail(tmp_path).read().records)) == [3]
    again = RoutingWriter(tmp_path, pytest.fail)
    again.write(4, routing_report([9], anomalies=[OF_LAYER_2]))
    again.close()
    found = read_routing(tmp_path)
    assert found.rows[:, 0, Row.LIVE_SAME].tolist() == [38, 37, 36, 30]
    assert by_step(AnomaliesTail(tmp_path).read().records) == {3: [LATE], 4: [OF_LAYER_2]}


def test_a_full_disk_costs_neither(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = RoutingWriter(tmp_path, warnings.append)
    with files_no_longer_than(50):
        writer.write(1, routing_report([1], anomalies=[LATE]))
    assert [warning.split(" cannot")[0] for warning in warnings] == [FOLDER_NAME, ANOMALIES_FILE_NAME]
    writer.write(2, routing_report([2], anomalies=[LATE]))
    writer.close()
    assert read_routing(tmp_path).steps.tolist() == [1, 2]
    assert list(by_step(AnomaliesTail(tmp_path).read().records)) == [1, 2]


def test_a_table_without_a_column_is_damaged(writer: RoutingWriter, tmp_path: Path) -> None:
    writer.write(1, REPORT)
    (path,) = (tmp_path / FOLDER_NAME).iterdir()
    pq.write_table(pq.read_table(path).drop_columns(["missing"]), path)
    with pytest.raises(DataError, match="rows without a number"):
        read_routing(tmp_path)
