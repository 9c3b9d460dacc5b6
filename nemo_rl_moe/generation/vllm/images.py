# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images for vLLM: the trainer's tokens and pixels, in the form of vLLM's processed inputs.

vLLM would expand image tokens and resize images with transformers' processors. This package has already done that, so
vLLM's models get a processor that does nothing, and requests come in processed form.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.models.image_patches import PixelRule, as_tensors, merged_patches, tiles
from nemo_rl_moe.models.images import IMAGE_IDS, IS_IMAGE, ModelImage, images_in

MODULES = {
    "internvl": ("interns1", "InternS1ForConditionalGeneration"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
}
"""Module and class of vLLM's image-text models, by transformers' `model_type`."""


@dataclass(frozen=True)
class ImageSettings:
    """Settings of a model's images, sent to its engines.

    Attributes:
        model_type: A key of `MODULES`.
        architecture: The class that the model's `config.json` names.
        side: Height and width, in pixels, of the square that an image token represents.
    """

    model_type: str
    architecture: str
    rule: PixelRule
    token_id: int
    side: int

    def num_tokens(self, image: ModelImage) -> int:
        height, width, _ = image.pixels.shape
        return (height // self.side) * (width // self.side)


def image_runs(
    settings: ImageSettings, token_ids: Sequence[int], inputs: Mapping[str, ModelInput]
) -> list[tuple[ModelImage, int, int]]:
    """Return each image of a prompt with the position of its first image token and the number of its tokens."""
    images = images_in(inputs)
    marked = np.flatnonzero(inputs[IS_IMAGE].values) if IS_IMAGE in inputs else np.zeros(0, np.int64)
    counts = [settings.num_tokens(image) for image in images]
    if len(marked) != sum(counts):
        raise GenerationError(
            f"a prompt of {len(token_ids)} tokens has {len(marked)} image tokens, expected {sum(counts)}, the"
            f" number that vLLM computes for its {len(images)} images"
        )
    ends = np.cumsum(counts)
    runs = []
    for image, count, end in zip(images, counts, ends.tolist(), strict=True):
        first = int(marked[end - count])
        if marked[end - 1] - first != count - 1 or any(
            token != settings.token_id for token in token_ids[first : first + count]
        ):
            raise GenerationError(
                f"an image's {count} image tokens from token {first} on are not one run of token {settings.token_id}"
            )
        runs.append((image, first, count))
    return runs


def model_inputs(settings: ImageSettings, image: ModelImage) -> dict[str, Tensor]:
    """Return the input tensors of one image: the inputs of the trainer's tower, by vLLM's names."""
    pixels = as_tensors([image])
    if settings.model_type == "internvl":
        return {
            "pixel_values": tiles(pixels, settings.rule),
            "image_num_patches": torch.ones(1, dtype=torch.long),
            "image_token_id": torch.tensor(settings.token_id),
        }
    values, grids = merged_patches(pixels, settings.rule)
    return {"pixel_values": values, "image_grid_thw": grids}


class ImagePrompts:
    """Prompts of one call of an engine. Each distinct image is converted once."""

    def __init__(self, settings: ImageSettings | None):
        self._settings = settings
        self._items: dict[int, Any] = {}

    def prompt(self, token_ids: Sequence[int], inputs: Mapping[str, ModelInput]) -> Any:
        """Return a prompt in the form for vLLM's engine."""
        runs = image_runs(self._settings, token_ids, inputs) if self._settings is not None else []
        if not runs:
            return {"prompt_token_ids": list(token_ids)}
        images, digests = [image for image, _, _ in runs], inputs[IMAGE_IDS].values.tolist()
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        return mm_input(
            list(token_ids),
            MultiModalKwargsItems({"image": [self._item(*each) for each in zip(digests, images, strict=True)]}),
            {"image": [str(digest) for digest in digests]},
            {"image": [PlaceholderRange(offset=first, length=count) for _, first, count in runs]},
        )

    def _item(self, digest: int, image: ModelImage) -> Any:
        """Return the inputs of vLLM's model for an image, with the rules to batch them."""
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        assert self._settings is not None  # there is an image
        if digest not in self._items:
            tensors = model_inputs(self._settings, image)
            rows = torch.tensor([len(tensors["pixel_values"])])
            fields = {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", rows),
                "image_token_id": MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
                "image_num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
                "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            }
            (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, {name: fields[name] for name in tensors})["image"]
            self._items[digest] = item
        return self._items[digest]


def register(settings: ImageSettings) -> dict[str, Any]:  # pragma: no cover  (runs in the engine's process)
    """Make vLLM build the model's class with a processor that does nothing; return further engine arguments."""
    module, name = MODULES[settings.model_type]
    with stand_in_for_torchvision():
        model_class = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

    # The methods that raise below are abstract in vLLM, and never called: prompts are processed, nothing is profiled.
    class Limits(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
            return {"image": seq_len}

    class NoDummies(BaseDummyInputsBuilder):
        def get_dummy_text(self, *args: Any) -> str:
            raise NotImplementedError

        def get_dummy_mm_data(self, *args: Any) -> Any:
            raise NotImplementedError

    class AlreadyProcessed(BaseMultiModalProcessor):
        requires_tokenizer = False

        def _get_mm_fields_config(self, *args: Any) -> Any:
            raise NotImplementedError

        def _get_prompt_updates(self, *args: Any) -> Any:
            raise NotImplementedError

    decorate = MULTIMODAL_REGISTRY.register_processor(AlreadyProcessed, info=Limits, dummy_inputs=NoDummies)
    ModelRegistry.register_model(settings.architecture, decorate(type("ModelWithImages", (model_class,), {})))
    return {
        # The tokens of a step bound its images, so vLLM need not measure the memory of dummy images.
        "skip_mm_profiling": True,
        "limit_mm_per_prompt": {"image": 1_000},
        "mm_processor_cache_gb": 0,
        # The trainer has already normalised the pixels.
        "mm_device_do_normalize": False,
        "hf_overrides": _ALWAYS_NORMALISED if settings.model_type == "qwen3_vl_moe" else {},
    }


_ALWAYS_NORMALISED = {"text_config": {"norm_topk_prob": True}}
"""vLLM reads this field. transformers lacks it for this family, whose expert weights always sum to 1."""


def as_loader_expects(settings: ImageSettings | None, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a refit in the layout that vLLM's loader expects.

    transformers writes the experts of Qwen3-VL-MoE as `[experts, out, in]`. vLLM expects the transposed layout of the
    released files.
    """
    is_turned = settings is not None and settings.model_type == "qwen3_vl_moe"
    if is_turned and name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        return tensor.transpose(1, 2)
    return tensor


@contextmanager
def stand_in_for_torchvision() -> Iterator[None]:
    """Make torchvision importable for modules that import it. Their image processors are never used here.

    The CPU build of vLLM lacks torchvision: the wheels of torchvision on PyPI do not load with a CPU build of torch.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():  # cached by transformers, so unaffected by the stand-in
        yield
        return
    finder = _StandIn()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_torchvision(name)]:
            del sys.modules[name]


def _is_torchvision(name: str) -> bool:
    return name.split(".")[0] == "torchvision"


class _StandIn(MetaPathFinder, Loader):
    """Import hook that replaces torchvision's modules by modules in which every name is an empty class."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_torchvision(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        def empty_class(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = empty_class  # type: ignore[method-assign]
