# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and decoding of images, with limits on folder, file size, number of pixels and kind of file."""

from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.data.image_records import ImageReference
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.errors import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_IMAGE_BYTES = 32 << 20
"""Maximum size of an encoded image."""
_KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MANY_BITS = ("I", "F")
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class StoredImage:
    """An image that has been read and decoded once. Height and width are in pixels, after the rotation that its
    metadata demands."""

    reference: ImageReference
    digest: bytes
    height: int
    width: int


@dataclass(frozen=True)
class ImageReader:
    """Reads a data set's images. Paths of images are relative to `folder`, and may not leave it."""

    folder: Path | None
    max_pixels: int

    def check(self, reference: ImageReference) -> StoredImage:
        """Read and decode an image as a check. Return only its digest and size."""
        content = self._content(reference)
        image = self._decoded(content, reference.name)
        return StoredImage(reference, _digest(content), image.height, image.width)

    def decode(self, stored: StoredImage) -> "Image":
        """Return the decoded image in RGB."""
        content = self._content(stored.reference)
        if _digest(content) != stored.digest:
            raise RecordError(f"{stored.reference.name}: {stored.reference.path} has changed since the data was read")
        return self._decoded(content, stored.reference.name)

    def _content(self, reference: ImageReference) -> bytes:
        content = self._content_of_file(reference) if reference.content is None else reference.content
        if len(content) > LARGEST_IMAGE_BYTES:
            raise RecordError(f"{reference.name} has {len(content):,} bytes, expected at most {LARGEST_IMAGE_BYTES:,}")
        return content

    def _content_of_file(self, reference: ImageReference) -> bytes:
        assert reference.path is not None
        if self.folder is None:
            raise RecordError(
                f"{reference.name} is the path {reference.path}, but the data is not in a local folder; set"
                " data.image_root to the folder of the images"
            )
        try:
            folder = self.folder.resolve()
            path = (folder / reference.path).resolve()
            if not path.is_relative_to(folder):
                raise RecordError(
                    f"{reference.name}: {reference.path} leads out of {self.folder}, the folder of the data; "
                    "data.image_root names another folder that holds the images"
                )
            if not path.is_file():
                what = "is no file" if path.exists() else "does not exist"
                raise RecordError(f"{reference.name}: {path} {what}")
            with path.open("rb") as file:
                return file.read(LARGEST_IMAGE_BYTES + 1)
        except (OSError, RuntimeError) as error:  # RuntimeError is raised for a link to itself
            raise RecordError(f"{reference.name}: {reference.path} cannot be read: {one_line(error)}") from None

    def _decoded(self, content: bytes, name: str) -> "Image":
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with Image.open(BytesIO(content), formats=_KINDS) as image:
                self._require_usable(image, name)
                return ImageOps.exif_transpose(image).convert("RGB")
        except RecordError:
            raise
        except UnidentifiedImageError:
            raise RecordError(f"{name} is no image of a known kind, expected {', '.join(_KINDS)}") from None
        except Image.DecompressionBombError:
            raise RecordError(f"{name} has far more than {self.max_pixels:,} pixels (data.max_image_pixels)") from None
        except Exception as error:  # the decoders raise many types
            raise RecordError(f"{name} is a broken image: {one_line(error)}") from None

    def _require_usable(self, image: "Image", name: str) -> None:
        """Raise `RecordError` if the header of an image shows that it cannot be used. The image is not decoded for
        this."""
        if image.width * image.height > self.max_pixels:
            raise RecordError(
                f"{name} has {image.height} x {image.width} pixels, expected at most {self.max_pixels:,} in all "
                "(data.max_image_pixels)"
            )
        # A camera's JPEG (MPO) may contain a small second image.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise RecordError(f"{name} is animated, expected an image of one frame")
        if image.mode.startswith(_MANY_BITS):
            raise RecordError(f"{name} has 16 or more bits a colour (mode {image.mode}), expected 8")


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def image_folder(data_path: str | None, image_root: str | None) -> Path | None:
    """Return the folder to which paths of images are relative: `data.image_root`, or the data's folder. None for data
    on the hub."""
    if image_root is not None:
        return Path(image_root)
    if data_path is None:
        return None
    path = Path(data_path)
    return path if path.is_dir() else path.parent if path.is_file() else None
