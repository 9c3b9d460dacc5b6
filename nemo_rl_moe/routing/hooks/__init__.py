# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks that record and audit routed experts in other training loops. Each imports the other library only when used."""
