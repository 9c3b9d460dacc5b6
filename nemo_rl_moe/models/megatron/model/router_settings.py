# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Origin of each effective router setting, and the `config.json` of exported weights with these settings.

Weights do not show with which settings they were trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.rules import ModelFamily
from nemo_rl_moe.models.families.vision import decoder_section
from nemo_rl_moe.models.megatron.layers.routers import FORCED_ROUTING_FIELDS
from nemo_rl_moe.models.megatron.model.transformer_config import (
    Z_LOSS,
    auxiliary_loss_names,
    effective_moe_configuration,
)
from nemo_rl_moe.models.megatron.model.transformer_problems import BIAS_RATE

_CONFIG_DICT = Mapping[str, Any]
# Settings that decide about routes, results or weights. All others only change how a router learns, or how the same
# result is computed.
_OF_THE_MODEL = frozenset(
    {
        "moe_apply_probs_on_input",
        "moe_expert_capacity_factor",
        "moe_ffn_hidden_size",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
    }
)
SIZES_OF_THE_MODEL = frozenset({"moe_ffn_hidden_size", "moe_layer_freq"})
"""Settings that determine which weights exist, and their shapes. config.json has them under other names."""
_KEY = "policy.megatron_cfg."


def setting_sources(
    policy: PolicyConfig, hf_config: Any, config_json: _CONFIG_DICT, config: TransformerConfig
) -> dict[str, str]:
    """Return name -> origin (such as a key of config.json) of each router setting unlike Megatron-Core's default."""
    family = family_of(hf_config)
    own = family.transformer_fields(hf_config)
    chosen = policy.megatron_cfg.moe_transformer_fields
    freezing = {
        "policy.freeze.language_model": policy.freeze.language_model,
        "policy.lora": policy.lora is not None,
        "policy.megatron_cfg.freeze_moe_router": policy.megatron_cfg.freeze_moe_router,
    }
    frozen_by = next((key for key, freezes in freezing.items() if freezes), None)
    sources = {}
    for name in effective_moe_configuration(config):
        if name in FORCED_ROUTING_FIELDS or name in chosen:
            sources[name] = f"policy.megatron_cfg{_what_it_replaces(name, own, chosen)}"
        elif name == BIAS_RATE and frozen_by is not None:
            sources[name] = f"follows from {frozen_by}"
        elif name == "moe_router_load_balancing_type" and own.get(name) != getattr(config, name):
            sources[name] = "follows from policy.megatron_cfg.moe_aux_loss_coeff"
        elif name in family.router_fields:
            sources[name] = _source_in_model(family.router_fields[name], family.name, hf_config, config_json)
        elif name in own and (name.startswith("moe_") or name == "num_moe_experts"):
            sources[name] = "the model"
    return sources


def _what_it_replaces(name: str, own: _CONFIG_DICT, chosen: _CONFIG_DICT) -> str:
    return f"; the model's own is {own[name]}" if name in own and own[name] != chosen.get(name) else ""


def _source_in_model(field: str | None, family: str, hf_config: Any, config_json: _CONFIG_DICT) -> str:
    if field is None:
        return f"as {family} has it"
    if _is_in_file(field, hf_config, decoder_section(config_json, family_of(hf_config).vision)):
        return f"config.json: {field}"
    if not hasattr(hf_config, field):
        return f"config.json does not set {field}"
    return f"transformers' default of {field}, which config.json does not set"


def _is_in_file(field: str, hf_config: Any, config_json: _CONFIG_DICT) -> bool:
    """Return whether the file has a field, under this or another name that transformers knows for it."""
    other_names: Mapping[str, str] = hf_config.attribute_map
    names = {field, other_names.get(field), *(new for new, old in other_names.items() if old == field)}
    return any(name in config_json for name in names if name is not None)


def setting_warnings(
    policy: PolicyConfig, hf_config: Any, config_json: _CONFIG_DICT, config: TransformerConfig
) -> list[str]:
    """Return warnings about a run's router settings, one line for each."""
    if config.num_moe_experts is None:
        return []
    family, chosen = family_of(hf_config), policy.megatron_cfg.moe_transformer_fields
    lines = []
    losses = set(auxiliary_loss_names(config)) - {Z_LOSS}
    if losses and "moe_aux_loss_coeff" not in chosen:
        source = _source_in_model(family.router_fields["moe_aux_loss_coeff"], family.name, hf_config, config_json)
        lines.append(
            f"moe_aux_loss_coeff: {config.moe_aux_loss_coeff} trains the routers, though the run's configuration does "
            f"not say so ({source}); {_KEY}moe_aux_loss_coeff sets it (0: no loss)"
        )
    if policy.init == "pretrained":
        lines += [
            f"{_KEY}{name}: {chosen[name]} takes the place of the model's own {own}, with which its weights were "
            "trained"
            for name in sorted(chosen.keys() & _OF_THE_MODEL)
            if (own := _own(hf_config, name)) != chosen[name]
        ]
    return lines


