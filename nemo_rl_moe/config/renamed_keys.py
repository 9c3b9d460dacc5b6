# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Renamed keys of the configuration, for the error about the old name."""

import re

_MEASURED = "policy.megatron_cfg.routing_measurements"
RENAMED_KEYS = {
    "logger.expert_load_pictures": "logger.expert_load_plots",  # older name
    "policy.megatron_cfg.routing_tape": "policy.megatron_cfg.capture_routing",  # older name
    f"{_MEASURED}.save_tape": f"{_MEASURED}.save_capture",  # older name
    "grpo.dynamic_sampling_max_gen_batches": "grpo.dynamic_sampling_max_groups",  # in rounds
}
"""Old full key -> new full key. For a section, the keys in it are renamed too."""
_CONDITIONS = {
    "grpo.dynamic_sampling_max_gen_batches": "in groups: rounds times grpo.num_prompts_per_step",
}
_ENV_KEYS = {
    "name": (
        "reward.kind",
        "reward: null and driver.kind for verifiers and openenv; custom with reward.factory for code",
    ),
    "parameters": ("reward.parameters", "driver.id and driver.arguments of verifiers"),
    "num_workers": ("reward.num_workers", ""),
    "timeout_s": ("reward.timeout_s", "driver.step_timeout_s of openenv"),
    "answer_after": ("reward.answer_after", ""),
    "reasoning_gym": ("reward", "with reward.kind reasoning_gym"),
    "callable": ("reward", "with reward.kind callable"),
    "openenv": ("driver", "with driver.kind openenv; app and url are server"),
    "rollout": ("driver.function", "with driver.kind function"),
    "agent": ("driver.program", "with driver.kind agent"),
    "agent_command": ("driver.program", "with driver.kind agent"),
    "agent_limits": ("driver.limits", "with driver.kind agent"),
    "tools": ("driver.tools", "with driver.kind tools"),
    "mcp_servers": ("driver.mcp_servers", "with driver.kind tools"),
    "tool_parameters": ("driver.parameters", "with driver.kind tools"),
    "tool_format": ("driver.format", "with driver.kind tools or agent"),
    "tool_limits": ("driver.limits", "with driver.kind tools"),
    "max_turns": ("driver.max_turns", "with driver.kind tools, agent or openenv"),
    "tool_call_cost": ("driver.call_cost", "with driver.kind tools"),
}
"""Old key of an environment -> its new key, and the condition under which the new key applies."""
_OF_ENVIRONMENT = re.compile(r"(env(?:\.mixture\.[^.]+)?)\.([^.]+)(.*)")


def new_key(name: str) -> str | None:
    """Return the new name of a key, or None if it has not been renamed."""
    for old, new in RENAMED_KEYS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    found = _OF_ENVIRONMENT.fullmatch(name)
    if found is None or found[2] not in _ENV_KEYS:
        return None
    section, key, below = found.groups()
    return f"{section}.{_ENV_KEYS[key][0]}{below}"


def new_key_in_words(name: str) -> str | None:
    """Return the new name of a key with the condition under which it applies, or None if the key has not been
    renamed."""
    new, found = new_key(name), _OF_ENVIRONMENT.fullmatch(name)
    condition = _CONDITIONS.get(name, "") if found is None else _ENV_KEYS.get(found[2], ("", ""))[1]
    return f"{new} ({condition})" if new and condition else new
