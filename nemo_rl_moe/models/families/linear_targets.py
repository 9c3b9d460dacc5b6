# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an adapter can stand beside: their places in a decoder layer, and the names that users give them.

A name is that of a module in transformers, for every family: Mixtral's files call the same products w1, w3 and w2.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_moe.config.schema_lora import ALL_LINEAR, ROUTER, LoraConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.models.families import family_of

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
    **{
        f"{mlp}.{linear}": names
        for mlp in ("mlp", "mlp.shared_experts", ROUTED_EXPERTS)
        for linear, names in _SWIGLU.items()
    },
    "mlp.router": (ROUTER,),
}
"""Place in a decoder layer to the names of the Hugging Face tensors that the layer's weight consists of, in order."""


def chosen_sources(place: str, num_sources: int, targets: Collection[str]) -> list[str | None]:
    """Return the name of each source tensor of a place's weight, None where no adapter is asked for.

    Gate and up projection can be one tensor (gpt-oss): then both names choose it, under the name gate_up_proj.
    """
    names = PLACES[place]
    all_of_them = ALL_LINEAR in targets and place != "mlp.router"
    chosen: list[str | None] = [name if all_of_them or name in targets else None for name in names]
    if len(names) > num_sources:
        return ["gate_up_proj" if any(chosen) else None]
    return chosen


def target_problems(lora: LoraConfig, hf_config: Any) -> list[str]:
    """Return a line for each target that the model has no layer for, or cannot have an adapter of its own."""
    family = family_of(hf_config)
    if family.vision is not None:
        return ["policy.lora: got an adapter, expected null for a vision-language model"]
    if "linear_attention" in (getattr(hf_config, "layer_types", None) or ()):
        return [
            f"policy.lora: got an adapter, expected null for {family.name}: the projections of gated delta nets have"
            " none"
        ]
    known = dict(_names_of_model(hf_config))
    names = {name for of_place in known.values() for name in of_place}
    problems = [
        f"policy.lora.targets: got {target!r}, and {family.name} has no such layer; it has: "
        f"{', '.join(sorted(names))}{did_you_mean(nearest(target, names))}"
        for target in lora.targets
        if target != ALL_LINEAR and target not in names
    ]
    experts = [name for place, of_place in known.items() if place.startswith(ROUTED_EXPERTS) for name in of_place]
    if not experts and lora.experts != "none":
        problems.append(f"policy.lora.experts: got {lora.experts!r}, expected 'none': {family.name} has no experts")
    fused = "gate_up_proj" in _fused_experts(hf_config)
    if fused and lora.experts != "none" and len({"gate_proj", "up_proj"} & {*lora.targets}) == 1:
        problems.append(
            f"policy.lora.targets: got one of gate_proj and up_proj, expected both or none: in {family.name} they are "
            "one tensor"
        )
    return problems


def _names_of_model(hf_config: Any) -> Iterator[tuple[str, Sequence[str]]]:
    rules = family_of(hf_config).rules
    latent = getattr(hf_config, "kv_lora_rank", None) is not None
    low_rank_queries = getattr(hf_config, "q_lora_rank", None) is not None
    for place, names in PLACES.items():
        middle = f"{ROUTED_EXPERTS}.0" if place.startswith(ROUTED_EXPERTS) else None
        name = place.replace(ROUTED_EXPERTS, middle) if middle else place
        if rules.find(f"decoder.layers.0.{name}.weight") is None:
            continue
        if latent and place in _OTHER_QUERIES[low_rank_queries]:
            continue
        yield place, names


_OTHER_QUERIES = {
    False: ("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"),
    True: ("self_attention.linear_q_proj",),
}
"""By whether queries have a latent too: the projections that such a model has not, though its family has."""


def _fused_experts(hf_config: Any) -> tuple[str, ...]:
    found = family_of(hf_config).rules.find(f"decoder.layers.0.{ROUTED_EXPERTS}.0.linear_fc1.weight")
    return ("gate_up_proj",) if found is not None and len(found.sources) == 1 else ()