@dataclass(frozen=True)
class ExportedConfig:
    """The `config.json` of exported weights.

    Attributes:
        content: The model's file, with the type of the weights and the changed settings.
        not_expressed: Names of effective settings that transformers' model does not support.
    """

    content: dict[str, Any]
    not_expressed: tuple[str, ...]


def exported_config(
    policy: PolicyConfig,
    hf_config: Any,
    config_json: _CONFIG_DICT,
    config: TransformerConfig,
    *,
    has_kept_tensors: bool = False,
) -> ExportedConfig:
    """Return the `config.json` of exported weights: the model's file with the run's router settings.

    Args:
        config_json: Content of the model's file.
        config: Effective settings of the run.
        has_kept_tensors: Whether the exported folder contains the tensors of `ModelFamily.kept_tensors`.
    """
    family = family_of(hf_config)
    # The model's code files are not copied, and not needed: transformers knows the family.
    content = {name: value for name, value in config_json.items() if name != "auto_map"}
    section = content.get("text_config")
    if not has_kept_tensors:
        content |= _declared_absent(family, content)
        if isinstance(section, Mapping):
            content["text_config"] = {**section, **_declared_absent(family, section)}
    content["torch_dtype" if "torch_dtype" in content else "dtype"] = policy.precision
    if config.num_moe_experts is None:
        return ExportedConfig(content, ())
    if family.vision is not None and isinstance(content.get("text_config"), Mapping):
        of_decoder, not_expressed = _with_settings(policy, hf_config, content["text_config"], config)
        return ExportedConfig(content | {"text_config": of_decoder}, not_expressed)
    return ExportedConfig(*_with_settings(policy, hf_config, content, config))


def _declared_absent(family: ModelFamily, content: _CONFIG_DICT) -> dict[str, Any]:
    """Return the fields that declare that the kept tensors are absent, if the file has these fields."""
    return {name: value for name, value in family.exported_fields.items() if name in content}


def _with_settings(
    policy: PolicyConfig, hf_config: Any, content: _CONFIG_DICT, config: TransformerConfig
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the decoder's fields with the run's settings, and the names of settings that they cannot express."""
    family, content = family_of(hf_config), dict(content)
    not_expressed = []
    # The coefficient comes first: the kind of a loss follows from it in many families.
    chosen = policy.megatron_cfg.moe_transformer_fields.keys()
    for name in sorted(chosen & (family.router_fields.keys() | _OF_THE_MODEL)):
        in_force = getattr(config, name)
        if _as_transformers_has_it(hf_config, content, name) == in_force:
            continue
        for candidate in _candidates(family.router_fields, name, in_force):
            changed = content | candidate
            if _as_transformers_has_it(hf_config, changed, name) == in_force:
                content = changed
                break
        else:
            not_expressed.append(name)
    return content, tuple(name for name in not_expressed if name in _OF_THE_MODEL)


def _candidates(fields: Mapping[str, str | None], name: str, value: Any) -> list[dict[str, Any]]:
    """Return candidates, each field -> value of `config.json`, that could express this setting."""
    field = fields.get(name)
    if field is None:
        return []
    if name == "moe_router_load_balancing_type":
        # A separate field is a switch. Otherwise the coefficient expresses the kind too.
        return [] if field == fields.get("moe_aux_loss_coeff") else [{field: True}, {field: False}]
    if isinstance(value, bool):
        # Some families state the opposite of Megatron-Core's field.
        return [{field: value}, {field: not value}]
    return [{field: value}] if isinstance(value, int | float) else []


def _as_transformers_has_it(hf_config: Any, content: _CONFIG_DICT, name: str) -> Any:
    """Return transformers' setting for this `config.json`, or an object equal to nothing if transformers refuses it."""
    try:
        found = type(hf_config).from_dict(dict(content))
        if family_of(hf_config).vision is not None:
            # One flat configuration: fields outside of the decoder's section change no router.
            found = SimpleNamespace(**{**vars(hf_config), **vars(found), "model_type": hf_config.model_type})
        return _own(found, name)
    except Exception:  # transformers and the family raise errors of several types
        return object()


def _own(hf_config: Any, name: str) -> Any:
    """Return the value of a setting according to the model's `config.json`, without the user's settings."""
    fields = family_of(hf_config).transformer_fields(hf_config)
    return fields[name] if name in fields else getattr(TransformerConfig, name, None)
