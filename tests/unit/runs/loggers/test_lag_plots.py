# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of tokens by lag, and its plot: what is drawn is what the step reported."""

from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from nemo_rl_moe.runs.folder.artifacts import BY_LAG
from nemo_rl_moe.runs.folder.by_lag import LAG_STATISTICS, TABLE, LagTable, LagWriter
from nemo_rl_moe.runs.folder.step_tables import read_steps
from nemo_rl_moe.runs.loggers.artifacts import ARTIFACTS
from nemo_rl_moe.runs.loggers.lag_plots import LAG_KEY, draw_lags, lag_plots
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder

NAN = float("nan")
NOTHING = [NAN] * 5


def table(**changes: list[float]) -> LagTable:
    values = {
        "num_valid_tokens": [60.0, 30.0, 0.0, 10.0, 0.0],
        "sampling_logp_difference": [0.01, 0.03, NAN, 0.1, NAN],
        "gen_kl_error": [0.001, 0.003, NAN, 0.0005, NAN],
        "kl_staleness": [NAN, 0.002, NAN, -0.0005, NAN],
        "clip_fraction": [0.0, 0.1, NAN, 0.3, NAN],
        "effective_samples": [1.0, 0.9, NAN, 0.5, NAN],
        "live_agreement": [1.0, 0.95, NAN, 0.8, NAN],
    }
    return LagTable({name: np.array(of) for name, of in {**values, **changes}.items()})


def heights(panel: object) -> list[list[float]]:
    return [[bar.get_height() for bar in bars] for bars in panel.containers]  # type: ignore[attr-defined]


def test_bars_are_the_statistics_of_each_class() -> None:
    figure = draw_lags(7, table())
    shares, divergence, samples, agreement = (heights(panel) for panel in figure.axes)
    np.testing.assert_allclose(shares[0], [0.6, 0.3, 0.0, 0.1, 0.0])
    engines, stale = divergence
    np.testing.assert_allclose(engines, [0.001, 0.001, NAN, 0.001, NAN])
    np.testing.assert_allclose(stale, [0.0, 0.002, 0.0, -0.0005, 0.0])
    np.testing.assert_allclose(samples[0], [0.0, 0.1, NAN, 0.5, NAN])
    np.testing.assert_allclose(agreement[0], [0.0, 0.05, NAN, 0.2, NAN], atol=1e-12)
    title, summary = (text.get_text() for text in figure.texts)
    assert title == "Staleness of the tokens of step 7"
    assert summary == "40% of 100 tokens are older than the weights; largest lag: 3 to 4"


def test_without_a_capture_and_without_a_level_of_the_engines_the_rest_is_drawn() -> None:
    figure = draw_lags(7, table(live_agreement=NOTHING, kl_staleness=NOTHING))
    _, divergence, _, clipped = (heights(panel) for panel in figure.axes)
    np.testing.assert_allclose(divergence, [[0.001, 0.003, NAN, 0.0005, NAN]])
    np.testing.assert_allclose(clipped, [[0.0, 0.1, NAN, 0.3, NAN]])


def test_it_is_a_registered_artifact_with_a_plot_and_a_table(tmp_path: Path) -> None:
    kind = ARTIFACTS[BY_LAG.name]
    plots = kind.plot(7, table())
    assert list(plots) == [LAG_KEY]
    assert PIL.Image.open(BytesIO(plots[LAG_KEY])).size == (1010, 648)
    assert lag_plots(7, table(num_valid_tokens=[0.0] * 5)) == {}

    writer = LagWriter(tmp_path, pytest.fail)
    for step in (1, 2, 3):
        kind.writer.write(writer, step, table(num_valid_tokens=[float(step), 0.0, 0.0, 0.0, 0.0]))
    writer.close()
    rewind_run_folder(tmp_path, 2)
    found = read_steps(TABLE, tmp_path)
    assert [axis.tolist() for axis in found.axes] == [[1, 2], [0, 1, 2, 3, 5]]
    assert found.values["num_valid_tokens"][:, 0].tolist() == [1.0, 2.0]
    assert set(found.values) == set(LAG_STATISTICS)
    np.testing.assert_array_equal(found.values["kl_staleness"][1], table().of["kl_staleness"])
