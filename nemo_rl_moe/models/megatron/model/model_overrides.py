# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`policy.megatron_cfg.model_overrides`: fields of Megatron-Core's TransformerConfig without a key of their own."""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from nemo_rl_moe.config.schema_policy import MegatronConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, transformer_config_fields

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

KEY = "policy.megatron_cfg.model_overrides"
_KEYS = {
    "params_dtype": "policy.precision",
    "pipeline_dtype": "policy.precision",
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "recompute_granularity": "policy.megatron_cfg.activation_checkpointing",
    "recompute_method": "policy.megatron_cfg.activation_checkpointing",
    "recompute_num_layers": "policy.megatron_cfg.activation_checkpointing",
    "calculate_per_token_loss": "loss_fn, which weighs tokens by itself",
    "pipeline_model_parallel_layout": "policy.megatron_cfg.num_layers_in_first_pipeline_stage and _last_",
}
"""Fields that follow from keys of other names, which the rest of the program reads."""
_CUDA_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
_NARROW_FORMATS = ("fp8", "fp4")
_ADAPTER = ConfigDict(strict=True, arbitrary_types_allowed=True)


def read_overrides(values: Mapping[str, Any], of_the_model: Collection[str]) -> dict[str, Any]:
    """Convert fields for the TransformerConfig: names of enumerations become their members.

    Raises:
        ConfigurationError: A field is unknown, is decided elsewhere, or does not take the value; one line each.
    """
    if not values:
        return {}
    hints = get_type_hints(TransformerConfig)
    found, problems = dict[str, Any](), list[str]()
    for name, value in values.items():
        if problem := next(_problems_with_name(name, of_the_model, hints), None):
            problems.append(f"{KEY}.{name}: {problem}")
            continue
        try:
            found[name] = _read(value, hints[name])
        except (ValueError, ValidationError) as error:
            reported = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            problems.append(f"{KEY}.{name}: got {value!r}: {reported}")
    if problems:
        raise ConfigurationError(problems)
    return found


def _problems_with_name(name: str, of_the_model: Collection[str], hints: Mapping[str, Any]) -> Iterator[str]:
    if name in MegatronConfig.model_fields:
        yield f"has a key of its own: policy.megatron_cfg.{name}"
    if name in _KEYS:
        yield f"follows from {_KEYS[name]}"
    if name in _CUDA_GRAPHS:
        yield "is not supported: a graph runs no hooks, so that loads would be 0 and nothing replayed, without a word"
    if name.startswith(_NARROW_FORMATS):
        yield "is not supported: packed sequences are no multiples of 16 tokens, and weights are exported in 16 bits"
    fields = transformer_config_fields()
    if name not in fields:
        hint = did_you_mean(nearest(name, sorted(fields)))
        yield f"megatron-core {MEGATRON_VERSION} has no such field of TransformerConfig{hint}"
    if name in of_the_model:
        yield "comes from the model's config.json"
    if not _fits_in_yaml(hints[name]):
        yield "cannot be said in YAML"


def _fits_in_yaml(hint: Any) -> bool:
    """Return False for functions, number formats and other objects."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    return not any(
        kind is torch.dtype or (not isinstance(kind, type) and "Callable" in str(kind)) or "ContextManager" in str(kind)
        for kind in kinds
    )


def _read(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {member.name: member for member in hint}
        if value not in members:
            raise ValueError(f"expected one of {', '.join(members)}")
        return members[value]
    return TypeAdapter(hint, config=_ADAPTER).validate_python(value)
