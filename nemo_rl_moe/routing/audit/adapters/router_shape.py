# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shape of the routers (numbers of experts and layers) from the model's `config.json`, since dumps lack it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError, one_line

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_PLAIN = (
    *("flex_olmo", "gpt_oss", "granitemoe", "jamba", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
"""Model families of transformers whose routers take the experts with the largest logits. Others add a bias after the
logits, choose by groups of experts, or have not been examined."""
_OTHER_ROUTERS: Mapping[str, str] = {
    "doge": "product keys choose the experts",
    "ernie4_5_vl_moe_text": "each layer has a router for text and one for images",
    "jetmoe": "each layer has two routers",
    "longcat_flash": "some experts have no weights and are not in the number of experts",
    "zaya": "one expert has no weights and is not in the number of experts",
}
"""Model types whose fields do not give the number of experts or routers -> reason."""


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
    """Return the shape of a model's routers, from the field names of Hugging Face's configurations.

    Raises:
        DataError: The file cannot be read, or does not give the shape. The message names an unsupported family.
    """
    file = path / "config.json" if path.is_dir() else path
    model_type = None
    try:
        found = json.loads(file.read_bytes())
        model_type = found.get("model_type")
        found = found.get("text_config") or found
        model_type = found.get("model_type") or model_type
        if (reason := _OTHER_ROUTERS.get(str(model_type))) is not None:
            raise ValueError(reason)
        num_experts, topk = _first(found, _NUM_EXPERTS), _first(found, _TOPK)
        kinds = _kinds_of_layers(found)
        num_layers = int(found["num_hidden_layers"]) if kinds is None else len(kinds)
        layers = tuple(layer for layer in range(num_layers) if _has_experts(found, layer, num_layers))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        problem = _unsupported(model_type) or "no configuration of a model with experts"
        raise DataError(f"--model {file}: {problem}: {one_line(error)}") from error
    family = str(model_type)
    return RouterShape(num_layers, layers, num_experts, topk, family in _PLAIN, family)


def _unsupported(model_type: Any) -> str | None:
    """Return the problem with a file of an unsupported family, or None for other files."""
    from nemo_rl_moe.models.families.refused import REFUSED

    if (refused := REFUSED.get(str(model_type))) is None:
        return None
    return (
        f"model_type {model_type!r} ({refused.name}) is not supported, and its numbers of experts and layers cannot be "
        "read from this file; without --model, the number of experts is the largest id plus 1"
    )


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(found.get(name), int):
            return int(found[name])
    raise ValueError(f"has none of {', '.join(names)}")


def _kinds_of_layers(found: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the kind of each layer of a hybrid model with one part a layer (Nemotron-3), as names or letters."""
    # In transformers' order. Other families have a kind of attention for each layer in `layer_types`.
    fields = (found.get(name) for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"))
    return next((kinds for kinds in fields if isinstance(kinds, list | str) and {*kinds} & {"moe", "E"}), None)


def _has_experts(found: Mapping[str, Any], layer: int, num_layers: int) -> bool:
    """Return True for a layer with experts. Many models have some dense layers."""
    # A list of all layers, if there is one, decides. transformers writes it in place of other fields.
    if (of_hybrid := _kinds_of_layers(found)) is not None:
        return of_hybrid[layer] in ("moe", "E")
    kinds, indices, frequency = (found.get(name) for name in ("mlp_layer_types", "moe_layers", "moe_layer_freq"))
    if isinstance(kinds, list):
        return bool(kinds[layer] != "dense")
    if isinstance(indices, list):
        return layer in indices
    if isinstance(frequency, list):
        return bool(frequency[layer])
    dense_at_first = found.get("first_k_dense_replace") or found.get("num_dense_layers") or 0
    if layer < dense_at_first or layer % (frequency or 1) or layer in (found.get("mlp_only_layers") or ()):
        return False
    if (period := found.get("expert_layer_period")) is not None:  # Jamba
        return bool(layer % period == found["expert_layer_offset"])
    if (start := found.get("moe_layer_start_index")) is not None:  # Ernie-4.5
        end = found.get("moe_layer_end_index", -1)
        if not start <= layer <= (num_layers - 1 if end == -1 else end):
            return False
    for name in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"):
        if (step := found.get(name)) is not None:
            return bool(step > 0 and (layer + 1) % step == 0)
    return True
