# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images in a decoder: tower and projector on the first pipeline stage put features among the word embeddings."""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_rl_moe.config.schema_policy import FreezeConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.vision import TowerOutput, VisionFamily
from nemo_rl_moe.models.images import IMAGE_IDS, IMAGE_SIZES, IS_IMAGE, PIXELS, distinct_images
from nemo_rl_moe.models.megatron.model.releases import padding_mask_for_stage

PREFIX = "vision."
"""Beginning of the canonical names of tower and projector."""


class MultimodalRotary(torch.nn.Module):
    """Rotary angles of positions in time, height and width. Megatron-Core's module cannot interleave these axes.

    Args:
        rotated: Number of a head's first entries that are rotated.
        section: Number of frequencies of each axis.
    """

    def __init__(self, rotated: int, base: float, section: Sequence[int], *, interleaved: bool):
        super().__init__()
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(list(section)))
        if interleaved:
            axis = torch.zeros(rotated // 2, dtype=torch.long)
            for number in (1, 2):
                axis[number : 3 * section[number] : 3] = number
        # Not buffers, which half precision would round.
        self.inv_freq, self._axis = 1.0 / base**exponents, axis

    def forward(
        self, position_ids: Int[Tensor, "3 rows columns"], mrope_section: Any = None, **others: Any
    ) -> Float[Tensor, "columns rows 1 rotated"]:
        """Return the angles in the layout of Megatron-Core's attention."""
        del mrope_section, others
        if self.inv_freq.device != position_ids.device:
            self.inv_freq, self._axis = (
                tensor.to(position_ids.device, non_blocking=True) for tensor in (self.inv_freq, self._axis)
            )
        chosen = position_ids[self._axis].float()
        angles = (chosen * self.inv_freq[:, None, None]).permute(2, 1, 0)
        return torch.cat([angles, angles], -1)[:, :, None]


class VisionInput:
    """Mixin of GPTModel with the input of a vision-language model: image features among word embeddings.

    Only the first stage has the module `vision`, with tower and projector.
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
        deep: Sequence[Float[Tensor, "columns rows hidden"]] = (),
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the chunk's forward pass.

        Args:
            position_ids: `[rows, columns]` or, with images and a family that has 3D positions, `[3, rows, columns]`.
            decoder_input: Embeddings, if the caller computed them. Sequence parallelism has not split them.
            deep: Features to add after each of the first layers, if the caller gives `decoder_input`. Sequence
                parallelism has not split them either.
        """
        if self.family.has_mrope and position_ids is not None and position_ids.ndim == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if self.pre_process:  # type: ignore[attr-defined]
            if decoder_input is None:
                # The tower first, also without images: modules gather late weights in the order of their calls.
                features = self.image_features(self.model_columns)
                is_blank = features is None and torch.is_grad_enabled()
                zero = self._zero_of_tower(input_ids.device) if is_blank else None
                decoder_input = self.embedding(input_ids=input_ids, position_ids=None)  # type: ignore[attr-defined]
                if features is not None:
                    is_image = self.model_columns[IS_IMAGE]
                    deep = [placed(torch.zeros_like(decoder_input), is_image, each) for each in features.deep]
                    decoder_input = placed(decoder_input, is_image, features.embeddings)
                elif zero is not None:
                    decoder_input = decoder_input + zero.to(decoder_input.dtype)
            if self.config.sequence_parallel:  # type: ignore[attr-defined]
                decoder_input = tensor_parallel.scatter_to_sequence_parallel_region(decoder_input)
                deep = [tensor_parallel.scatter_to_sequence_parallel_region(each) for each in deep]
                # GPTModel splits the mask only if it looks up the embeddings.
                padding_mask = padding_mask_for_stage(
                    padding_mask,
                    is_first_stage=False,
                    tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                    tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
                )
            if deep:
                kwargs["extra_block_kwargs"] = {"context": torch.stack(list(deep))}
        return super().forward(  # type: ignore[misc]
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, padding_mask=padding_mask, **kwargs
        )

    @property
    def family(self) -> VisionFamily:
        found = family_of(self.hf_config).vision
        assert found is not None  # the model is built for one
        return found

    def image_features(self, columns: Mapping[str, Tensor]) -> TowerOutput | None:
        """Run tower and projector once per distinct image. Return a row per image token, or None without images."""
        tower, family = self.vision, self.family  # type: ignore[attr-defined]
        if IMAGE_SIZES not in columns or not len(columns[IMAGE_SIZES]):
            return None
        sizes = [(int(height), int(width)) for height, width in columns[IMAGE_SIZES].tolist()]
        chosen, place = distinct_images(columns[IMAGE_IDS].tolist())
        pixels = columns[PIXELS]
        output = family.embed(tower, pixels, [sizes[number] for number in chosen], self.hf_config)
        if len(chosen) == len(sizes):
            return output
        counts = [family.num_image_tokens(self.hf_config, *sizes[number]) for number in chosen]
        ends = list(itertools.accumulate(counts))
        rows = torch.cat([torch.arange(ends[number] - counts[number], ends[number]) for number in place])
        rows = rows.to(pixels.device, non_blocking=True)
        return TowerOutput(output.embeddings[rows], tuple(each[rows] for each in output.deep))

    def _zero_of_tower(self, device: torch.device) -> Tensor:
        """Return 0, computed from all trained weights of tower and projector, so that each gets a gradient of 0."""
        # Overlapped gradient reduction waits for all gradients in each microbatch.
        tower = self.vision  # type: ignore[attr-defined]
        if not any(parameter.requires_grad for parameter in tower.parameters()):
            return torch.zeros((), device=device)
        side = self.family.pixels_per_token(self.hf_config)
        blank = torch.zeros(side * side * 3, dtype=torch.uint8, device=device)
        found = self.family.embed(tower, blank, [(side, side)], self.hf_config)
        return 0.0 * sum((each.sum() for each in found.deep), start=found.embeddings.sum())


def placed(
    hidden: Float[Tensor, "columns rows hidden"], is_image: Tensor, features: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "columns rows hidden"]:
    """Return the hidden states with features in place of image tokens, without a wait for the GPU.

    Args:
        is_image: Mask of image tokens, `[rows, columns]`.
        features: One row for each image token, in the order of the flattened mask.
    """
    number = is_image.flatten().long().cumsum(0).sub_(1).clamp_(0, len(features) - 1)
    by_token = torch.nn.functional.embedding(number.view(is_image.shape).T, features.to(hidden.dtype))
    # Contiguous, because it may be sent to the next pipeline stage.
    return torch.where(is_image.T[..., None], by_token, hidden).contiguous()


def add_vision(chunk: GPTModel, hf_config: Any, init_seed: int) -> None:
    """Add the tower and projector of the model's family to a chunk, and rotary positions for image tokens."""
    family = family_of(hf_config)
    vision = family.vision
    assert vision is not None
    chunk.hf_config = hf_config
    if vision.has_mrope:
        chunk.rotary_pos_emb = MultimodalRotary(
            int(chunk.config.kv_channels * family.rotary_percent(hf_config)),
            family.rotary_base(hf_config),
            hf_config.mrope_section,
            interleaved=hf_config.mrope_interleaved,
        )
    if chunk.pre_process:
        # Sampling here must not shift the run's random numbers.
        with torch.random.fork_rng(devices=[]):
            chunk.vision = vision.build(hf_config)
            draw_weights(chunk.vision, hf_config, init_seed)


def draw_weights(tower: torch.nn.Module, hf_config: Any, seed: int) -> None:
    """Initialize tower and projector by transformers' rule, from the seed and the names of modules alone."""
    from transformers import PreTrainedModel

    owners: dict[str, Any] = {}
    for name, module in tower.named_modules():
        above = owners.get(name.rpartition(".")[0]) if name else None
        owners[name] = module if isinstance(module, PreTrainedModel) else above
        # Only the host's generator is seeded. Its seed has 32 bits.
        torch.default_generator.manual_seed(zlib.crc32(f"{seed} {PREFIX}{name}".encode()))
        if owners[name] is None:  # a projector outside of the tower, with the decoder's standard deviation
            PreTrainedModel._init_weights(SimpleNamespace(config=hf_config), module)
        else:
            owners[name]._init_weights(module)


@contextmanager
def tower_buffers_in_float32(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Keep the towers' rotary frequencies in float32 while modules are converted to half precision."""
    kept = [
        (module, name, buffer)
        for chunk in chunks
        for child, tower in chunk.named_children()
        if f"{child}." == PREFIX
        for module in tower.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype == torch.float32
    ]
    yield
    for module, name, buffer in kept:
        module._buffers[name] = buffer


def freeze_parts(chunk: GPTModel, freeze: FreezeConfig, hf_config: Any) -> None:
    family = family_of(hf_config).vision
    for name, parameter in chunk.named_parameters():
        if not name.startswith(PREFIX) or family is None:
            is_frozen = freeze.language_model
        else:
            is_frozen = freeze.projector if family.is_projector(name) else freeze.vision_tower
        if is_frozen:
            parameter.requires_grad_(False)


_counted: dict[str, tuple[int, int]] = {}
"""Results of `vision_parameters`, which builds a tower to count them."""


def vision_parameters(hf_config: Any) -> tuple[int, int]:
    """Return the numbers of parameters of tower and of projector. Both are 0 for a text model.

    Every first-stage rank holds all of them.
    """
    family = family_of(hf_config).vision
    if family is None:
        return 0, 0
    sections = sorted(vars(hf_config.vision_config).items(), key=str)
    key = repr((hf_config.model_type, sections, hf_config.hidden_size))
    if key not in _counted:
        with torch.device("meta"):
            tower = family.build(hf_config)
        sizes = {f"{PREFIX}{name}": parameter.numel() for name, parameter in tower.named_parameters()}
        of_projector = sum(size for name, size in sizes.items() if family.is_projector(name))
        _counted[key] = sum(sizes.values()) - of_projector, of_projector
    return _counted[key]


def pixels_per_token_of_positions(hf_config: Any) -> int | None:
    """Return the side of an image token in pixels if the family has 3D positions, else None."""
    family = family_of(hf_config).vision
    return family.pixels_per_token(hf_config) if family is not None and family.has_mrope else None
