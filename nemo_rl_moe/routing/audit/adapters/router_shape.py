# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shape of the routers (numbers of experts and layers) from the model's `config.json`, since dumps lack it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError, one_line

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOPK = ("num_experts_per_tok", "moe_topk", "moe_k")
_PLAIN = (
    *("flex_olmo", "gpt_oss", "granitemoe", "jamba", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
"""Model families of transformers whose routers take the experts with the largest logits. Others add a bias after the
logits, choose by groups of experts, or have not been examined."""


@dataclass(frozen=True)
class RouterShape:
    """Numbers of layers and experts of a model.

    Attributes:
        num_layers: Number of all layers of the model, including dense ones.
        moe_layers: Indices of the layers with experts, ascending.
        plain_topk: Whether a token's experts are known to have the largest router logits.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int
    plain_topk: bool
    family: str


def read_router_shape(path: Path) -> RouterShape:
    """Return the shape of a model's routers, from the field names of Hugging Face's configurations."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_bytes())
        found = found.get("text_config") or found
        num_experts, topk = _first(found, _NUM_EXPERTS), _first(found, _TOPK)
        num_layers = int(found["num_hidden_layers"])
        layers = tuple(layer for layer in range(num_layers) if _has_experts(found, layer))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"--model {file}: no configuration of a model with experts: {one_line(error)}") from error
    family = str(found.get("model_type"))
    return RouterShape(num_layers, layers, num_experts, topk, family in _PLAIN, family)


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(found.get(name), int):
            return int(found[name])
    raise ValueError(f"has none of {', '.join(names)}")


def _has_experts(found: Mapping[str, Any], layer: int) -> bool:
    """Return True for a layer with experts. Models of Qwen, DeepSeek and GLM have some dense layers."""
    frequency = found.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return bool(frequency[layer])
    first = found.get("first_k_dense_replace") or 0
    if layer < first or layer % frequency or layer in (found.get("mlp_only_layers") or ()):
        return False
    step = found.get("decoder_sparse_step")
    return step is None or (step > 0 and (layer + 1) % step == 0)
