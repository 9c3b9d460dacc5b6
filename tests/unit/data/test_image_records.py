# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images in records: their forms, their places, and what is wrong with them."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.data.image_files import LARGEST_IMAGE_BYTES, ImageReader, image_folder
from nemo_rl_moe.data.image_records import ImageReference, image_columns
from nemo_rl_moe.data.preferences import parse_preference
from nemo_rl_moe.data.prompt_records import prompt_parser
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import Example, parse_record
from nemo_rl_moe.errors import DataError

OPEN = {"type": "image"}
ANSWER = {"role": "assistant", "content": "4"}


def encoded(kind: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **options: object) -> bytes:
    stream = BytesIO()
    Image.new(mode, size, 1).save(stream, kind, **options)
    return stream.getvalue()


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def parsed(turn: object, **beside: object) -> Example:
    return parse_record({"messages": [turn, ANSWER], **beside}, "f:1", "images")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png", "text": None},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "image": {"path": "a.png", "bytes": None}},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image_url", "image_url": "a.png"},
    ],
)
def test_forms_of_a_part(part: dict[str, object]) -> None:
    example = parsed(user(text("a"), part, text("b"), text("c")))
    assert example.images == (ImageReference("a.png", None, ""),)
    assert example.messages[0]["content"] == [text("a"), OPEN, text("bc")]


def test_encoded_images_in_a_record() -> None:
    content = encoded()
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    for value in (content, address, {"bytes": content, "path": "no.png"}, {"url": address}):
        assert parsed(user({"type": "image", "image": value})).images == (ImageReference(None, content, ""),)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([text("a"), OPEN, text("b"), OPEN], [text("a"), OPEN, text("b"), OPEN]),
        ([text("<image>"), OPEN, OPEN], [text("<image>"), OPEN, OPEN]),
        ("<image>a<image>b", [OPEN, text("a"), OPEN, text("b")]),
        ("a", [OPEN, OPEN, text("a")]),
    ],
)
def test_places_of_images_beside_the_messages(content: object, expected: object) -> None:
    example = parsed({"role": "user", "content": content}, images=["1.png", "2.png"])
    assert example.messages[0]["content"] == expected
    assert [image.path for image in example.images] == ["1.png", "2.png"]


def test_a_record_without_images_is_what_it_was() -> None:
    for beside in ({}, {"images": None}, {"images": []}):
        example = parsed({"role": "user", "content": "a <image>"}, **beside)
        assert example == Example("f:1", ({"role": "user", "content": "a <image>"}, ANSWER))
    assert parse_record({"messages": [user(text("a")), ANSWER], "images": ["1.png"]}, "f:1").images == ()


LLAVA = {"from": "human", "value": "<image>\nhow many?"}
REPORTED = (
    r"^f:1: there are images in image, .* expected images in images \(data.image_key\); set data.image_key=image "
)


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [LLAVA, {"from": "gpt", "value": "4"}], "image": "a.jpg"},
        {"prompt": "<image>?", "completion": "4", "image": {"bytes": b"1", "path": None}, "images": []},
        {"prompt": "<image><image>?", "chosen": "4", "rejected": "5", "image": ["a.jpg", "b.jpg"], "images": None},
    ],
)
def test_images_under_another_key_than_the_runs_are_reported(record: dict[str, object]) -> None:
    parse = parse_preference if "chosen" in record else parse_record
    with pytest.raises(DataError, match=REPORTED):
        parse(record, "f:1", "images")
    parse(record, "f:1", None)  # left unread on purpose
    found = parse(record, "f:1", "image")
    assert (found if isinstance(found, Example) else found.chosen).images


def test_a_prompt_under_another_key_is_reported() -> None:
    data = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False).data
    parse = prompt_parser(data.model_copy(update={"prompt_key": "prompt", "image_key": "images"}), None)
    with pytest.raises(DataError, match=REPORTED):
        parse({"prompt": "<image>?", "image": "a.jpg", "answer": "4"}, "f:1")


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "a.jpg", "prompt": "no mark"},
        {"image": "a.jpg", "prompt": "no mark", "completion": "<image>"},
        {"image": 7},
        {"image": None},
        {"photo": "a.jpg"},
        {"image": "a.jpg", "images": "b.jpg"},
    ],
)
def test_a_record_with_image_in_it_may_be_one_of_text(changes: dict[str, object]) -> None:
    parse_record({"prompt": "<image>?", "completion": "4", **changes}, "f:1", "images")


def test_a_table_is_read_with_the_columns_that_may_hold_images() -> None:
    assert image_columns(["prompt", "image", "images"], "images") == ["images"]
    assert image_columns(["prompt", "image"], "images") == ["image"]
    assert image_columns(["prompt", "image", "photos"], "photos") == ["photos"]
    assert image_columns(["prompt", "image"], None) == []


def test_images_of_a_pair_belong_to_the_prompt() -> None:
    record = {"prompt": "<image>?", "chosen": "4", "rejected": "5", "images": "1.png"}
    pair = parse_preference(record, "f:1", "images")
    for example in (pair.chosen, pair.rejected):
        assert [image.path for image in example.images] == ["1.png"]
        assert example.messages[0]["content"] == [OPEN, text("?")]
        assert example.first_trained_message == 1
    # Whole conversations that begin alike; images of their own distinguish conversations.
    asked = user({"type": "image", "image": "1.png"}, text("?"))
    other = user({"type": "image", "image": "2.png"}, text("?"))
    answers = [{"role": "assistant", "content": "5"}, ANSWER]
    whole = parse_preference({"chosen": [asked, ANSWER], "rejected": [asked, answers[0]]}, "f:1", "images")
    assert whole.rejected.first_trained_message == 1
    with pytest.raises(RecordError, match="do not begin with the same messages"):
        parse_preference({"chosen": [asked, ANSWER], "rejected": [other, answers[0]]}, "f:1", "images")


