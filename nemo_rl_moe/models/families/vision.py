# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Vision-language families: a decoder of another family with a vision tower and a projector.

Tower and projector are transformers' modules. Configurations are flattened: they have the decoder's fields as in a text
model, and the fields of the full model, including its `model_type`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families.decoder import rotary_percent
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, heads_of
from nemo_rl_moe.models.families.tower_shape import TowerShape

_KEY = "policy.model_name: config.json: "


@dataclass(frozen=True)
class TowerOutput:
    """Output of tower and projector for a sequence of images.

    Attributes:
        embeddings: Embeddings of the image tokens.
        deep: Features to add to the image tokens' hidden states after each of the first decoder layers.
    """

    embeddings: Float[Tensor, "tokens hidden"]
    deep: tuple[Float[Tensor, "tokens hidden"], ...] = ()


@dataclass(frozen=True)
class VisionFamily:
    """Vision tower and projector of a vision-language family.

    Attributes:
        decoder: The decoder's family, or None if `text_config` names the family.
        config_fields: Fields of `config.json` outside its sections. Flattened configurations keep the fields in `read`.
        tower_fields: Fields of `vision_config`.
        decoder_name: Function that takes a decoder tensor's name in files of a text model, and returns the name in
            files of this family.
        prefixes: Prefix of canonical names of tower and projector -> prefix in files.
        projector: Prefixes of the projector's canonical names. Other names under `vision.` belong to the tower.
        build: Function that builds tower and projector.
        encode: Function that runs tower and projector over images, each `[height, width, 3]`.
        pixels_per_token: Side, in pixels, of an image token.
        has_mrope: Whether image tokens have positions in time, height and width.
        interleaves_mrope: Whether the frequencies of the three positions alternate in a head. Otherwise they form
            blocks.
        deep_layers: Number of decoder layers, counted from the first, to whose outputs the tower adds features.
        problems: Function that returns a line for each further problem of a flattened configuration.
    """

    name: str
    decoder: ModelFamily | None
    config_fields: ConfigFields
    tower_fields: ConfigFields
    decoder_name: Callable[[str], str]
    prefixes: Mapping[str, str]
    projector: tuple[str, ...]
    build: Callable[[Any], nn.Module]
    encode: Callable[[nn.Module, Sequence[UInt8[Tensor, "height width 3"]], Any], TowerOutput]
    pixels_per_token: Callable[[Any], int]
    shape: Callable[[Any], TowerShape]
    has_mrope: bool = False
    interleaves_mrope: bool = False
    deep_layers: Callable[[Any], int] = lambda hf_config: 0
    problems: Callable[[Any], list[str]] = lambda hf_config: []

    def around(self, decoder: ModelFamily) -> ModelFamily:
        """Return the family of full models that have this decoder."""

        def transformer_fields(hf_config: Any) -> dict[str, Any]:
            mrope = {"mrope_section": list(hf_config.mrope_section)} if self.has_mrope else {}
            return decoder.transformer_fields(hf_config) | mrope

        def unused_tensors(hf_config: Any) -> Mapping[str, str]:
            return {self.decoder_name(name): why for name, why in decoder.unused_tensors(hf_config).items()}

        def kept_tensors(hf_config: Any) -> list[str]:
            return [self.decoder_name(name) for name in decoder.kept_tensors(hf_config)]

        return replace(
            decoder,
            name=self.name if self.decoder is not None else f"{self.name} with {decoder.name}",
            transformer_fields=transformer_fields,
            rules=decoder.rules.within(self.decoder_name, self.prefixes),
            unused_tensors=unused_tensors,
            kept_tensors=kept_tensors,
            # The embeddings of images would have to be shifted too.
            mtp_layers=None,
            vision=self,
        )

    def num_image_tokens(self, hf_config: Any, height: int, width: int) -> int:
        side = self.pixels_per_token(hf_config)
        return (height // side) * (width // side)

    def num_patches(self, hf_config: Any, height: int, width: int) -> int:
        """Return the number of patches of an image or tile."""
        rows, columns = self.patch_grid(hf_config, height, width)
        return rows * columns

    def patch_grid(self, hf_config: Any, height: int, width: int) -> tuple[int, int]:
        side, merge = self.pixels_per_token(hf_config), self.shape(hf_config).merge_size
        return height // side * merge, width // side * merge

    def is_projector(self, name: str) -> bool:
        return name.startswith(self.projector)

    def embed(
        self, tower: nn.Module, pixels: UInt8[Tensor, " bytes"], sizes: Sequence[tuple[int, int]], hf_config: Any
    ) -> TowerOutput:
        """Return the output of tower and projector for images.

        Args:
            pixels: Concatenated RGB bytes of the images, on the tower's device.
            sizes: Height and width of each image in pixels.
        """
        parts = pixels.split([height * width * 3 for height, width in sizes])
        images = [part.view(*size, 3) for part, size in zip(parts, sizes, strict=True)]
        return self.encode(tower, images, hf_config)

    def flattened(self, hf_config: Any, decoder_type: str) -> Any:
        """Return one configuration with the fields of decoder, tower and full model."""
        flat = copy.deepcopy(hf_config.text_config)
        flat.decoder_type = decoder_type
        flat.model_type = hf_config.model_type
        flat.architectures = hf_config.architectures
        flat.tie_word_embeddings = hf_config.tie_word_embeddings
        for name in self.config_fields.read - {"text_config"}:
            setattr(flat, name, getattr(hf_config, name))
        if self.has_mrope:
            parameters = dict(flat.rope_parameters)
            flat.mrope_section = parameters.pop("mrope_section", None)
            # transformers ignores this field and uses the family's order.
            flat.mrope_interleaved = parameters.pop("mrope_interleaved", self.interleaves_mrope)
            flat.rope_parameters = parameters
        problems = [*_common_problems(flat, self), *self.problems(flat)]
        if problems:
            raise ConfigurationError([_KEY + problem for problem in problems])
        return flat


def decoder_section(config_json: Mapping[str, Any], vision: VisionFamily | None) -> Mapping[str, Any]:
    """Return the decoder's fields of a `config.json`: its `text_config`, or else the fields of a text model."""
    if vision is None:
        return config_json
    section = config_json.get("text_config")
    if section is not None:
        return section if isinstance(section, Mapping) else {}
    fields = vision.config_fields
    outer = fields.read | fields.fixed.keys() | fields.without_effect | {"model_type", "tie_word_embeddings"}
    return {name: value for name, value in config_json.items() if name not in outer}


def field_problems(
    vision: VisionFamily, decoder: ModelFamily, config_json: Mapping[str, Any], hf_config: Any
) -> list[str]:
    """Return a line for each unsupported field of a vision-language model's `config.json`."""
    of_decoder = decoder_section(config_json, vision)
    section = "text_config." if "text_config" in config_json else ""
    outer = {name: value for name, value in config_json.items() if section or name not in of_decoder}
    of_tower = config_json.get("vision_config") or {}
    return [
        *vision.config_fields.problems(outer, hf_config, vision.name),
        *decoder.config_fields.problems(of_decoder, hf_config.text_config, decoder.name, section),
        *vision.tower_fields.problems(of_tower, hf_config.vision_config, vision.name, "vision_config."),
    ]


def _common_problems(flat: Any, family: VisionFamily) -> list[str]:
    problems = []
    token = flat.image_token_id
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < flat.vocab_size:
        problems.append(
            f"image_token_id: got {shortened(repr(token))}, expected a token of the vocabulary of {flat.vocab_size}"
        )
    if family.has_mrope:
        _, head_dim = heads_of(flat)
        half = int(head_dim * rotary_percent(flat)) // 2
        section = flat.mrope_section
        numbers = isinstance(section, list | tuple) and all(type(part) is int and part >= 0 for part in section)
        if not numbers or len(section) != 3 or sum(section) != half:
            problems.append(
                f"rope_parameters.mrope_section: got {shortened(repr(section))}, expected three whole numbers that add "
                f"up to {half}, half of a head's rotated entries"
            )
        if flat.mrope_interleaved is not family.interleaves_mrope:
            problems.append(
                f"rope_parameters.mrope_interleaved: got {shortened(repr(flat.mrope_interleaved))}, supported for "
                f"{family.name}: {family.interleaves_mrope}"
            )
    return problems


def built_config(plain: Any, config_class: type) -> Any:
    """Return the configuration object that a transformers module needs, made from a plain configuration."""
    if isinstance(plain, config_class):
        return copy.deepcopy(plain)
    known = config_class().to_dict().keys() - {"model_type", "transformers_version"}
    return config_class(**{name: value for name, value in vars(plain).items() if name in known})
