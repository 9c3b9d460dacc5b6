# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of peft adapters: `adapter_config.json`, and the names and shapes of factors in `adapter_model.safetensors`.

Factors of experts have two forms:

- Per expert: each expert has separate factors, such as `experts.3.gate_proj.lora_A.weight`.
- Fused, as transformers holds experts in memory: the experts of a layer share two tensors per module, `A`
  `[experts * rank, inputs]` with the expert index outermost, and `B` `[outputs, rank * experts]` with the expert index
  innermost. Gate and up projection are then one module of twice the rank, whose `B` has a block for each projection.
"""

import errno
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from nemo_rl_moe.checksums import INVENTORY_FILE_NAME
from nemo_rl_moe.config.schema_lora import LoraConfig, lora_scale
from nemo_rl_moe.config.schema_run import CRITIC_ROLE
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.classifiers import is_classifier_config
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.vision import VisionFamily
from nemo_rl_moe.models.hf_files import holds_megatron_weights, load_config_json
from nemo_rl_moe.models.safetensors_folder import one_line, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"
"""Folder of the adapter within a folder of merged weights."""
PREFIX = "base_model.model."
SCORE = f"{PREFIX}score.weight"
"""Head of a sequence classifier, which trains with its adapters."""
ExpertForm = Literal["per_expert", "fused"]

# Supported values. With other values, peft's adapter computes something else than this project's adapter.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "layers_to_transform": (None,),
    "modules_to_save": (None, [], ["score"]),
    "trainable_token_indices": (None,),
    "use_dora": (False, None),
    "use_rslora": (False, True, None),
}
# These initializations subtract the adapter from the base. The base then differs from the model in its folder.
_CHANGED_BASE = re.compile(r"pissa|olora|loftq|corda|lora_ga")
_EXPERT = re.compile(
    r"(?P<layer>.*)\.(?P<mlp>\w+)\.experts\.(?:(?P<expert>\d+)\.)?(?P<kind>\w+)\.(?P<factor>lora_[AB])\.weight"
)
TEXT_MODEL, VISION_MODEL = "model.", "model.language_model."
"""Prefixes of a decoder's layers in models of transformers: text models, and models with a vision tower."""
_DECODER = re.compile(r"\b(?:model\.language_model|language_model\.model|model)\.(?=layers\.)")
_LAYER = re.compile(r".*layers\.\d+\.")
_NAMES = {
    "gate": {"router"},
    "w1": {"gate_proj"},
    "w2": {"down_proj"},
    "w3": {"up_proj"},
    "gate_up_proj": {"gate_proj", "up_proj"},
}
"""Last part of a module's name -> targets, for names that differ from their target."""
FUSED_MODULES = ("experts", "base_layer")
"""Last parts of the names of modules with the factors of fused experts."""
_STATE_FILE = "state.json"
_FIRST_HALVES, _SECOND_HALVES = ("gate_proj", "w1"), ("up_proj", "w3")


@dataclass(frozen=True)
class ExpertFactor:
    """The parsed name of a factor of a routed expert.

    Attributes:
        container: transformers' module of the layer's experts.
        expert: Index of the expert, or None if all experts of the layer share the factor.
        fused: The container's parameter that includes the expert's weight.
        half: 0 or 1 for the first or second half of the parameter's outputs, or None for all outputs.
        is_a: Whether the factor is `A`.
    """

    container: str
    expert: int | None
    fused: str
    half: int | None
    is_a: bool


def named_in(decoder: str, name: str) -> str:
    """Return a module's or factor's name with `decoder` as prefix of the layers of a decoder.

    Files, transformers' models with a vision tower, and its text models have different prefixes.
    """
    return _DECODER.sub(decoder, name)


def _modules_of_tower(vision: VisionFamily) -> str:
    names = sorted({prefix.removesuffix(".").rpartition(".")[2] for prefix in vision.prefixes.values()})
    return rf"(?:.*\.)?(?:{'|'.join(names)})\..*"


def is_of_attention(module: str) -> bool:
    """Return whether a module of transformers belongs to a layer's attention or gated delta net."""
    return ".self_attn." in module or ".linear_attn." in module


