# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images in records that nobody has thought of, through `data`: reported once by file and line, or taken beside
others."""

import base64
import copy
import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import REPOSITORY_ROOT
from tests.support.fuzzing import Case, Output, command, fuzz
from tests.support.mutations import mutated_bytes, mutated_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODELS = ("tiny_qwen3_vl_moe", "tiny_internvl_moe")
ANSWER = {"role": "assistant", "content": "4"}
MOST_TOKENS = 2_000
SURROGATE = "\ud800.png"


def parts(question: str, *images: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}],
    }


def records(question: str, algorithm: str, images: Any) -> list[dict[str, Any]]:
    """A question in the forms that an algorithm reads, with images in its parts or beside it."""
    several = images if isinstance(images, list) else [images]
    asked = parts(question, *several)
    marked = {"role": "user", "content": "<image>" * len(several) + question}
    if algorithm == "sft":
        forms = [{"messages": [turn, ANSWER]} for turn in (asked, marked)] + [{"prompt": question, "completion": "4"}]
    elif algorithm == "dpo":
        forms = [{"prompt": prompt, "chosen": "4", "rejected": "5"} for prompt in ([asked], [marked], question)]
    else:
        forms = [{"prompt": prompt, "answer": "4"} for prompt in ([asked], [marked], question)]
    return [forms[0], *({**form, "images": images} for form in forms[1:])]


def encoded(generator: random.Random, kind: str, mode: str, width: int, height: int) -> bytes:
    """An image in some format; another mode where the format has no such pixels."""
    pixels = np.random.default_rng(generator.randrange(100)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = BytesIO()
    image = Image.fromarray(pixels)
    try:
        image.convert(mode).save(stream, kind)
    except (OSError, ValueError, KeyError):
        stream = BytesIO()
        image.save(stream, "PNG")
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more than there is."""
    header = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0" * 30


def any_image(generator: random.Random) -> tuple[bytes, str]:
    """Bytes of an image of any kind and size, and what it is."""
    if generator.random() < 0.1:
        width, height = generator.choice([(60_000, 60_000), (0, 5), (2**31, 1), (300, 300)])
        return bomb(width, height), f"a header of {width} x {height}"
    kind = generator.choice(["PNG", "PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000"])
    mode = generator.choice(["RGB", "RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F", "YCbCr"])
    width, height = generator.choice([(32, 32), (1, 1), (7, 5), (1, 900), (900, 1), (300, 300), (33, 64)])
    return encoded(generator, kind, mode, width, height), f"{kind} {mode} of {width} x {height}"


def data_url(content: bytes, generator: random.Random) -> str:
    head = generator.choice(
        ["data:image/png;base64,"] * 6 + ["data:;base64,", "data:image/png,", "data:text/html;base64,"]
    )
    return head + base64.b64encode(content).decode()


def odd_value(generator: random.Random, folder: Path) -> tuple[Any, str]:
    """A value where an image is expected, and what it is."""
    content, what = any_image(generator)
    how = generator.choice(["file", "file", "spoiled file", "spoiled file", "url", "spoiled url", "form", "form"])
    if how.startswith("spoiled"):
        content, change = mutated_bytes(generator, content)
        what = f"{what}, {change}"
    if how.endswith("file"):
        name = generator.choice(["odd.png", "odd.jpg", "odd", "ö d%20d.png"])
        (folder / name).write_bytes(content)
        return name, f"{how} {name}: {what}"
    if how.endswith("url"):
        url = data_url(content, generator)
        if generator.random() < 0.3:
            spoiled, change = mutated_bytes(generator, url.encode())
            url, what = spoiled.decode("latin-1"), f"{what}, {change} of the URL"
        return url, f"{how}: {what}"
    values: list[Any] = [
        *(None, "", "no.png", "\0", "a\0b.png", SURROGATE, "a" * 300 + ".png", "a/" * 3000, ".", "..", "/", "a.png/"),
        *("../a.png", "/etc/passwd", "/dev/zero", "/dev/stdin", "a.png\n", " a.png", "~/a.png", "folder", "loop"),
        *("http://a/b.png", "file:///etc/passwd", "s3://a/b", "data:", "data:image/png;base64,", "\x1b[2J.png"),
        *(0, -1, True, 1e400, [], {}, [[]], [["a.png"]], {"path": 3}, {"bytes": "abc"}, {"bytes": None, "path": None}),
        *({"url": "a.png"}, {"path": "a.png", "url": "b.png"}, {"url": {"url": "a.png"}}, [None], ["a.png", None]),
        *(["a.png"] * 60, {"path": "a.png", "bytes": ""}, [0.5, {"path": ["a.png"]}], {"image": "a.png"}),
    ]
    value = generator.choice(values)
    return value, f"the value {value!r:.80}"


