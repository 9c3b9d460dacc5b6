# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers that can have an adapter: their positions in a decoder layer, and their names in a configuration.

For every family, these are the names of transformers' modules. For example, `gate_proj`, `up_proj` and `down_proj` are
also the names for Mixtral, whose files use `w1`, `w3` and `w2`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemo_rl_moe.config.schema_lora import ALL_LINEAR, ROUTER, LoraConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.rules import Rule

_SWIGLU = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
ROUTED_EXPERTS = "mlp.experts"
PLACES: Mapping[str, tuple[str, ...]] = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("kv_b_proj",),
    "self_attention.linear_proj": ("o_proj",),
    "self_attention.in_proj": (),
    "self_attention.out_proj": ("out_proj",),
    **{
        f"{mlp}.{linear}": names
        for mlp in ("mlp", "mlp.shared_experts", ROUTED_EXPERTS)
        for linear, names in _SWIGLU.items()
    },
    "mlp.router": (ROUTER,),
}
"""Position of a linear layer in a decoder layer -> names of the Hugging Face tensors that form its weight, in order.

The input projections of gated delta nets have no names here, because families divide them differently."""


def _names(place: str, rule: Rule) -> tuple[str, ...]:
    return PLACES[place] or tuple(source.name.removesuffix(".weight").rpartition(".")[2] for source in rule.sources)


def _num_tensors(rule: Rule) -> int:
    return len({source.name for source in rule.sources})


def chosen_sources(place: str, rule: Rule, targets: Collection[str]) -> list[str | None]:
    """Return the name of each source tensor of a linear layer's weight, or None for a tensor without an adapter.

    If gate and up projection are one tensor (gpt-oss), both names select the tensor, and its name is gate_up_proj.
    """
    names = _names(place, rule)
    all_of_them = ALL_LINEAR in targets and place != "mlp.router"
    chosen: list[str | None] = [name if all_of_them or name in targets else None for name in names]
    if _num_tensors(rule) < len({*names}):
        return ["gate_up_proj" if any(chosen) else None] * len(rule.sources)
    return chosen


def target_problems(lora: LoraConfig, hf_config: Any) -> list[str]:
    """Return a line for each target that is not a layer of the model, or cannot have a separate adapter."""
    family = family_of(hf_config)
    if not family.takes_adapters:
        return [f"policy.lora: got a section, expected null: adapters of {family.name} are not supported"]
    known = _names_of_model(hf_config)
    names = {name for of_place in known.values() for name in of_place}
    problems = [
        f"policy.lora.targets: got {target!r}, but {family.name} has no such layer; it has: "
        f"{', '.join(sorted(names))}{did_you_mean(nearest(target, names))}"
        for target in lora.targets
        if target != ALL_LINEAR and target not in names
    ]
    experts = [name for place, of_place in known.items() if place.startswith(ROUTED_EXPERTS) for name in of_place]
    if not experts and lora.experts != "none":
        problems.append(f"policy.lora.experts: got {lora.experts!r}, expected 'none': {family.name} has no experts")
    fc1 = family.rules.find(f"decoder.layers.0.{ROUTED_EXPERTS}.0.linear_fc1.weight")
    is_fused = fc1 is not None and _num_tensors(fc1) == 1
    if is_fused and lora.experts != "none" and len({"gate_proj", "up_proj"} & {*lora.targets}) == 1:
        problems.append(
            f"policy.lora.targets: got one of gate_proj and up_proj, expected both or none: in {family.name} they are "
            "one tensor"
        )
    return problems


def adapted_modules(lora: LoraConfig, hf_config: Any) -> dict[str, str]:
    """Return target -> last part of its modules' names in files, for layers outside of routed experts."""
    rules = family_of(hf_config).rules
    found = {}
    for place in _names_of_model(hf_config):
        if place.startswith(ROUTED_EXPERTS):
            continue
        rule = rules.find(f"decoder.layers.0.{place}.weight")
        assert rule is not None  # the model has the place
        for source, name in zip(rule.sources, chosen_sources(place, rule, lora.targets), strict=True):
            if name is not None:
                found[name] = source.name.removesuffix(".weight").rpartition(".")[2]
    return found


def _names_of_model(hf_config: Any) -> dict[str, Sequence[str]]:
    rules = family_of(hf_config).rules
    has_latent_queries = getattr(hf_config, "q_lora_rank", None) is not None
    absent = _OTHER_QUERIES[has_latent_queries] if getattr(hf_config, "kv_lora_rank", None) is not None else ()
    found = {
        place: rules.find(f"decoder.layers.0.{place.replace(ROUTED_EXPERTS, f'{ROUTED_EXPERTS}.0')}.weight")
        for place in PLACES
        if place not in absent
    }
    return {place: _names(place, rule) for place, rule in found.items() if rule is not None}


_OTHER_QUERIES = {
    False: ("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"),
    True: ("self_attention.linear_q_proj",),
}
"""Query projections that a model with latent attention lacks, by whether it computes queries from a latent."""
