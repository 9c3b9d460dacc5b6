# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MTP layers, as published folders have them, added to folders of tiny models."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_moe.models.hf_files import load_hf_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import write_reference
from tests.support.vision_models import write_vision_model

FILE = "mtp_layers.safetensors"
COUNT_FIELDS = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
    "minimax_m2": "num_mtp_modules",
    "qwen3_next": "num_nextn_predict_layers",
    "kimi_k2": "num_nextn_predict_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe": "mtp_num_hidden_layers",
    "nemotron_h": "num_nextn_predict_layers",
}
"""`model_type` -> field of `config.json`, or of its `text_config`, with the number of MTP layers."""


def write_with_mtp_layers(name: str, folder: Path, seed: int = 9, **fields: Any) -> dict[str, Tensor]:
    """Write a tiny model with one MTP layer, and return the layer's tensors.

    Args:
        name: A key of `FAMILY_MODELS`, or a `model_type` of `vision_models`.
        fields: Of `config.json`.
    """
    if name in FAMILY_MODELS:
        write_reference(name, folder)
    else:
        write_vision_model(name, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    config.get("text_config", config)[COUNT_FIELDS[config["model_type"]]] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _as_published(folder, seed)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as held:
            content = {"metadata": {}, "weight_map": dict.fromkeys(held.keys(), "model.safetensors")}
    content["weight_map"] |= dict.fromkeys(tensors, FILE)
    index.write_text(json.dumps(content))
    return tensors


def mtp_layers_in(folder: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a folder that have the names of the expected ones."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(path).items() if name in expected}
    return found


def assert_bits_are_kept(folder: Path, expected: dict[str, Tensor]) -> None:
    found = mtp_layers_in(folder, expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def count_in(folder: Path) -> int:
    """Return the number of MTP layers that a folder's `config.json` declares."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)[COUNT_FIELDS[config["model_type"]]])


def _as_published(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return random tensors with the names and shapes of the last layer with attention, and of the layer's ends."""
    hf_config = load_hf_config(str(folder))
    held: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held |= load_file(path)
    kinds = getattr(hf_config, "layer_types", None) or []
    is_hybrid = "linear_attention" in kinds
    layers = [n for n in range(hf_config.num_hidden_layers) if not is_hybrid or kinds[n] == "full_attention"]
    pattern = re.compile(rf"(?:model|backbone)\.(?:language_model\.)?layers\.{layers[-1]}\.(.*)")
    prefix = "mtp.layers.0." if is_hybrid else f"model.layers.{hf_config.num_hidden_layers}."
    shapes = {prefix + match[1]: tensor.shape for name, tensor in held.items() if (match := pattern.fullmatch(name))}
    hidden, vocabulary = hf_config.hidden_size, hf_config.vocab_size
    if is_hybrid:
        ends = {"mtp.fc": (hidden, 2 * hidden), "mtp.norm": (hidden,)}
        ends |= {f"mtp.pre_fc_norm_{part}": (hidden,) for part in ("embedding", "hidden")}
    else:
        ends = {f"{prefix}{part}": (hidden,) for part in ("enorm", "hnorm", "shared_head.norm")}
        ends |= {f"{prefix}{part}": (vocabulary, hidden) for part in ("embed_tokens", "shared_head.head")}
        ends[f"{prefix}eh_proj"] = (hidden, 2 * hidden)
    shapes |= {f"{name}.weight": torch.Size(shape) for name, shape in ends.items()}
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: torch.Size) -> Tensor:
        sampled = torch.randn(shape, generator=generator)
        if re.search(r"norm", name) and len(shape) == 1:
            return (0.0 if is_hybrid else 1.0) + 0.3 * sampled
        return sampled * (0.4 if name.endswith(".gate.weight") else shape[-1] ** -0.5)

    tensors = {name: random(name, shape) for name, shape in shapes.items()}
    # Published folders have tensors of several types.
    first = next(name for name in tensors if name.endswith(("eh_proj.weight", "fc.weight")))
    tensors[first] = tensors[first].bfloat16()
    return tensors