def spoiled_record(generator: random.Random, algorithm: str, folder: Path) -> tuple[bytes, str]:
    """A line with something odd about its images."""
    question = generator.choice(["which side has more dots ?", "<image> ?", "", "<|image_pad|>", "<IMG_CONTEXT> <img>"])
    how = generator.choice(["value", "value", "value", "tree", "marks", "bytes"])
    if how == "value":
        value, what = odd_value(generator, folder)
        record = generator.choice(records(question, algorithm, value))
        return json.dumps(record).encode(), f"{what}, question {question!r}"
    record = copy.deepcopy(generator.choice(records(question, algorithm, ["a.png", "b.jpg"])))
    if how == "tree":
        line, what = mutated_json(generator, record)
        return line.replace(b"\n", b" "), what
    if how == "marks":
        key = generator.choice(["images", "image", "photos"])
        marks, images = "<image> " * generator.randrange(5), ["a.png"] * generator.randrange(4)
        record = {**generator.choice(records(marks + question, algorithm, [])), key: images}
        return json.dumps(record).encode(), f"{marks}and {len(images)} images in {key}, question {question!r}"
    line, what = mutated_bytes(generator, json.dumps(record).encode())
    return line.replace(b"\n", b" "), what


def reported_once(number: int) -> Callable[[Output], str | None]:
    """Judgement of a refusal: one message, of the file and the line."""

    def refusal(output: Output) -> str | None:
        heads = re.findall(r"train\.jsonl:(\d+)(?: \((?:chosen|rejected)\))?: ", output.errors)
        return None if heads == [str(number)] else f"reported for are lines {heads}, expected {number}: {output.errors}"

    return refusal


def images(generator: random.Random, folder: Path) -> Case:
    algorithm = generator.choice(["sft", "dpo", "grpo"])
    for name, kind in (("a.png", "PNG"), ("b.jpg", "JPEG")):
        (folder / name).write_bytes(encoded(generator, kind, "RGB", 32, 24))
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    good = [records(f"how many {colour} shapes ?", algorithm, "a.png") for colour in ("red", "blue", "green")]
    lines = [json.dumps(forms[number]).encode() for number, forms in enumerate(good)]
    line, what = spoiled_record(generator, algorithm, folder)
    place = generator.randrange(len(lines) + 1)
    lines.insert(place, line)
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    on_bad_line, model = generator.choice(["stop", "stop", "skip"]), generator.choice(MODELS)
    more = ["env.name=math", "env.reasoning_gym=null", "data.answer_key=answer", "policy.generation.max_new_tokens=9"]
    run = command(
        "data",
        *("--config", f"{algorithm}_tiny_moe.yaml", "--show", "50"),
        *(f"policy.model_name={REPOSITORY_ROOT / 'examples/assets' / model}", "policy.init=random"),
        *(f"policy.max_total_sequence_length={MOST_TOKENS}", f"data.on_bad_line={on_bad_line}"),
        *(f"data.max_image_pixels={generator.choice([90_000, 2_000])}",),
        *(f"data.train.path={path}", "data.validation=null", *(more if algorithm == "grpo" else [])),
    )

    def difference(output: Output) -> str | None:
        shown = set(map(int, re.findall(r"train\.jsonl:(\d+)", output.printed)))
        lacking = set(range(1, len(lines) + 1)) - {place + 1} - shown
        return f"records {sorted(lacking)} are not shown" if lacking else None

    what = f"{algorithm}, {model}, {on_bad_line}, line {place + 1}: {what}"
    return Case(what, run, difference, reported_once(place + 1))


def test_images(tmp_path: Path) -> None:
    fuzz(images, tmp_path)
