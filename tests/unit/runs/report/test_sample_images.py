# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Thumbnails in a page: inside of it, few, and none that is damaged or not of the run."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.folder.thumbnails import thumbnail_of
from nemo_rl_moe.runs.report import page_data as page_data_module
from nemo_rl_moe.runs.report.page_data import MOST_IMAGES, embedded_thumbnails, page_data
from tests.support.made_runs import make_run


def sample(prompt: int, names: list[str], step: int = 1) -> dict[str, Any]:
    texts = {"sample_id": f"file:{prompt}", "prompt": "what?", "response": "that"}
    return {"step": step, "split": "val", **texts, "thumbnails": names}


def name_of(number: int) -> str:
    return f"{number:016x}"


def write_thumbnails(folder: Path, number: int) -> None:
    (folder / "thumbnails").mkdir()
    for seed in range(number):
        pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        (folder / "thumbnails" / f"{name_of(seed)}.png").write_bytes(thumbnail_of(pixels))


def test_each_image_is_in_the_page_once_and_samples_name_it(tmp_path: Path) -> None:
    samples = [sample(prompt, [name_of(prompt), name_of(2)], step) for step in (1, 2) for prompt in range(2)]
    run = make_run(tmp_path / "run", {}, samples=samples)
    write_thumbnails(run, 3)
    (found,) = json.loads(page_data([read_run(run)], 10**6).text)["runs"]
    assert [one["thumbnails"] for one in found["samples"]] == [one["thumbnails"] for one in samples]
    assert found["thumbnails"].keys() == {name_of(number) for number in range(3)}
    for name, text in found["thumbnails"].items():
        assert base64.b64decode(text) == (run / "thumbnails" / f"{name}.png").read_bytes()
    assert found["notes"] == []


def test_samples_of_text_are_as_ever(tmp_path: Path) -> None:
    samples = [{name: value for name, value in sample(1, []).items() if name != "thumbnails"}]
    (found,) = json.loads(page_data([read_run(make_run(tmp_path / "run", {}, samples=samples))], 10**6).text)["runs"]
    assert found["samples"][0].keys() == {"step", "split", "sample_id", "prompt", "response", "reward", "verdict"}
    assert found["thumbnails"] == {}


def test_what_is_missing_or_damaged_is_reported_and_left_out(tmp_path: Path) -> None:
    samples = [sample(number, [name_of(number)]) for number in range(4)]
    run = make_run(tmp_path / "run", {}, samples=samples)
    write_thumbnails(run, 4)
    (run / "thumbnails" / f"{name_of(1)}.png").unlink()
    damaged = run / "thumbnails" / f"{name_of(2)}.png"
    damaged.write_bytes(damaged.read_bytes()[:100])
    (found,) = json.loads(page_data([read_run(run)], 10**6).text)["runs"]
    assert found["thumbnails"].keys() == {name_of(0), name_of(3)}
    (note,) = found["notes"]
    first = run / "thumbnails" / f"{name_of(1)}.png"
    assert note == f"images of samples that cannot be shown: 2, the first of them {first}: is no file"


def test_images_have_limits_in_number_and_size(tmp_path: Path) -> None:
    write_thumbnails(tmp_path, 6)
    samples = [sample(number, [name_of(number)]) for number in range(6)]
    notes: list[str] = []
    assert list(embedded_thumbnails(tmp_path, samples, 2, 10**6, notes)) == [name_of(0), name_of(1)]
    assert notes == ["images of samples that are omitted: 4; the page has room for 2"]
    found = embedded_thumbnails(tmp_path, samples, 99, 100_000, [])
    assert 60_000 < sum(map(len, found.values())) <= 100_000
    assert len(found) == 2


def test_runs_share_the_room_of_a_page(tmp_path: Path) -> None:
    samples = [sample(prompt, [name_of(4 * prompt + n) for n in range(4)], step=1) for prompt in range(6)]
    runs = []
    for number in range(3):
        run = make_run(tmp_path / str(number), {}, samples=samples)
        write_thumbnails(run, 24)
        runs.append(read_run(run))
    found = json.loads(page_data(runs, 50_000_000).text)["runs"]
    assert [len(one["thumbnails"]) for one in found] == [MOST_IMAGES // 3] * 3
    budget = 1_000_000
    data = page_data(runs, budget)
    taken = sum(len(text) for one in json.loads(data.text)["runs"] for text in one["thumbnails"].values())
    assert 0 < taken <= page_data_module._SHARE_OF_IMAGES * budget
