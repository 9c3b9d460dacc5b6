# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures in a decoder: tower and projector on the first pipeline stage, their output among the word embeddings."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.vision import TowerOutput, VisionFamily
from nemo_rl_moe.models.images import IS_IMAGE, PICTURE_IDS, PICTURE_SIZES, PIXELS
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.model.releases import padding_mask_for_stage

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel


class MultimodalRotary(torch.nn.Module):
    """Angles of positions in time, height and width; in the place of Megatron-Core's, which cannot interleave.

    Args:
        head_dim: Size of a head.
        base: Base period.
        section: Frequencies of each of the three axes.
        interleaved: They take turns, as long as each has some left, and time has the rest (Qwen3-VL); otherwise they
            lie in three blocks.
    """

    def __init__(self, head_dim: int, base: float, section: Sequence[int], *, interleaved: bool):
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(list(section)))
        if interleaved:
            axis = torch.zeros(head_dim // 2, dtype=torch.long)
            for number in (1, 2):
                axis[number : 3 * section[number] : 3] = number
        # No buffers: half precision would round the frequencies.
        self.inv_freq, self._axis = 1.0 / base**exponents, axis

    def forward(
        self, position_ids: Int[Tensor, "3 rows columns"], mrope_section: Any = None, **others: Any
    ) -> Float[Tensor, "columns rows 1 head"]:
        """The angles, as Megatron-Core's attention takes them."""
        del mrope_section, others
        if self.inv_freq.device != position_ids.device:
            self.inv_freq, self._axis = (
                tensor.to(position_ids.device, non_blocking=True) for tensor in (self.inv_freq, self._axis)
            )
        chosen = position_ids[self._axis].float()
        angles = (chosen * self.inv_freq[:, None, None]).permute(2, 1, 0)
        return torch.cat([angles, angles], -1)[:, :, None]


class VisionInput:
    """Input of a vision-language model, as a mixin of GPTModel: what the tower makes of pictures, among the words.

    The registered module `vision`, tower and projector, is there on the first stage alone.

    Attributes:
        hf_config: The flattened configuration.
        model_columns: Of the microbatch that the forward pass runs; see the policy's output mixin.
    """

    hf_config: Any
    model_columns: Mapping[str, Tensor]

    def forward(
        self,
        input_ids: Int[Tensor, "rows columns"],
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        decoder_input: Float[Tensor, "columns rows hidden"] | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The chunk's forward pass.

        Args:
            input_ids: Token ids.
            position_ids: `[3, rows, columns]` where the family has such positions; `[rows, columns]` stands for text.
            attention_mask: As GPTModel takes it.
            decoder_input: In place of words and pictures; whole, also under sequence parallelism.
            padding_mask: `[rows, columns]`, True on padding.
            kwargs: GPTModel's others.
        """
        if self.family.has_mrope and position_ids is not None and position_ids.ndim == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if self.pre_process:  # type: ignore[attr-defined]
            if decoder_input is None:
                decoder_input = self.embed(input_ids, self.model_columns, self.image_features(self.model_columns))
            if self.config.sequence_parallel:  # type: ignore[attr-defined]
                decoder_input = tensor_parallel.scatter_to_sequence_parallel_region(decoder_input)
                # GPTModel cuts it only where it looks up the words by itself.
                padding_mask = padding_mask_for_stage(
                    padding_mask,
                    is_first_stage=False,
                    tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                    tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
                )
        return super().forward(  # type: ignore[misc]
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, padding_mask=padding_mask, **kwargs
        )

    @property
    def family(self) -> VisionFamily:
        """The vision-language family."""
        found = family_of(self.hf_config).vision
        assert found is not None  # the model is built for one
        return found

    def image_features(self, columns: Mapping[str, Tensor]) -> TowerOutput | None:
        """Output of tower and projector, one row an image token; a picture that is there twice runs once.

        Args:
            columns: The microbatch's; sizes and digests on the host.

        Returns:
            In the order of the image tokens; None where there are no pictures.
        """
        tower, family = self.vision, self.family  # type: ignore[attr-defined]
        if PICTURE_SIZES not in columns or not len(columns[PICTURE_SIZES]):
            return None
        sizes = [(int(height), int(width)) for height, width in columns[PICTURE_SIZES].tolist()]
        first: dict[int, int] = {}
        place = [first.setdefault(digest, len(first)) for digest in columns[PICTURE_IDS].tolist()]
        chosen = [place.index(number) for number in range(len(first))]
        pixels = columns[PIXELS]
        if len(chosen) < len(sizes):
            parts = pixels.split([height * width * 3 for height, width in sizes])
            pixels = torch.cat([parts[number] for number in chosen])
        output = family.embed(tower, pixels, [sizes[number] for number in chosen], self.hf_config)
        if len(chosen) == len(sizes):
            return output
        counts = [family.num_image_tokens(self.hf_config, *sizes[number]) for number in chosen]
        ends = list(itertools.accumulate(counts))
        rows = torch.cat([torch.arange(ends[number] - counts[number], ends[number]) for number in place])
        rows = rows.to(pixels.device, non_blocking=True)
        return TowerOutput(output.embeddings[rows], tuple(each[rows] for each in output.deep))

    def embed(
        self, input_ids: Int[Tensor, "rows columns"], columns: Mapping[str, Tensor], features: TowerOutput | None
    ) -> Float[Tensor, "columns rows hidden"]:
        """Word embeddings, with features in the place of the prompt's image tokens.

        Args:
            input_ids: Token ids; those of image tokens may be any.
            columns: With the mask of image tokens, unless there are no features.
            features: Of `image_features`.
        """
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=None)  # type: ignore[attr-defined]
        if features is None:
            return hidden
        return placed(hidden, columns[IS_IMAGE], features.embeddings)


def placed(
    hidden: Float[Tensor, "columns rows hidden"], is_image: Tensor, features: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "columns rows hidden"]:
    """Hidden states with features in the place of those of the image tokens, row after row.

    Nothing waits for the device: what is chosen depends on no number there.

    Args:
        hidden: All tokens'.
        is_image: `[rows, columns]`, as many of them True as there are features.
        features: One row for each.
    """
    number = is_image.flatten().long().cumsum(0).sub_(1).clamp_(0, len(features) - 1)
    by_token = torch.nn.functional.embedding(number.view(is_image.shape).T, features.to(hidden.dtype))
    return torch.where(is_image.T[..., None], by_token, hidden)


def add_vision(chunk: GPTModel, hf_config: Any) -> None:
    """Gives a chunk what its family has beside the decoder: tower and projector, and the positions of image tokens.

    Args:
        chunk: A `VisionInput`.
        hf_config: The flattened configuration.
    """
    family = family_of(hf_config).vision
    assert family is not None
    chunk.hf_config = hf_config
    if family.has_mrope:
        base = family_of(hf_config).rotary_base(hf_config)
        chunk.rotary_pos_emb = MultimodalRotary(
            chunk.config.kv_channels, base, hf_config.mrope_section, interleaved=hf_config.mrope_interleaved
        )
    if chunk.pre_process:
        # Weights are set by this project: what is drawn here must not move the run's own random numbers.
        with torch.random.fork_rng(devices=[]):
            chunk.vision = family.build(hf_config)


def pixels_per_token_of_positions(hf_config: Any) -> int | None:
    """Height and width of an image token's pixels, where such tokens have positions of their own; None otherwise."""
    family = family_of(hf_config).vision
    return family.pixels_per_token(hf_config) if family is not None and family.has_mrope else None
