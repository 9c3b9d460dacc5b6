# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images in records, either in the parts of a message or next to the messages, and their positions in a conversation.

Parsing a record gives references to its images. `image_files` reads the images.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.record_values import RecordError, is_list, kind_of, require_encodable
from nemo_rl_moe.errors import DataError, counted

IMAGE_PART = "image"
IMAGE_PARTS = (IMAGE_PART, "image_url")
"""Values of `type` of a part that is an image."""
IMAGE_MARK = "<image>"
"""Text at the position of an image in records with images next to the messages, as in LLaMA-Factory."""
USUAL_KEYS = ("images", "image")
"""Usual keys of images next to the messages. LLaVA uses `image`."""
_VALUE_KEYS = ("image", "image_url", "url", "path", "bytes")
_FORMS = "expected a path, a data URL, or an object with bytes or path"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:(?:image/[A-Za-z0-9.+-]+|image)?(?:;[A-Za-z0-9.+-]+=[^;,]*)*;base64,")


@dataclass(frozen=True)
class ImageReference:
    """Reference to an image in a record.

    Attributes:
        path: Path of the image. None if the record contains the image itself.
        content: The encoded image. None if it is read from `path`.
        name: Position of the image in the record, such as `images[0]`, for error messages. Equality ignores the name.
    """

    path: str | None
    content: bytes | None = field(repr=False)
    name: str = field(compare=False)

    def identity(self) -> str:
        """Return a text that identifies the image: the path, or a digest of the content."""
        return f"path {self.path}" if self.content is None else blake2b(self.content, digest_size=16).hexdigest()


def parse_image(value: object, name: str) -> ImageReference:
    """Parse an image, which is a path, a data URL, `{"bytes": ..., "path": ...}` as stored by `datasets`, or `{"url":
    ...}`."""
    if isinstance(value, bytes):
        return ImageReference(None, value, name)
    if isinstance(value, str):
        return _parse_text(value, name)
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} is {kind_of(value)}, {_FORMS}")
    if isinstance(value.get("bytes"), bytes):
        return ImageReference(None, value["bytes"], name)
    given = [key for key in ("path", "url") if value.get(key) is not None]
    if not given:
        raise RecordError(f"{name} has neither bytes nor path nor url, {_FORMS}")
    found = value[given[0]]
    if not isinstance(found, str):
        raise RecordError(f"{name}.{given[0]} is {kind_of(found)}, expected a string")
    return _parse_text(found, f"{name}.{given[0]}")


def _parse_text(text: str, name: str) -> ImageReference:
    require_encodable(text, name)
    if text.startswith("data:"):
        head = _DATA_URL.match(text)
        if head is None:
            raise RecordError(f"{name} is {shortened(text)}, expected data:image/png;base64, and the image")
        try:
            return ImageReference(None, base64.b64decode(text[head.end() :], validate=True), name)
        except (binascii.Error, ValueError) as error:
            raise RecordError(f"{name} is no valid base64: {error}") from None
    if _ADDRESS.match(text):
        raise RecordError(f"{name} is {shortened(text)}: nothing is fetched; save the image and give its path")
    if not text or "\0" in text:
        raise RecordError(f"{name} is {text!r}, expected the path of an image")
    return ImageReference(text, None, name)


