# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of the configuration that are now called something else; the error for the old name says so."""

_MEASURED = "policy.megatron_cfg.routing_measurements"
RENAMED_KEYS = {
    "logger.expert_load_pictures": "logger.expert_load_plots",  # older name
    "policy.megatron_cfg.routing_tape": "policy.megatron_cfg.capture_routing",  # older name
    f"{_MEASURED}.save_tape": f"{_MEASURED}.save_capture",  # older name
}
"""Old name to new name; keys below a section that is listed are renamed with it."""


def new_key(name: str) -> str | None:
    """Return what a key is called now; None where it has not been renamed."""
    for old, new in RENAMED_KEYS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
