# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the data of the task of coloured shapes: images of 32 x 32 pixels with a question and a one-word answer.

    python examples/make_shapes_data.py --output data/shapes

Four questions are equally frequent: the number of shapes, the number with one colour, the colour of the largest shape,
and the side with more dots. Writes `train.jsonl` and `validation.jsonl` for SFT, `grpo_train.jsonl` and
`grpo_validation.jsonl` for GRPO, and a folder `images` with PNG files. The same seed gives the same files. Sets have no
image with the same question in common.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.demo_data import holds, show_progress

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIDE = 32
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
}
KINDS = ("circle", "square", "triangle")
TASKS = ("count", "count_colour", "largest", "side")
FILES = ("train.jsonl", "validation.jsonl", "grpo_train.jsonl", "grpo_validation.jsonl")
_BACKGROUND, _DOT, _LINE = (245, 245, 245), (20, 20, 20), (150, 150, 150)
_CELL = 8
_MADE_BY = "examples/make_shapes_data.py"


@dataclass(frozen=True)
class Parameters:
    """All parameters of the data."""

    seed: int
    num_train: int
    num_validation: int
    num_grpo_prompts: int


@dataclass(frozen=True)
class Item:
    """One image with a question, in the tiny models' vocabulary, and a one-word answer."""

    png: bytes
    question: str
    answer: str


