# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every model type of the installed transformers with experts is supported, or refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig

from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.models.families import FAMILIES, VISION_FAMILIES, family_of_type
from nemo_rl_moe.models.families.refused import REFUSED
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape, read_router_shape
from nemo_rl_moe.routing.routers import routers_of

# Model type -> reason why it needs no name.
EXCEPTIONS = {
    "dots3_note_vision_encoder": "a vision tower, and no model: dots3_note is refused",
    "qwen3_vl_moe_text": "a decoder, and no model: qwen3_vl_moe is supported",
    "vitpose": "no language model: it finds poses in images",
    "vitpose_backbone": "no language model: it finds poses in images",
}
# The release of transformers that knows all refused types.
NEWEST = Version("5.24.0")
_FIELD = re.compile(r"expert|moe")
_LAYER = re.compile(r"layers\.(\d+)\.")


def has_experts(config_class: type) -> bool:
    """Return whether a configuration class has fields of experts."""
    fields = set(getattr(config_class, "attribute_map", None) or {})
    for each in config_class.__mro__:
        fields |= getattr(each, "__annotations__", {}).keys()
    return any(_FIELD.search(field) for field in fields)


def sections_of(config: PreTrainedConfig) -> Iterator[type]:
    """Yield the classes of a configuration and its sections."""
    yield type(config)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from sections_of(value)


def classes_of(model_type: str) -> Iterator[type]:
    config_class = CONFIG_MAPPING[model_type]
    try:
        yield from sections_of(config_class())
    except Exception:  # some types have no default configuration
        yield config_class


def types_with_experts() -> list[str]:
    return [model_type for model_type in CONFIG_MAPPING if any(map(has_experts, classes_of(model_type)))]


def test_every_type_is_supported_or_refused_by_name() -> None:
    found = types_with_experts()
    assert {"mixtral", "qwen3_moe", "gpt_oss", "llama4", "kimi_k25"} <= set(found)
    supported = FAMILIES.keys() | VISION_FAMILIES.keys()
    unnamed = set(found) - supported - REFUSED.keys() - EXCEPTIONS.keys()
    assert not unnamed
    for model_type in found:
        if model_type not in supported | EXCEPTIONS.keys():
            with pytest.raises(
                ConfigurationError, match=re.escape(f"({REFUSED[model_type].name}) is not supported: it")
            ):
                family_of_type(model_type)


def test_refused_types_exist_and_have_a_supported_neighbour() -> None:
    supported = FAMILIES.keys() | VISION_FAMILIES.keys()
    assert not supported & REFUSED.keys()
    assert {refused.nearest for refused in REFUSED.values()} <= supported
    if Version(transformers.__version__) >= NEWEST:
        assert REFUSED.keys() | EXCEPTIONS.keys() <= set(CONFIG_MAPPING)


def layers_of_model(config: PreTrainedConfig) -> dict[int, tuple[int, int]] | None:
    """Return the numbers of experts and chosen experts by layer in a model of transformers, or None if unknown."""
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except Exception:  # some types have no model of their default configuration
        return None
    paths = {module: name for name, module in model.named_modules()}
    return {
        int(_LAYER.findall(paths[router])[-1]): (layer.num_experts, layer.topk)
        for layer, router in routers_of(model)
        if "vision" not in paths[router]
    } or None


def shape_of(config: PreTrainedConfig, folder: Path) -> RouterShape | str:
    """Return the shape of the routers from the saved configuration, or the error."""
    config.save_pretrained(folder)
    try:
        return read_router_shape(folder)
    except DataError as error:
        return str(error)


@pytest.mark.full
def test_an_audit_reads_the_routers_of_every_type_or_refuses_it_by_name(tmp_path: Path) -> None:
    compared = set()
    for model_type in types_with_experts():
        try:
            config: Any = CONFIG_MAPPING[model_type]()
        except Exception:  # some types have no default configuration
            continue
        shape = shape_of(config, tmp_path)
        if isinstance(shape, str):
            names_it = f"model_type '{getattr(config, 'text_config', config).model_type}' (" in shape
            # The default configurations of DeepSeek-V2 and dots.llm1 have no numbers of experts.
            assert names_it or model_type in {"deepseek_v2", "dots1", *EXCEPTIONS}, shape
        elif (layers := layers_of_model(config)) is not None:
            assert layers == dict.fromkeys(shape.moe_layers, (shape.num_experts, shape.topk)), model_type
            compared.add(model_type)
    assert {"glm4_moe_lite", "ernie4_5_moe", "llama4", "kimi_k25"} <= compared
