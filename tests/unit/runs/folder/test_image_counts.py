# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The column of image tokens in the load file: there at every step of a run, or at none."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.expert_load import FOLDER_NAME, TABLE, ExpertLoadTail, ExpertLoadWriter, read_expert_load
from nemo_rl_moe.runs.folder.step_tables import STEPS_OF_A_FILE, rewind_steps


def load_of_step(step: int, *, images: bool = True) -> ExpertLoad:
    counts = torch.arange(6).reshape(2, 3) + 10 * step
    return ExpertLoad((1, 4), counts, counts // 3 if images else None, 2)


def write(folder: Path, steps: range, *, images: bool = True) -> None:
    reported: list[str] = []
    writer = ExpertLoadWriter(folder, reported.append, reported.append)
    for step in steps:
        writer.write(step, load_of_step(step, images=images))
    writer.close()
    assert reported == []


def test_written_joined_and_cut_back(tmp_path: Path) -> None:
    last = STEPS_OF_A_FILE + 3
    write(tmp_path, range(1, last + 1))
    found = read_expert_load(tmp_path)
    assert found.steps.tolist() == list(range(1, last + 1))
    assert found.image_counts is not None
    np.testing.assert_array_equal(found.image_counts, found.counts // 3)
    assert pq.read_table(tmp_path / FOLDER_NAME).column_names == ["step", "layer", "expert", "count", "image_count"]
    rewind_steps(TABLE, tmp_path, 40)  # inside the joined file
    write(tmp_path, range(41, 44))
    found = read_expert_load(tmp_path)
    assert found.steps.tolist() == list(range(1, 44))
    np.testing.assert_array_equal(found.image_counts, found.counts // 3)
    tail = ExpertLoadTail(tmp_path).read(42)
    assert tail is not None
    assert found.image_counts is not None
    np.testing.assert_array_equal(tail.image_counts, found.image_counts[:42])


def test_a_text_model_has_no_such_column(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), images=False)
    assert read_expert_load(tmp_path).image_counts is None
    assert "image_count" not in pq.read_table(tmp_path / FOLDER_NAME).column_names


def test_steps_with_and_without_are_damage(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2), images=False)
    write(tmp_path, range(2, 3))
    with pytest.raises(DataError, match="it has other columns than the first file"):
        read_expert_load(tmp_path)


def test_more_image_tokens_than_tokens_are_damage(tmp_path: Path) -> None:
    counts = torch.ones(1, 2, dtype=torch.long)
    writer = ExpertLoadWriter(tmp_path, pytest.fail)
    writer.write(1, ExpertLoad((0,), counts, 2 * counts))
    with pytest.raises(DataError, match="image_count is above count"):
        read_expert_load(tmp_path)
