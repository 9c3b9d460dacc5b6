# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The time line of asynchronous rollouts: its table, and its plot."""

from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from nemo_rl_moe.runs.folder.artifacts import TIME_LINE
from nemo_rl_moe.runs.folder.step_tables import read_steps
from nemo_rl_moe.runs.folder.time_line import (
    FOR_ENVIRONMENT,
    GENERATING,
    NUM_BINS,
    PAUSED,
    TABLE,
    TRAINING,
    UPDATING,
    WAITING,
    Interval,
    StepActivity,
    TimeLine,
    TimeLineWriter,
    read_time_line,
)
from nemo_rl_moe.runs.loggers.artifacts import ARTIFACTS
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.time_line_plot import (
    ENGINE_COLORS,
    TIME_LINE_KEY,
    TRAINER_COLORS,
    draw_time_line,
    time_line_plots,
)


def step(start_s: float) -> StepActivity:
    """Return ten seconds: training 6, waiting 3, an update of 1; generating 5, paused 1, environment 4."""
    trainer = [(TRAINING, 0.0, 5.0), (UPDATING, 5.0, 6.0), (TRAINING, 6.0, 7.0), (WAITING, 7.0, 10.0)]
    engines = [(GENERATING, 0.0, 5.0), (PAUSED, 5.0, 6.0), (FOR_ENVIRONMENT, 6.0, 10.0)]
    of_trainer, of_engines = (
        [Interval(state, start_s + begin, start_s + end) for state, begin, end in each] for each in (trainer, engines)
    )
    return StepActivity(of_trainer, of_engines)


LINE = TimeLine((step(100.0), step(110.0)))


def test_the_table_has_the_last_step_in_bins(tmp_path: Path) -> None:
    writer = TimeLineWriter(tmp_path, pytest.fail)
    writer.write(4, LINE)
    writer.close()
    found = read_steps(TABLE, tmp_path)
    assert found.axes[0].tolist() == [4]
    states, seconds = (np.asarray(found.values[name][0]) for name in ("state", "seconds"))
    assert states.shape == (2, NUM_BINS)
    assert np.allclose(seconds, 10 / NUM_BINS)
    history = read_time_line(tmp_path)
    assert (history.steps.tolist(), history.seconds.tolist()) == ([4], [pytest.approx(10.0)])
    assert np.array_equal(history.states[0], states)
    of_state = [[seconds[part][states[part] == state].sum() for state in range(4)] for part in range(2)]
    assert np.allclose(of_state, [[6.0, 3.0, 1.0, 0.0], [5.0, 4.0, 1.0, 0.0]])
    rewind_run_folder(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="holds no step"):
        read_steps(TABLE, tmp_path)


def test_the_bars_are_the_seconds_of_each_state() -> None:
    axes = draw_time_line(7, LINE).axes[0]
    seconds = dict[tuple[str, float], float]()
    for bar in axes.patches:
        color = "#" + "".join(f"{round(255 * part):02x}" for part in bar.get_facecolor()[:3])
        key = color, bar.get_y() + bar.get_height() / 2
        seconds[key] = seconds.get(key, 0.0) + bar.get_width()
    expected = {
        (TRAINER_COLORS[TRAINING], 1.0): 12.0,
        (TRAINER_COLORS[WAITING], 1.0): 6.0,
        (TRAINER_COLORS[UPDATING], 1.0): 2.0,
        (ENGINE_COLORS[GENERATING], 0.0): 10.0,
        (ENGINE_COLORS[PAUSED], 0.0): 2.0,
        (ENGINE_COLORS[FOR_ENVIRONMENT], 0.0): 8.0,
    }
    assert seconds == pytest.approx(expected)
    texts = [text.get_text() for text in draw_time_line(7, LINE).texts]
    assert "training waits for rollouts 30% of the time; engines generate 50% of it" in texts


def test_it_is_a_registered_artifact_with_a_picture() -> None:
    images = ARTIFACTS[TIME_LINE.name].plot(7, LINE)
    assert list(images) == [TIME_LINE_KEY]
    assert PIL.Image.open(BytesIO(images[TIME_LINE_KEY])).size[0] > 1000
    nothing = [Interval(0, 1.0, 1.0)]
    assert time_line_plots(1, TimeLine((StepActivity(nothing, nothing),))) == {}
