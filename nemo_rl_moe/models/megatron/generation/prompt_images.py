# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images of prompts in generation. The tower runs once for a batch, and the features go into the slots of the cache."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.models.families.vision import TowerOutput
from nemo_rl_moe.models.image_positions import image_positions
from nemo_rl_moe.models.images import IMAGE_IDS, IMAGE_SIZES, IS_IMAGE, PIXELS, has_its_pixels
from nemo_rl_moe.models.megatron.model.vision_model import VisionInput

Inputs = Mapping[str, ModelInput]
_OF_IMAGES = frozenset({PIXELS, IMAGE_SIZES, IMAGE_IDS, IS_IMAGE})


def input_problem(inputs: Inputs, chunk: Any, num_tokens: int) -> str | None:
    """Return the problem of a prompt's model inputs, as the rest of a sentence, or None if they are valid."""
    if not inputs:
        return None
    if not isinstance(chunk, VisionInput):
        return f"has other inputs than tokens ({', '.join(sorted(inputs))}), but the model takes text alone"
    if inputs.keys() != _OF_IMAGES:
        found, expected_names = (", ".join(sorted(names)) for names in (inputs, _OF_IMAGES))
        return f"has the inputs {found}, expected {expected_names}, the result of image_inputs()"
    is_image, sizes = inputs[IS_IMAGE].values, inputs[IMAGE_SIZES].values
    if len(is_image) > num_tokens:
        return f"has {num_tokens} tokens, but {IS_IMAGE} describes {len(is_image)}"
    if not has_its_pixels(inputs):
        return f"has {PIXELS} or {IMAGE_IDS} that do not match its {len(sizes)} {IMAGE_SIZES}"
    family, expected = chunk.family, 0
    side = family.pixels_per_token(chunk.hf_config)
    for height, width in sizes.tolist():
        if height % side or width % side or not height * width:
            return f"has an image of {height} x {width} pixels, expected multiples of {side}"
        expected += family.num_image_tokens(chunk.hf_config, height, width)
    marked = int(is_image.sum())
    if marked != expected:
        return f"has {marked} image tokens, expected {expected}, which is what its {len(sizes)} images give"
    return None


def identity_of(inputs: Inputs) -> Hashable:
    """Return a value that is equal for two prompts with equal images at the same tokens."""
    return tuple(inputs[name].values.tobytes() for name in (IMAGE_IDS, IS_IMAGE) if inputs)