def parse_image_part(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse and return a part of type image. Its image is None if the part only marks the position of an image."""
    given = [key for key in _VALUE_KEYS if part.get(key) is not None]
    if not given:
        return {"type": IMAGE_PART, IMAGE_PART: None}
    if len(given) > 1:
        raise RecordError(f"{name} has {' and '.join(given)}, expected one of them")
    key = given[0]
    return {"type": IMAGE_PART, IMAGE_PART: parse_image(part[key], f"{name}.{key}")}


def parse_images(value: object, name: str) -> list[ImageReference]:
    """Parse the images next to the messages: an image, a list of images, or null."""
    if value is None:
        return []
    if not is_list(value):
        return [parse_image(value, name)]
    return [parse_image(item, f"{name}[{index}]") for index, item in enumerate(value)]


def image_columns(names: Sequence[str], key: str | None) -> list[str]:
    """Return the columns of a table that hold images: the column `key` or, if the table lacks it, the usual keys. None
    as `key`: no column."""
    wanted = [] if key is None else [key] if key in names else USUAL_KEYS
    return [name for name in wanted if name in names]


def require_image_key(
    messages: Sequence[dict[str, Any]], record: Mapping[str, Any], key: str | None, sample_id: str
) -> None:
    """Raise `DataError` if texts contain `<image>` and the record has images under another usual key than `key`.

    If `key` is None, such images are ignored on purpose.
    """
    if key is None or not any(_images_in(_with_parts_for_marks(message)) for message in messages):
        return
    for name in USUAL_KEYS:
        if name != key and _has_images(record.get(name), name):
            raise DataError(
                f"{sample_id}: there are images in {name}, and {IMAGE_MARK} in the texts, expected images in {key} "
                f"(data.image_key); set data.image_key={name} to read the images, or null to read {IMAGE_MARK} as text"
            )


def _has_images(value: object, name: str) -> bool:
    try:
        return bool(parse_images(value, name))
    except RecordError:
        return False


def place_images(
    messages: Sequence[dict[str, Any]], images: Sequence[ImageReference], key: str | None
) -> list[dict[str, Any]]:
    """Return the messages with the record's images inserted.

    Images fill, in order, the parts of type image that have no image. If there are no such parts, images replace each
    `<image>` in texts other than the assistant's. If there is no `<image>` either, images precede the text of the first
    user turn. Raises `RecordError` if the number of positions differs from the number of images.
    """
    parts = [part for message in messages for part in _images_in(message)]
    open_parts = sum(part[IMAGE_PART] is None for part in parts)
    missing = "data.image_key is null" if key is None else f"no {key}"
    if not images:
        if open_parts:
            raise RecordError(f"there are {counted(open_parts, 'part')} of type image without an image, and {missing}")
        return list(messages)
    if len(parts) > open_parts:
        raise RecordError(f"there are images both in {key} and in parts of type image, expected only one of the two")
    if open_parts:
        _require_as_many(open_parts, "parts of type image", images, key)
        return _filled(messages, images)
    marked = [_with_parts_for_marks(message) for message in messages]
    if num_marks := sum(len(_images_in(message)) for message in marked):
        _require_as_many(num_marks, f"{IMAGE_MARK} in the texts", images, key)
        return _filled(marked, images)
    asked = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        raise RecordError(f"there are images in {key}, and no user turn that could show them")
    open_part = {"type": IMAGE_PART, IMAGE_PART: None}
    shown = {**messages[asked], "content": [*[open_part] * len(images), *_as_parts(messages[asked]["content"])]}
    return _filled([*messages[:asked], shown, *messages[asked + 1 :]], images)


def take_images(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[ImageReference, ...]]:
    """Return messages for chat templates, in which each image is `{"type": "image"}`, and the images in order."""
    found = tuple(part[IMAGE_PART] for message in messages for part in _images_in(message))
    if not found:
        return list(messages), ()
    return [
        {**message, "content": [{"type": IMAGE_PART} if _is_image(part) else part for part in message["content"]]}
        if _images_in(message)
        else message
        for message in messages
    ], found


def without_content(value: Any) -> Any:
    """Return a value of a record without encoded images. Paths of images stay."""
    if isinstance(value, Mapping):
        return {key: without_content(item) for key, item in value.items() if not isinstance(item, bytes)}
    if is_list(value):
        return [without_content(item) for item in value]
    return None if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image")) else value


def _is_image(part: Mapping[str, Any]) -> bool:
    return part["type"] == IMAGE_PART


def _images_in(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if _is_image(part)] if isinstance(content, list) else []


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _with_parts_for_marks(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "assistant" or not isinstance(content, str) or IMAGE_MARK not in content:
        return message
    first, *others = content.split(IMAGE_MARK)
    parts = _as_parts(first)
    for text in others:
        parts = [*parts, {"type": IMAGE_PART, IMAGE_PART: None}, *_as_parts(text)]
    return {**message, "content": parts}


def _filled(messages: Sequence[dict[str, Any]], images: Sequence[ImageReference]) -> list[dict[str, Any]]:
    waiting = iter(images)

    def fill(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, IMAGE_PART: next(waiting)} if _is_image(part) else part

    return [
        {**message, "content": [fill(part) for part in message["content"]]} if _images_in(message) else message
        for message in messages
    ]


def _require_as_many(places: int, what: str, images: Sequence[ImageReference], key: str | None) -> None:
    if places != len(images):
        raise RecordError(f"there are {counted(len(images), 'image')} in {key}, and {places} {what}")
