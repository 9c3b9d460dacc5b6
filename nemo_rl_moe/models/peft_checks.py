# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the initial adapter before anything starts."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import holds_megatron_weights
from nemo_rl_moe.models.peft_files import (
    CONFIG_FILE,
    FUSED_MODULES,
    PREFIX,
    SCORE,
    TEXT_MODEL,
    WEIGHTS_FILE,
    factor_shapes,
    folder_of_peft,
    is_merged_into,
    is_of_attention,
    named_in,
    read_adapter_config,
    section_of_checkpoint,
)
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, one_line, shown


def adapter_problems(lora: LoraConfig, base: Path | None) -> list[str]:
    """Return a line for each problem of the initial adapter with the settings and the model.

    `base` is the model's folder, or None if its weights are random.
    """
    if lora.path is None:
        return []
    if base is not None and is_merged_into(Path(lora.path), base):
        return [
            f"policy.lora.path: {lora.path} is merged into {base} already; expected the base that it was trained on"
        ]
    folder = folder_of_peft(Path(lora.path))
    own: dict[str, float | str | list[str]] = {"rank": lora.rank, "alpha": lora.alpha, "use_rslora": lora.use_rslora}
    if holds_megatron_weights(folder):
        described = {"use_rslora": False, **section_of_checkpoint(folder)}
        own |= {"experts": lora.experts, "targets": sorted(lora.targets)}
        expected = {name: described.get(name) for name in own} | {"targets": sorted(described.get("targets", ()))}
        if "all-linear" in [*lora.targets, *described.get("targets", ())]:
            del expected["targets"]  # the names may mean all layers: workers compare the factors
    else:
        content = read_adapter_config(folder)
        expected = {
            "rank": content["r"],
            "alpha": content["lora_alpha"],
            "use_rslora": bool(content.get("use_rslora")),
        }
        if not (folder / WEIGHTS_FILE).is_file():
            return [f"policy.lora.path: {folder}: there is no {WEIGHTS_FILE}"]
    if problems := [
        f"policy.lora.{name}: got {own[name]}, expected {shown(value)}, as in policy.lora.path {lora.path}"
        for name, value in expected.items()
        if value != own[name]
    ]:
        return problems
    return [] if holds_megatron_weights(folder) else _problems_of_factors(lora, folder, base)


def _problems_of_factors(lora: LoraConfig, folder: Path, base: Path | None) -> list[str]:
    """Return a line for each kind of mismatch: broken factors, experts, ranks, another base, missing layers."""
    shapes = factor_shapes(folder)
    if broken := _broken_factors(folder):
        return [f"policy.lora.path: {folder}: {len(broken)} factors in {WEIGHTS_FILE} cannot be used: {broken[0]}"]
    has_experts = any(".experts." in name for name in shapes)
    if has_experts != (lora.experts != "none"):
        what = "adapters" if has_experts else "no adapters"
        return [
            f"policy.lora.experts: got {lora.experts}, but policy.lora.path {lora.path} has {what} of routed experts"
        ]
    # For a model in Megatron-Core's format, workers compare the factors with the layers.
    tensors = {} if base is None or holds_megatron_weights(base) else SafetensorsFolder(base).tensors
    layers = {named_in(TEXT_MODEL, name): tensor for name, tensor in tensors.items()}
    ranks, others, attention = list[str](), list[str](), set[str]()
    for name, shape in shapes.items():
        own = named_in(TEXT_MODEL, name.removeprefix(PREFIX))
        module, _, factor = own.removesuffix(".weight").rpartition(".")
        if module.rpartition(".")[2] in FUSED_MODULES or len(shape) != 2 or factor not in ("lora_A", "lora_B"):
            continue
        size, rank = shape if factor == "lora_B" else shape[::-1]
        if rank != lora.rank:
            ranks.append(f"{name} {rank}")
        layer = layers.get(f"{module}.weight")
        attention |= {module} if is_of_attention(module) else set()
        if layer is not None and layer.shape[factor == "lora_A"] != size:
            others.append(f"{name} has the shape {list(shape)}, and its layer {list(layer.shape)}")
        elif layer is None and layers and is_of_attention(module):
            others.append(f"{name} has no layer")
    kinds = {module.rpartition(".")[2] for module in attention}
    lacking = sorted(
        module
        for module in (name.removesuffix(".weight") for name in layers if is_of_attention(name))
        if module.rpartition(".")[2] in kinds and module not in attention
    )
    return [
        f"policy.lora.path: {folder}: {len(found)} {what}: {found[0]}"
        for what, found in (
            (f"factors in {WEIGHTS_FILE} have another rank than r {lora.rank} of {CONFIG_FILE}", ranks),
            (f"factors in {WEIGHTS_FILE} belong to another base than {base}", others),
            (f"layers of {base} have no factors in {WEIGHTS_FILE}", lacking),
        )
        if found
    ]


def _broken_factors(folder: Path) -> list[str]:
    """Return a text for each broken factor: its pair has only one factor, or it has other than finite floating-point
    numbers."""
    import torch

    found = []
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            names = set(file.keys())
            for name in sorted(names):
                tensor = file.get_tensor(name)
                other = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
                if other not in names and name != SCORE:
                    found.append(f"{name} has no {other.rpartition('.lora_')[2].removesuffix('.weight')} beside it")
                elif not tensor.is_floating_point():
                    found.append(f"{name} is of {str(tensor.dtype).removeprefix('torch.')}, expected floating point")
                elif not torch.isfinite(tensor).all():
                    found.append(f"{name} has NaN or infinite numbers")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"policy.lora.path: {folder}: {WEIGHTS_FILE} cannot be read: {one_line(error)}"
        ) from None
    return found if names else ["there is none"]