@pytest.mark.parametrize(
    ("turn", "images", "reason"),
    [
        (user(OPEN), None, "there are 1 part of type image without an image, and no images"),
        (user(OPEN), ["1.png", "2.png"], "there are 2 images in images, and 1 parts of type image"),
        ({"role": "user", "content": "<image> <image>"}, "1.png", "there are 1 image in images, and 2 <image> in"),
        (
            user({"type": "image", "image": "1.png"}),
            "2.png",
            "there are images both in images and in parts of type image",
        ),
        ({"role": "system", "content": "a"}, "1.png", "there are images in images, and no user turn"),
        (user({"type": "image", "image": 7}), None, r"messages\[0\].content\[0\].image is a number, expected a path"),
        (user({"type": "image", "image": "http://a/b.png"}), None, "nothing is fetched; save the image and give its"),
        (user({"type": "image", "image": "file:///b.png"}), None, "nothing is fetched"),
        (user({"type": "image", "image": "\ud800.png"}), None, "surrogate"),
        (user({"type": "image", "image": ""}), None, "is '', expected the path of an image"),
        (user({"type": "image", "image": "data:image/png,abc"}), None, "expected data:image/png;base64, and the image"),
        (user({"type": "image", "image": "data:image/png;base64,a b"}), None, "is no valid base64"),
        (user({"type": "image", "image": {"size": 3}}), None, "has neither bytes nor path nor url"),
        (user({"type": "image", "image": "a", "path": "a"}), None, "has image and path, expected one of them"),
        (user(text("a")), ["1.png", 3], r"images\[1\] is a number, expected a path"),
    ],
)
def test_reason(turn: object, images: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parsed(turn, images=images)


def test_assistants_write_text() -> None:
    answer = {"role": "assistant", "content": [{"type": "image", "image": "1.png"}]}
    with pytest.raises(RecordError, match="is an image in a turn of role assistant, expected text"):
        parse_record({"messages": [user(text("a")), answer]}, "f:1")


def reader(folder: Path | None, most: int = 48) -> ImageReader:
    return ImageReader(folder, most)


def test_an_image_is_read_and_checked_again(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a.png"
    path.write_bytes(encoded())
    stored = reader(tmp_path).check(ImageReference("sub/a.png", None, "image"))
    assert (stored.height, stored.width) == (6, 8)
    assert reader(tmp_path).decode(stored).size == (8, 6)
    path.write_bytes(encoded("JPEG"))
    with pytest.raises(RecordError, match=r"image: sub/a.png has changed since the data was read"):
        reader(tmp_path).decode(stored)
    path.unlink()
    with pytest.raises(RecordError, match="does not exist"):
        reader(tmp_path).decode(stored)


def test_an_image_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    stored = reader(None).check(ImageReference(None, encoded("JPEG", exif=exif), "image"))
    assert (stored.height, stored.width) == (8, 6)


def test_paths_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "a.png").write_bytes(encoded())
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    for path in ("../a.png", str(tmp_path / "a.png"), "link.png"):
        with pytest.raises(RecordError, match=r"leads out of .*data.image_root names another folder"):
            reader(folder).check(ImageReference(path, None, "image"))
    assert reader(tmp_path).check(ImageReference(str(tmp_path / "a.png"), None, "image")).width == 8
    with pytest.raises(RecordError, match=r"the data is not in a local folder; set data.image_root to the folder"):
        reader(None).check(ImageReference("a.png", None, "image"))


def test_folder_of_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert image_folder(str(tmp_path / "a.jsonl"), None) == tmp_path
    assert image_folder(str(tmp_path), None) == tmp_path
    assert image_folder("trl-lib/nothing", None) is None
    assert image_folder("trl-lib/nothing", "images") == Path("images")


def animated() -> bytes:
    stream = BytesIO()
    frames = [Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (0, 250)]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encoded(size=(7, 7)), r"image has 7 x 7 pixels, expected at most 48 in all \(data.max_image_pixels\)"),
        (encoded()[:-30], "image is a broken image: "),
        (encoded()[:20], "image is "),
        (b"GIF89a and nothing", "image is "),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "image is no image of a known kind, expected PNG, JPEG"),
        (animated(), "image is animated, expected an image of one frame"),
        (encoded(mode="I;16"), "16 or more bits a colour"),
        (b" " * (LARGEST_IMAGE_BYTES + 1), "image has 33,554,433 bytes, expected at most 33,554,432"),
    ],
)
def test_an_image_that_cannot_be_used(content: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        reader(None).check(ImageReference(None, content, "image"))


def test_a_bomb_is_not_decoded() -> None:
    """A header of 65,000 x 65,000 pixels with nothing behind: only the header is looked at."""
    bomb = bytearray(encoded())
    bomb[16:24] = (65000).to_bytes(4, "big") * 2
    import zlib

    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4, "big")
    with pytest.raises(RecordError, match=r"far more than 48 pixels \(data.max_image_pixels\)"):
        reader(None).check(ImageReference(None, bytes(bomb), "image"))


def test_what_is_no_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is no file"):
        reader(tmp_path).check(ImageReference(".", None, "image"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RecordError, match=r"loop"):
        reader(tmp_path).check(ImageReference("loop", None, "image"))
