# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration: YAML with inheritance and overrides in, a strictly typed and frozen model out.

Imports pydantic, OmegaConf and the standard library only, so that checking a configuration takes no heavy import.
`loading.load_any_config` reads a configuration, and `loading.dump_resolved` writes one.
"""
