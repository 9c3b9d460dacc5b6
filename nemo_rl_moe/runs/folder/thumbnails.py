# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`thumbnails`: small PNG files of the samples' model images, named by digest.

A model image is an input of the model: an image, or a tile of one, after the model's preprocessing.
"""

import re
from collections.abc import Callable, Collection, Iterable
from io import BytesIO
from pathlib import Path
from typing import Protocol

import numpy as np

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.shapes import UInt8

FOLDER_NAME = "thumbnails"
LONGEST_SIDE = 96
"""Largest number of pixels of the longer side. Smaller model images keep their size."""
IMAGES_OF_A_SAMPLE = 4
MOST_THUMBNAILS = 2000
"""Largest number of thumbnails of a run."""
MOST_BYTES = 64 << 10
"""Largest size of a file that is read, in bytes. 96 x 96 incompressible pixels take 28 kB."""
_NAME = re.compile(r"[0-9a-f]{16}")
_FILE_NAME = re.compile(rf"\.?{_NAME.pattern}\.png(\.incomplete)?")


class SavedImage(Protocol):
    """The part of `models.images.Image` that is used here."""

    @property
    def pixels(self) -> UInt8[np.ndarray, "height width 3"]: ...
    @property
    def digest(self) -> int: ...


class ThumbnailWriter:
    """Writer of thumbnails. It writes each model image once in a run.

    If the disk fails, it warns once, and samples have no thumbnails until it works again.
    """

    def __init__(self, run_folder: Path, warn: Callable[[str], None]):
        self._folder = run_folder / FOLDER_NAME
        self._warn = warn
        self._has_failed = self._is_full = False
        self._written: set[str] | None = None

    def write(self, model_images: Iterable[SavedImage]) -> list[str]:
        """Write thumbnails of the first model images of a sample, and return the names of the existing files."""
        names = []
        for model_image in list(model_images)[:IMAGES_OF_A_SAMPLE]:
            try:
                if self._has(model_image):
                    names.append(_name_of(model_image))
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    self._warn(f"{self._folder} cannot be written, samples have no images: {one_line(error)}")
        return names

    def _has(self, model_image: SavedImage) -> bool:
        """Return whether the file of a thumbnail exists. Write a missing file unless the limit of files is reached."""
        if self._written is None:  # a resumed run already has thumbnails
            self._folder.mkdir(parents=True, exist_ok=True)
            self._written = {path.stem for path in self._folder.glob("*.png")}
        name = _name_of(model_image)
        path = self._folder / f"{name}.png"
        # A user may have deleted the run's folder, and every validation needs the images of its prompts.
        if name in self._written and path.is_file():
            return True
        if len(self._written - {name}) >= MOST_THUMBNAILS:
            if not self._is_full:
                self._is_full = True
                self._warn(f"{self._folder} holds {MOST_THUMBNAILS:,} images; samples with others have none")
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, thumbnail_of(model_image.pixels))
        self._written.add(name)
        return True


def thumbnail_of(pixels: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Return a model image as a PNG file of at most 96 pixels at its longer side."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def is_thumbnail_name(name: object) -> bool:
    """Return whether a name has the writer's form. Other names must not get into paths."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def read_thumbnail(run_folder: Path, name: str) -> bytes:
    """Return the content of a thumbnail's file. Raise an error if it is too large or cannot be decoded."""
    from PIL import Image

    path = run_folder / FOLDER_NAME / f"{name}.png"
    try:
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: is no file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise DataError(f"{path}: has more than {MOST_BYTES:,} bytes")
        with Image.open(BytesIO(content), formats=("PNG",)) as image:
            if max(image.size) > LONGEST_SIDE:
                raise DataError(
                    f"{path}: has {image.width} x {image.height} pixels, expected at most {LONGEST_SIDE} a side"
                )
            image.load()
    except DataError:
        raise
    except Exception as error:  # a decoder fails in many ways
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from None
    return content


def remove_thumbnails(run_folder: Path, named: Collection[str]) -> None:
    """Remove thumbnails whose names are not in `named`. Other files stay."""
    folder = run_folder / FOLDER_NAME
    for path in folder.iterdir() if folder.is_dir() else ():
        if _FILE_NAME.fullmatch(path.name) and path.stem not in named:
            path.unlink()


def _name_of(model_image: SavedImage) -> str:
    return f"{model_image.digest:016x}"