class PromptImages:
    """Images of the prompts of a generation batch, on one pipeline stage.

    The vision tower's output is kept once for each distinct image. For each slot (token position of the key-value
    cache) with an image token, the index of its row in this output is kept.

    Attributes:
        positions: 3D positions of the slots, `[3, rows or 1, slots]`, or None for a family without 3D positions.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        inputs: Sequence[Inputs],
        first_slots: Sequence[int],
        num_slots: int,
        device: torch.device,
    ):
        first = chunks[0]
        images = _ImagesOfPrompts(inputs, first_slots, num_slots, first)
        self.positions = images.positions().to(device) if first.family.has_mrope else None
        self._features: TowerOutput | None = None
        self._end = 0
        if first.pre_process and images.sizes:
            # Training could not use tensors that the tower caches in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._features = first.image_features(images.distinct(device))
            self._numbers = images.feature_numbers().to(device)
            self._end = images.end

    def place(
        self, hidden: Float[Tensor, "columns rows hidden"], first_slot: int
    ) -> tuple[Float[Tensor, "columns rows hidden"], list[Float[Tensor, "columns rows hidden"]]]:
        """Return the embeddings with features for image tokens, and the features to add after each of the first layers.

        Args:
            first_slot: Slot of the first column of `hidden`, the word embeddings.
        """
        if self._features is None or first_slot >= self._end:
            self._features = None  # no later slot needs them
            return hidden, []
        numbers = self._numbers[first_slot : first_slot + len(hidden)]
        is_image, rows = (numbers != _WORD)[..., None], numbers.clamp(min=0)
        embeddings, *deep = (
            torch.nn.functional.embedding(rows, features.to(hidden.dtype))
            for features in (self._features.embeddings, *self._features.deep)
        )
        return embeddings.where(is_image, hidden), [each.where(is_image, 0.0) for each in deep]

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        if self.positions is not None and self.positions.shape[1] > 1:
            self.positions = self.positions.index_select(1, rows)
        if self._features is not None:
            self._numbers = self._numbers.index_select(1, rows)


_WORD = -1


class _ImagesOfPrompts:
    """Distinct images of a batch's prompts, and the cache slots of their image tokens.

    Attributes:
        sizes: Digest of a distinct image -> its height and width in pixels.
        end: First slot after all image tokens.
    """

    def __init__(self, inputs: Sequence[Inputs], first_slots: Sequence[int], num_slots: int, chunk: Any):
        self._chunk, self._num_slots = chunk, num_slots
        self._pixels: dict[int, np.ndarray] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self._digests: list[list[int]] = []
        self._starts = np.array(first_slots)
        self._is_image = np.zeros((len(inputs), num_slots), dtype=np.bool_)
        for row, each in enumerate(inputs):
            self._digests.append(each[IMAGE_IDS].values.tolist() if each else [])
            if not self._digests[-1]:
                continue
            mask = each[IS_IMAGE].values
            self._is_image[row, : len(mask)] = mask
            images = zip(self._digests[-1], each[IMAGE_SIZES].values.tolist(), each[PIXELS].values, strict=True)
            for digest, size, pixels in images:
                if digest not in self.sizes:
                    self.sizes[digest], self._pixels[digest] = (size[0], size[1]), pixels
        rows, columns = self._is_image.nonzero()
        self.end = int((columns + self._starts[rows]).max(initial=-1)) + 1

    def distinct(self, device: torch.device) -> dict[str, Tensor]:
        """Return pixels, size and id of each distinct image once: name of a microbatch's column -> tensor."""
        return {
            PIXELS: torch.from_numpy(np.concatenate(list(self._pixels.values()))).to(device),
            IMAGE_SIZES: torch.tensor(list(self.sizes.values())),
            IMAGE_IDS: torch.tensor(list(self.sizes)),
        }

    def feature_numbers(self) -> Int[Tensor, "slots rows"]:
        """Return the index of each slot's row in the tower's output, `_WORD` for slots without an image token."""
        family, hf_config = self._chunk.family, self._chunk.hf_config
        counts = [family.num_image_tokens(hf_config, *size) for size in self.sizes.values()]
        bounds = pairwise(accumulate(counts, initial=0))
        of_image = {digest: np.arange(*ends) for digest, ends in zip(self.sizes, bounds, strict=True)}
        numbers = np.full((self._num_slots, len(self._digests)), _WORD)
        for row, digests in enumerate(self._digests):
            if digests:
                slots = self._is_image[row].nonzero()[0] + self._starts[row]
                numbers[slots, row] = np.concatenate([of_image[digest] for digest in digests])
        return torch.from_numpy(numbers)

    def positions(self) -> Int[Tensor, "3 rows_or_1 slots"]:
        """Return the 3D positions of all slots. Slots of padding before a prompt can have any position."""
        slots = torch.arange(self._num_slots)
        if not self.sizes:
            # Padding before text only shifts its positions, and rotary embedding is relative.
            return slots.expand(3, 1, -1)
        side = self._chunk.family.pixels_per_token(self._chunk.hf_config)
        grids = [
            (self.sizes[digest][0] // side, self.sizes[digest][1] // side)
            for of_row in self._digests
            for digest in of_row
        ]
        from_first_token = image_positions(torch.from_numpy(self._is_image), grids)
        indices = (slots - torch.from_numpy(self._starts)[:, None]).clamp(min=0)
        return from_first_token.gather(2, indices.expand(3, -1, -1))
