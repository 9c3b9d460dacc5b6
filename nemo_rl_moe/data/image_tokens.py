# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Image tokens: the rendered text has one for each image, and the tokenized sample has as many as the model needs.

A sample keeps references to its images, because the pixels of all images would fill gigabytes. Images are decoded once
as a check, and again for each batch.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from nemo_rl_moe.data.image_files import ImageReader, StoredImage
from nemo_rl_moe.data.image_records import ImageReference
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import Example
from nemo_rl_moe.data.template_renderer import Rendered
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.models.image_rules import ImageRule, ImageSizeError, TileSizes
from nemo_rl_moe.models.images import ModelImage, image_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THREADS = 4
Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class SampleImages:
    """Images of one tokenized sample, for a vision-language model. Empty for a sample without images.

    Attributes:
        runs: For each image, the index of its first image token and the number of its image tokens.
    """

    tokens: "ImageTokenizer"
    images: tuple[StoredImage, ...]
    runs: tuple[tuple[int, int], ...]
    sample_id: str

    @property
    def end(self) -> int:
        """Index after the last image token. 0 without images."""
        return sum(self.runs[-1]) if self.runs else 0

    def is_image(self, num_tokens: int) -> Bool[np.ndarray, " tokens"]:
        mask = np.zeros(num_tokens, dtype=np.bool_)
        for first, count in self.runs:
            mask[first : first + count] = True
        return mask

    def digests(self) -> tuple[bytes, ...]:
        return tuple(image.digest for image in self.images)


def batch_inputs(samples: Sequence[tuple[SampleImages | None, int]]) -> list[dict[str, ModelInput]]:
    """Return the model's inputs besides tokens (`models.images.image_inputs`) for each sample, given its images and
    number of tokens.

    Each image is decoded once. Samples of a text-only model have None as images, and no inputs.
    """
    first_of = {image.digest: (sample, image) for sample, _ in samples if sample is not None for image in sample.images}
    decoded = _in_threads(lambda pair: pair[0].tokens.model_images(pair[1]), first_of.values())
    model_images: dict[bytes, list[ModelImage]] = {}
    for (digest, (sample, _)), found in zip(first_of.items(), decoded, strict=True):
        if isinstance(found, str):
            raise DataError(f"{sample.sample_id}: {found}")
        model_images[digest] = found
    results: list[dict[str, ModelInput]] = []
    for images, num_tokens in samples:
        if images is None:
            results.append({})
            continue
        own = [model_image for image in images.images for model_image in model_images[image.digest]]
        results.append(image_inputs(own, images.is_image(num_tokens)))
    return results


def num_images_of(images: SampleImages | None) -> int | None:
    """Return the number of a sample's images, or None if the model is text-only."""
    return None if images is None else len(images.images)


@dataclass(frozen=True)
class Expanded:
    """Token ids of a sample, and for each token of its text the number of tokens that replace it: 1 except for image
    tokens."""

    input_ids: Int[np.ndarray, " tokens"]
    repeats: Int[np.ndarray, " text_tokens"]
    images: SampleImages


