# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of vLLM's engines with `policy.generation.lora_refit: adapter`. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.schema_lora import ALL_LINEAR, LoraConfig
from nemo_rl_moe.generation.vllm.config import KEY, section_of

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`. An adapter of a rank between two of them gets buffers of the larger one."""
_HOW = "with policy.generation.backend vllm and policy.generation.lora_refit adapter"
_OF_LATENT_ATTENTION = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}


def delivered_adapters(policy: "GeneratingPolicyConfig") -> LoraConfig | None:
    """Return the adapters that engines apply to the base, or None if engines get merged weights."""
    return policy.lora if policy.generation.lora_refit == "adapter" else None


def adapters_can_be_served(config: "GRPOMasterConfig") -> Iterator[str]:
    """Yield a problem for each setting with which vLLM cannot apply the adapters."""
    lora = delivered_adapters(config.policy)
    if lora is None:
        return
    if lora.experts != "none":
        yield (
            f"policy.lora.experts: got {lora.experts}, expected none {_HOW}: vLLM applies no adapters to experts on"
            " CPUs, and on GPUs this has not been tried; policy.generation.backend megatron_separate applies them"
        )
    if lora.rank > RANKS[-1]:
        yield f"policy.lora.rank: got {lora.rank}, expected at most {RANKS[-1]} {_HOW}"
    if section_of(config).prefix_caching == "keep":
        yield (
            f"{KEY}.prefix_caching: got 'keep', expected 'reset' {_HOW}: vLLM keeps the prefixes of each adapter apart,"
            " so none would be used after an update"
        )


def target_problem(lora: LoraConfig, hf_config: Any, model_name: str) -> str | None:
    """Return the problem if vLLM applies no adapters to some targets in this model, else None."""
    from nemo_rl_moe.models.families.linear_targets import adapted_modules

    names = adapted_modules(lora, hf_config)
    if not (refused := sorted(names.keys() & _OF_LATENT_ATTENTION)):
        return None
    all_linear = lora.model_copy(update={"targets": [ALL_LINEAR]})
    known = names.keys() - _OF_LATENT_ATTENTION or adapted_modules(all_linear, hf_config).keys() - _OF_LATENT_ATTENTION
    served = ", ".join(sorted(known))
    return (
        f"policy.lora.targets: got [{', '.join(lora.targets)}], expected some of {served} {_HOW}: vLLM applies no"
        f" adapters to {', '.join(refused)} of {model_name}"
    )
