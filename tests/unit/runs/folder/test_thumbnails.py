# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Thumbnails of samples: small, few, each image once, rewound with the samples, and nothing else is read as
one."""

import json
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.models.images import ModelImage, image_inputs
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder import thumbnails
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.folder.saved_samples import PROMPTS_OF_A_STEP, has_images, read_samples
from nemo_rl_moe.runs.folder.thumbnails import (
    IMAGES_OF_A_SAMPLE,
    LONGEST_SIDE,
    MOST_BYTES,
    ThumbnailWriter,
    read_thumbnail,
    thumbnail_of,
)
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.support.clocks_and_disks import fill
from tests.support.grpo_fakes import trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens


def noise(height: int, width: int, seed: int = 0) -> ModelImage:
    return ModelImage(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def shown(sample_id: str, model_images: Sequence[ModelImage]) -> Trajectory:
    inputs = image_inputs(model_images, np.zeros(3, np.bool_))
    return with_tokens(trajectory(sample_id=sample_id), tokens_of([10], [5, 1], model_inputs=inputs))


def sample_log(folder: Path, num_to_save: int | None = None) -> SampleLog:
    return SampleLog(folder, ConsoleLogger(total_steps=1, live="never", stream=None), 0, num_to_save)


def names_in(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "thumbnails").glob("*.png")}


@pytest.mark.parametrize(
    ("size", "expected"), [((8, 4), (8, 4)), ((480, 960), (48, 96)), ((2000, 2), (96, 1)), ((96, 96), (96, 96))]
)
def test_images_are_made_small_and_never_larger(size: tuple[int, int], expected: tuple[int, int]) -> None:
    content = thumbnail_of(noise(*size).pixels)
    with PIL.Image.open(BytesIO(content)) as image:
        assert (image.height, image.width, image.format, image.mode) == (*expected, "PNG", "RGB")
    assert len(content) < MOST_BYTES / 2, "even of noise, which no compression helps"


def test_a_small_image_keeps_its_pixels() -> None:
    model_image = noise(8, 4)
    with PIL.Image.open(BytesIO(thumbnail_of(model_image.pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), model_image.pixels)


def test_images_come_back_where_the_runs_folder_was_deleted(tmp_path: Path) -> None:
    run_folder = tmp_path / "exp_001"
    run_folder.mkdir()
    log, model_image = sample_log(run_folder), noise(4, 4)
    log.write(1, "val", [shown("s", [model_image])])
    shutil.rmtree(run_folder)
    log.write(2, "val", [shown("s", [model_image])])
    assert names_in(run_folder) == {f"{model_image.digest:016x}"}


def test_samples_name_the_files_of_the_first_prompts_alone(tmp_path: Path) -> None:
    own = [noise(4, 4, seed) for seed in range(9)]
    log = sample_log(tmp_path)
    log.write(1, "train", [shown(f"s{prompt}", [own[prompt]]) for prompt in range(9) for _ in range(2)])
    log.write(1, "val", [shown("other", [own[0], *own[3:8]]), trajectory(sample_id="text")])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    named = [line.get("thumbnails") for line in lines]
    name_of = [f"{model_image.digest:016x}" for model_image in own]
    first = [value for name in name_of[:PROMPTS_OF_A_STEP] for value in ([name], None)]
    assert named == [*first, *[None] * 6, [name_of[0], *name_of[3:6]], None]
    assert IMAGES_OF_A_SAMPLE == 4
    assert names_in(tmp_path) == set(name_of[:PROMPTS_OF_A_STEP])
    assert [one.get("thumbnails") for one in read_samples(tmp_path, [])][:2] == [[name_of[0], *name_of[3:6]], None]


def test_what_is_not_saved_has_no_image(tmp_path: Path) -> None:
    sample_log(tmp_path, num_to_save=1).write(1, "train", [shown(f"s{n}", [noise(4, 4, n)]) for n in range(3)])
    assert len(names_in(tmp_path)) == 1
    sample_log(tmp_path, num_to_save=0).write(1, "train", [shown("s", [noise(4, 4, 9)])])
    assert len(names_in(tmp_path)) == 1


def test_long_runs_keep_images_of_ever_fewer_steps_and_of_all_validations(tmp_path: Path) -> None:
    kept = [step for step in range(1, 20_001) if has_images(step)]
    assert kept[:23] == [*range(1, 20), 20, 30, 40, 50]
    assert kept[36:42] == [190, 200, 300, 400, 500, 600]
    assert len(kept) * PROMPTS_OF_A_STEP * IMAGES_OF_A_SAMPLE < thumbnails.MOST_THUMBNAILS
    log = sample_log(tmp_path)
    with log:
        for step in range(1, 46):
            log.write(step, "train", [shown("t", [noise(4, 4, step)])])
            log.write(step, "val", [shown("v", [noise(4, 4)])])
    found = read_samples(tmp_path, [])
    assert [one["step"] for one in found if one["split"] == "val"] == [12, 23, 34, 45]
    # Nearest to 12, 23 and 34, and the last.
    assert [one["step"] for one in found if one["split"] == "train"] == [12, 20, 30, 45]
    assert ["thumbnails" in one for one in found] == [True] * 7 + [False]


def test_text_leaves_no_folder(tmp_path: Path) -> None:
    sample_log(tmp_path).write(1, "train", [trajectory()])
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_run_has_a_limit_and_the_images_it_has_are_named_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MOST_THUMBNAILS", 2)
    first, second, third = (noise(4, 4, seed) for seed in range(3))
    assert len(ThumbnailWriter(tmp_path, pytest.fail).write([first])) == 1
    reported: list[str] = []
    later = ThumbnailWriter(tmp_path, reported.append)  # of a run that goes on
    for _ in range(2):
        assert later.write([second, third, first]) == [f"{one.digest:016x}" for one in (second, first)]
    assert reported == [f"{tmp_path / 'thumbnails'} holds 2 images; samples with others have none"]
    assert names_in(tmp_path) == {f"{model_image.digest:016x}" for model_image in (first, second)}


def test_a_full_disk_is_reported_once_and_samples_go_without(small_disk: Path) -> None:
    reported: list[str] = []
    writer = ThumbnailWriter(small_disk, reported.append)
    room = fill(small_disk)
    model_images = [noise(96, 96, seed) for seed in range(3)]
    assert writer.write(model_images) == []
    assert writer.write(model_images) == []
    (line,) = reported
    assert line.startswith(f"{small_disk / 'thumbnails'} cannot be written, samples have no images: ")
    room.unlink()
    assert len(writer.write(model_images)) == 3


def test_a_rewind_takes_the_images_of_later_steps_with_it(tmp_path: Path) -> None:
    log = sample_log(tmp_path)
    kept, both, later = (noise(4, 4, seed) for seed in range(3))
    with log:
        log.write(1, "train", [shown("a", [kept, both])])
        log.write(2, "train", [shown("b", [both, later])])
    strange = tmp_path / "thumbnails" / "mine.png"
    strange.write_text("not of the run")
    (tmp_path / "thumbnails" / ".0000000000000001.png.incomplete").write_text("torn")
    rewind_run_folder(tmp_path, 1)
    assert names_in(tmp_path) == {f"{kept.digest:016x}", f"{both.digest:016x}", "mine"}
    assert len(list((tmp_path / "thumbnails").iterdir())) == 3
    rewind_run_folder(tmp_path, -1)
    assert names_in(tmp_path) == {"mine"}


def test_names_of_a_file_that_was_edited_lead_nowhere(tmp_path: Path) -> None:
    good = "0123456789abcdef"
    line = {"step": 1, "split": "val", "sample_id": "a", "prompt": "", "response": ""}
    names = ["../../secret", "/etc/passwd", good, 3, good + "\n", good.upper()]
    edited = [{**line, "thumbnails": names[:4]}, {**line, "sample_id": "b", "thumbnails": {"a": 1}}]
    edited += [{**line, "sample_id": "c", "thumbnails": names[4:]}]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in edited))
    assert [one.get("thumbnails") for one in read_samples(tmp_path, [])] == [[good], None, None]


def test_what_is_no_thumbnail_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "thumbnails"
    folder.mkdir()
    content = thumbnail_of(noise(96, 96).pixels)
    large = BytesIO()
    PIL.Image.new("RGB", (LONGEST_SIDE + 1, 4)).save(large, "PNG")
    jpeg = BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(jpeg, "JPEG")
    spoiled = {
        "0" * 16: (content[:-100], "cannot be read: "),
        "1" * 16: (b"", "cannot be read: "),
        "2" * 16: (content + bytes(MOST_BYTES), "has more than 65,536 bytes"),
        "3" * 16: (large.getvalue(), "has 97 x 4 pixels"),
        "4" * 16: (jpeg.getvalue(), "cannot be read: "),
    }
    for name, (made, _) in spoiled.items():
        (folder / f"{name}.png").write_bytes(made)
    (folder / f"{'5' * 16}.png").symlink_to("/etc/passwd")
    (folder / f"{'6' * 16}.png").mkdir()
    problems = {name: problem for name, (_, problem) in spoiled.items()}
    problems |= dict.fromkeys(("5" * 16, "6" * 16, "7" * 16), "is no file")
    for name, problem in problems.items():
        with pytest.raises(DataError, match=problem) as caught:
            read_thumbnail(tmp_path, name)
        assert str(folder / f"{name}.png") in str(caught.value)
    (folder / f"{'8' * 16}.png").write_bytes(content)
    assert read_thumbnail(tmp_path, "8" * 16) == content