def expert_factor(name: str) -> ExpertFactor | None:
    """Return a factor's parsed name, or None if the factor does not belong to a routed expert."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    kind = match["kind"]
    half = 0 if kind in _FIRST_HALVES else 1 if kind in _SECOND_HALVES else None
    fused = "down_proj" if kind in ("down_proj", "w2") else "gate_up_proj"
    mlp = "mlp" if match["mlp"] == "block_sparse_moe" else match["mlp"]  # the name in Mixtral's files
    expert = None if match["expert"] is None else int(match["expert"])
    return ExpertFactor(f"{match['layer']}.{mlp}.experts", expert, fused, half, match["factor"] == "lora_A")


def adapter_config(
    lora: LoraConfig, hf_config: Any, base: str, names: Collection[str], form: ExpertForm
) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for an adapter that this package has trained.

    Args:
        base: Name or folder of the base model.
        names: Names of the adapter's factors, before the factors of experts are converted to `form`. With `SCORE`, the
            model is a sequence classifier.
        form: Form of the factors of experts in the folder.
    """
    rank, adapted = lora.rank, [name for name in names if name != SCORE]
    is_classifier = SCORE in names
    modules: set[str] = set()
    parameters: set[str] = set()
    fused: dict[str, set[int | None]] = {}
    family = family_of(hf_config)
    vision = family.vision
    has_experts = family.rules.find("decoder.layers.0.mlp.experts.0.linear_fc1.weight") is not None
    for name in adapted:
        module = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        if found := expert_factor(name):
            fused.setdefault(found.fused, set()).add(found.half)
            if form == "per_expert":
                modules.add(leaf)
        elif leaf in ("gate", "router"):
            parameters.add(f"{_LAYER.sub('', module).replace('block_sparse_moe', 'mlp')}.weight")
        elif has_experts and not is_of_attention(module):
            # In a model with experts, peft applies an MLP's module names to the experts.
            parameters.add(f"{module}.weight")
        else:
            modules.add(leaf)
    ranks = {rf".*\.{parameter}": len(halves) * rank for parameter, halves in fused.items() if len(halves) > 1}
    if form == "fused":
        parameters |= {f"mlp.experts.{parameter}" for parameter in fused}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_classifier else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules) or None,
        # Modules of a vision tower may have the same names.
        "exclude_modules": None if vision is None else _modules_of_tower(vision),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: lora.scale / lora_scale(1.0, each, use_rslora=lora.use_rslora) for name, each in ranks.items()
        },
    }


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the checked content of a folder's `adapter_config.json`."""
    path = folder / CONFIG_FILE
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no plain file")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(
            f"policy.lora.path: {folder} holds no adapter: there is no {CONFIG_FILE}; expected a folder of "
            "peft's, a run's `final`, or a checkpoint of a run with adapters"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigurationError(f"policy.lora.path: {folder}: {CONFIG_FILE} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"policy.lora.path: {path}: got {shown(content)}, expected an object")
    problems = [
        f"policy.lora.path: {path}: {name}: got {shown(content[name])}, supported: {values[0]!r}"
        for name, values in _FIXED.items()
        if content.get(name, values[0]) not in values
    ]
    problems += [
        f"policy.lora.path: {path}: {name}: got {shown(content.get(name))}, expected a number"
        for name in ("r", "lora_alpha")
        if type(content.get(name)) not in (int, float)
    ]
    problems += [] if problems else [f"policy.lora.path: {path}: {line}" for line in _other_scales(content)]
    init = content.get("init_lora_weights")
    if isinstance(init, str) and _CHANGED_BASE.match(init):
        problems.append(
            f"policy.lora.path: {path}: init_lora_weights: got {init!r}, which changes the base model; convert it to a "
            "plain adapter first (peft: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if problems:
        raise ConfigurationError(problems)
    return content


def _other_scales(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each pattern of layers whose scale (`lora_scale`) differs from the scale of other layers."""
    ranks, alphas = content.get("rank_pattern") or {}, content.get("alpha_pattern") or {}
    for name, found in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(found, Mapping) or not all(
            type(value) in (int, float) and value > 0 for value in found.values()
        ):
            yield f"{name}: got {shown(found)}, expected an object of numbers above 0"
            return
    rank, alpha, use_rslora = content["r"], content["lora_alpha"], bool(content.get("use_rslora"))
    scale, denominator = lora_scale(alpha, rank, use_rslora=use_rslora), "the root of rank" if use_rslora else "rank"
    for layers in dict.fromkeys((*ranks, *alphas)):
        own_rank, own_alpha = ranks.get(layers, rank), alphas.get(layers, alpha)
        if not math.isclose(lora_scale(own_alpha, own_rank, use_rslora=use_rslora), scale):
            yield (
                f"layers {shown(layers)} have rank {own_rank} and alpha {own_alpha} (rank_pattern, alpha_pattern), but"
                f" all others {rank} and {alpha}; expected the same scale (alpha over {denominator}) for all layers"
            )


def scores_sequences(folder: Path) -> bool:
    """Return whether an adapter belongs to a sequence classifier, whose head it brings."""
    folder = folder_of_peft(folder)
    if holds_megatron_weights(folder):
        return is_classifier_config(load_config_json(str(folder)))
    return bool(read_adapter_config(folder).get("modules_to_save"))


def factor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of each factor in a peft folder, and of a head that it brings."""
    try:
        with safe_open(folder / WEIGHTS_FILE, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no dict)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"policy.lora.path: {folder}: {WEIGHTS_FILE} cannot be read: {one_line(error)}"
        ) from None


def folder_of_peft(folder: Path) -> Path:
    """Return the adapter's folder within a folder of a run's final weights. Other folders are returned unchanged."""
    inner = folder / ADAPTER_FOLDER
    return inner if not (folder / CONFIG_FILE).is_file() and inner.is_dir() else folder


def is_merged_into(adapter: Path, base: Path) -> bool:
    """Return whether an adapter lies in the final folder of its run, whose weights contain it."""
    folder = folder_of_peft(adapter).resolve()
    is_in_base = folder.name == ADAPTER_FOLDER and folder.parent == base.resolve()
    return is_in_base and (base / INVENTORY_FILE_NAME).is_file()


def section_of_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the section `policy.lora` of the run that wrote a checkpoint. For the folder `critic` in a checkpoint,
    return the critic's section."""
    is_of_critic = folder.name == CRITIC_ROLE and not (folder / _STATE_FILE).exists()
    state, model = (folder.parent, "value") if is_of_critic else (folder, "policy")
    try:
        section = json.loads((state / _STATE_FILE).read_bytes())["config"][model]["lora"]
    except (OSError, ValueError, KeyError, TypeError):
        section = None
    if not isinstance(section, dict):
        raise ConfigurationError(f"policy.lora.path: {folder} is no checkpoint of a run with adapters")
    return section


def lora_of_folder(folder: Path) -> LoraConfig:
    """Return the section `policy.lora`, without dropout, of a peft adapter, or of a run's weights or checkpoint."""
    folder = folder_of_peft(folder)
    if holds_megatron_weights(folder):
        section = {"use_rslora": False, **section_of_checkpoint(folder), "dropout": 0.0, "path": None}
        return _checked(section, folder)
    content = read_adapter_config(folder)
    names = factor_shapes(folder).keys() - {SCORE}
    section = {
        "rank": content["r"],
        "alpha": float(content["lora_alpha"]),
        "use_rslora": bool(content.get("use_rslora")),
        "targets": sorted(_targets(names, content.get("target_parameters") or ())),
        "dropout": 0.0,
        "experts": "per_expert" if any(".experts." in name for name in names) else "none",
        "init": "kaiming",
        "path": None,
    }
    return _checked(section, folder / CONFIG_FILE)


def _checked(section: Mapping[str, Any], where: Path) -> LoraConfig:
    try:
        return LoraConfig.model_validate(section)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigurationError([f"policy.lora.path: {where}: {line}" for line in lines]) from None


def _targets(names: Iterable[str], parameters: Iterable[str]) -> set[str]:
    """Return the targets that follow from the factors' names and from the fused parameters."""
    fused = {parameter.rpartition(".")[2] for parameter in parameters if ".experts." in parameter}
    found = {"down_proj"} & fused | ({"gate_proj", "up_proj"} if "gate_up_proj" in fused else set())
    for name in names:
        module = name.removesuffix(".weight").rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        if leaf not in FUSED_MODULES:
            found |= _NAMES.get(leaf, {leaf})
    return found


def fused_module(container: str, fused: str, parameters: Collection[str]) -> str:
    """Return the name of the module in which peft stores a fused parameter's factors.

    If two parameters of a container have factors, peft wraps the container twice, with one module in the other.
    """
    is_inner = fused == "gate_up_proj" and "down_proj" in parameters
    return f"{container}.base_layer" if is_inner else container