def draw_item(chance: Random, task: str) -> Item:
    """Draw an image and its question for one of `TASKS`."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), _BACKGROUND)
    question, answer = _DRAW[task](chance, ImageDraw.Draw(image))
    return Item(_as_png(image), question, answer)


def _as_png(image: "Image") -> bytes:
    stream = BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _shape(draw: "ImageDraw", kind: str, colour: str, centre: tuple[int, int], radius: int) -> None:
    (x, y), fill = centre, COLOURS[colour]
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        draw.ellipse(box, fill=fill)
    elif kind == "square":
        draw.rectangle(box, fill=fill)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)


def _centres(chance: Random, number: int) -> list[tuple[int, int]]:
    """Return the centres of different random cells."""
    cells = [(column, row) for column in range(SIDE // _CELL) for row in range(SIDE // _CELL)]
    return [(column * _CELL + 4, row * _CELL + 4) for column, row in chance.sample(cells, number)]


def _scattered(chance: Random, draw: "ImageDraw", number: int) -> list[str]:
    """Draw shapes of one size, and return their colours."""
    colours = [chance.choice(list(COLOURS)) for _ in range(number)]
    for colour, centre in zip(colours, _centres(chance, number), strict=True):
        _shape(draw, chance.choice(KINDS), colour, centre, 3)
    return colours


def _count(chance: Random, draw: "ImageDraw") -> tuple[str, str]:
    return "how many shapes ?", str(len(_scattered(chance, draw, chance.randint(1, 6))))


def _count_colour(chance: Random, draw: "ImageDraw") -> tuple[str, str]:
    colours = _scattered(chance, draw, chance.randint(1, 6))
    asked = chance.choice([*colours, *chance.sample(list(COLOURS), 2)])  # sometimes no shape has it
    return f"how many {asked} shapes ?", str(colours.count(asked))


def _largest(chance: Random, draw: "ImageDraw") -> tuple[str, str]:
    colours = chance.sample(list(COLOURS), chance.randint(2, 3))
    centres = _centres(chance, len(colours))
    for colour, centre in zip(colours[1:], centres[1:], strict=True):
        _shape(draw, chance.choice(KINDS), colour, centre, 2)
    _shape(draw, chance.choice(KINDS), colours[0], centres[0], 5)
    return "colour of the largest shape ?", colours[0]


def _side(chance: Random, draw: "ImageDraw") -> tuple[str, str]:
    left, right = chance.sample(range(1, 7), 2)
    spots = [(column, row) for column in range(2) for row in range(SIDE // _CELL)]
    for number, start in ((left, 0), (right, SIDE // 2)):
        for column, row in chance.sample(spots, number):
            x, y = start + 4 + column * 7, 4 + row * _CELL
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=_DOT)
    draw.line((SIDE // 2, 0, SIDE // 2, SIDE), fill=_LINE)
    return "which side has more dots ?", "left" if left > right else "right"


_DRAW: dict[str, Callable[[Random, "ImageDraw"], tuple[str, str]]] = {
    "count": _count,
    "count_colour": _count_colour,
    "largest": _largest,
    "side": _side,
}


def draw_sets(parameters: Parameters, progress: Callable[[int], None] = lambda _: None) -> dict[str, list[Item]]:
    """Make the sets `validation`, `grpo` and `train`, in this order, without repeats."""
    chance = Random(f"shapes {parameters.seed}")
    seen: set[tuple[bytes, str]] = set()
    sizes = {
        "validation": parameters.num_validation,
        "grpo": parameters.num_grpo_prompts,
        "train": parameters.num_train,
    }
    sets: dict[str, list[Item]] = {}
    for name, size in sizes.items():
        items: list[Item] = []
        while len(items) < size:
            item = draw_item(chance, TASKS[len(items) % len(TASKS)])
            key = (hashlib.sha256(item.png).digest(), item.question)
            if key not in seen:
                seen.add(key)
                items.append(item)
                if len(seen) % 100 == 0:
                    progress(len(seen))
        chance.shuffle(items)
        sets[name] = items
    return sets


def as_conversations(items: Sequence[Item], paths: Sequence[str]) -> list[str]:
    """Return one JSON object for SFT per item."""
    return [
        json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": path}, {"type": "text", "text": item.question}],
                    },
                    {"role": "assistant", "content": item.answer},
                ]
            }
        )
        for item, path in zip(items, paths, strict=True)
    ]


def as_questions(items: Sequence[Item], paths: Sequence[str]) -> list[str]:
    """Return one JSON object for GRPO per item."""
    return [
        json.dumps({"question": item.question, "answer": item.answer, "images": [path]})
        for item, path in zip(items, paths, strict=True)
    ]


def write_data(folder: Path, parameters: Parameters, progress: Callable[[int], None] = lambda _: None) -> None:
    """Make the sets and write the files, the manifest last. Removes images from earlier calls.

    Raises:
        OSError: The files cannot be written, or a folder `images` has other content.
    """
    sets = draw_sets(parameters, progress)
    if (folder / "images").exists():
        if not _is_ours(folder):
            raise OSError("there is a folder images, which this script has not made; name another folder")
        shutil.rmtree(folder / "images")
    write_whole(folder / "manifest.json", json.dumps({"made_by": _MADE_BY}))  # allows the next call after an interrupt
    paths: dict[str, list[str]] = {}
    for name, items in sets.items():
        (folder / "images" / name).mkdir(parents=True)
        paths[name] = [f"images/{name}/{number:06d}.png" for number in range(len(items))]
        for item, path in zip(items, paths[name], strict=True):
            (folder / path).write_bytes(item.png)
    contents = (
        as_conversations(sets["train"], paths["train"]),
        as_conversations(sets["validation"], paths["validation"]),
        as_questions(sets["grpo"], paths["grpo"]),
        as_questions(sets["validation"], paths["validation"]),
    )
    for name, lines in zip(FILES, contents, strict=True):
        write_whole(folder / name, "".join(f"{line}\n" for line in lines))
    write_whole(folder / "manifest.json", json.dumps(_manifest(folder, parameters), indent=2) + "\n")


def is_made(folder: Path, parameters: Parameters) -> bool:
    """Return whether `write_data` would change nothing in the folder."""
    return holds(folder, lambda: _manifest(folder, parameters))


def _is_ours(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["made_by"] == _MADE_BY)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _manifest(folder: Path, parameters: Parameters) -> dict[str, object]:
    images = hashlib.sha256()
    for path in sorted((folder / "images").rglob("*.png")):
        images.update(path.read_bytes())
    return {
        "made_by": _MADE_BY,
        "parameters": asdict(parameters),
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
        | {"images": images.hexdigest()},
    }


def _parse(arguments: list[str] | None) -> tuple[Path, Parameters, bool]:
    parser = argparse.ArgumentParser(description="Makes the data of the task of coloured shapes.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="not negative (default %(default)s)")
    parser.add_argument("--num-train", type=int, default=20_000, help="default %(default)s")
    parser.add_argument("--num-validation", type=int, default=256, help="default %(default)s")
    parser.add_argument("--num-grpo-prompts", type=int, default=4000, help="kept out of training (default %(default)s)")
    parser.add_argument("--force", action="store_true", help="make the files even if they are there")
    chosen = parser.parse_args(arguments)
    sizes = {"seed": 0, "num_train": 1, "num_validation": 1, "num_grpo_prompts": 1}
    for name, least in sizes.items():
        if getattr(chosen, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(chosen, name)}, expected {least} or more")
    parameters = Parameters(**{name: getattr(chosen, name) for name in sizes})
    return chosen.output, parameters, chosen.force


def main(arguments: list[str] | None = None) -> int:
    """Make the data unless it exists, and return the exit code."""
    folder, parameters, force = _parse(arguments)
    total = parameters.num_train + parameters.num_validation + parameters.num_grpo_prompts
    try:
        if not force and is_made(folder, parameters):
            print(f"{folder}: already made with these parameters (--force makes it anew)")
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder, parameters, show_progress("images", total))
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        print("the images need Pillow: pip install pillow", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--output {folder}: {error}", file=sys.stderr)
        return 2
    print(
        f"{folder}: wrote {parameters.num_train:,} images for SFT, {parameters.num_grpo_prompts:,} for GRPO and"
        f" {parameters.num_validation:,} to validate with"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