@dataclass(frozen=True)
class ImageTokenizer:
    """Turns a data set's images into image tokens and pixels.

    Attributes:
        token: Text of the image token.
        before, behind: Tokens to put before and after an image's tokens, if the chat template does not write them.
    """

    rule: ImageRule
    reader: ImageReader
    token: str
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def model_images(self, image: StoredImage) -> list[ModelImage]:
        return self.rule.model_images(self.reader.decode(image))

    def check(
        self, records: Sequence[Example | PromptRecord], rendered: Sequence[Rendered | str]
    ) -> list[tuple[Rendered, tuple[StoredImage, ...]] | str]:
        """Decode the images of rendered records as a check. Return each rendering with its images, or the problem with
        the record."""
        references = [
            reference
            for record, text in zip(records, rendered, strict=True)
            if isinstance(text, Rendered)
            for reference in record.images
        ]
        read = iter(_in_threads(self._checked, references))
        results: list[tuple[Rendered, tuple[StoredImage, ...]] | str] = []
        for record, text in zip(records, rendered, strict=True):
            if isinstance(text, str):
                results.append(text)
                continue
            images = [next(read) for _ in record.images]
            problem = next((image for image in images if isinstance(image, str)), None)
            problem = problem or self._problem(record, text)
            stored = tuple(image for image in images if isinstance(image, StoredImage))
            results.append(problem if problem is not None else (text, stored))
        return results

    def _checked(self, reference: ImageReference) -> StoredImage:
        stored = self.reader.check(reference)
        try:
            self.rule.num_tokens(stored.height, stored.width)
        except ImageSizeError as error:
            raise RecordError(f"{reference.name} has {error}") from None
        return stored

    def _problem(self, record: Example | PromptRecord, rendered: Rendered) -> str | None:
        """Return the reason why image tokens and the record's images may not match, or None if they do."""
        if self.token in rendered.text and any(self.token in text for text in _texts(record.messages)):
            return f"a text contains {self.token}, which stands for an image; use a part of type image instead"
        if (shown := rendered.text.count(self.token)) != len(record.images):
            return (
                f"the chat template shows {shown} of {len(record.images)} images; set "
                "policy.tokenizer.chat_template to a template that shows them all"
            )
        return None

    def expand(
        self, input_ids: Int[np.ndarray, " text_tokens"], images: Sequence[StoredImage], max_length: int, sample_id: str
    ) -> Expanded | str:
        """Return the token ids with image tokens repeated as the model needs, or return the problem.

        Args:
            input_ids: Tokens of a checked record's text, with one image token per image. If there are more than
                `max_length` tokens, the text may have been cut, so that its last images are missing.
        """
        places = np.flatnonzero(input_ids == self.rule.token_id)
        if len(places) > len(images) or (len(places) < len(images) and len(input_ids) <= max_length):
            return f"the tokenizer makes {len(places)} image tokens of {len(images)} times the text {self.token}"
        counts = np.array([self.rule.num_tokens(image.height, image.width) for image in images], dtype=np.int64)
        around = len(self.before) + len(self.behind)
        repeats = np.ones(len(input_ids), dtype=np.int64)
        repeats[places] = counts[: len(places)] + around
        expanded = np.repeat(input_ids, repeats)
        starts = np.cumsum(repeats) - repeats
        runs = []
        for place, count in zip(places.tolist(), counts.tolist(), strict=False):
            first = int(starts[place])
            expanded[first : first + len(self.before)] = self.before
            first += len(self.before)
            runs.append((first, count))
            expanded[first + count : first + count + len(self.behind)] = self.behind
        # Images in the part that was cut off get positions beyond the maximum length, so that truncation removes them.
        runs += [(len(expanded) + max_length, int(count)) for count in counts[len(places) :]]
        return Expanded(expanded, repeats, SampleImages(self, tuple(images), tuple(runs), sample_id))


@dataclass(frozen=True)
class RecordImages:
    """How a data set's images are read and tokenized.

    Attributes:
        key: Key of a record's images next to its messages. None: such images are not read.
        tokens: Turns images into tokens. None if the model is text-only.
    """

    key: str | None = None
    tokens: ImageTokenizer | None = None

    def check(
        self, records: Sequence[Example | PromptRecord], rendered: Sequence[Rendered | str]
    ) -> list[tuple[Rendered, tuple[StoredImage, ...]] | str]:
        if self.tokens is not None:
            return self.tokens.check(records, rendered)
        for record in records:
            if record.images:
                raise DataError(
                    f"{record.sample_id}: {record.images[0].name} is an image, and the model (policy.model_name) takes "
                    "text alone; data.image_key=null ignores images next to the messages"
                )
        return [text if isinstance(text, str) else (text, ()) for text in rendered]


NO_IMAGES = RecordImages()


def image_tokenizer(rule: ImageRule, tokenizer: "PreTrainedTokenizerBase", reader: ImageReader) -> ImageTokenizer:
    """Return the object that tokenizes a data set's images for a model."""
    token = tokenizer.convert_ids_to_tokens(rule.token_id)
    if not isinstance(token, str) or tokenizer.encode(token, add_special_tokens=False) != [rule.token_id]:
        raise DataError(
            f"policy.tokenizer: token {rule.token_id}, which stands for images (image_token_id of the model), "
            f"{'is missing' if not isinstance(token, str) else f'has a text that is not encoded as it: {token!r}'}"
        )
    if not isinstance(rule.sizes, TileSizes):
        return ImageTokenizer(rule, reader, token)
    # InternVL's template only writes the image token. Its processor puts these two tokens around it.
    ends = []
    for name, usual in (("start_image_token", "<img>"), ("end_image_token", "</img>")):
        text = getattr(tokenizer, name, None) or usual
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise DataError(f"policy.tokenizer: {name} is {text!r}, which is {len(found)} tokens, expected one")
        ends.append((found[0],))
    return ImageTokenizer(rule, reader, token, *ends)


def _in_threads(work: Callable[[Given], Found], items: Iterable[Given]) -> list[Found | str]:
    """Return, for each item in order, the result of `work` or the text of its `RecordError`. Threads help, because
    decoders release the GIL."""

    def attempt(item: Given) -> Found | str:
        try:
            return work(item)
        except RecordError as error:
            return str(error)

    items = list(items)
    if not items:
        return []
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as pool:
        warnings.simplefilter("ignore")  # about odd metadata, and about sizes, which are limited here
        return list(pool.map(attempt, items))


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _texts(item)
