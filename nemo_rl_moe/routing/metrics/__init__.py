# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load balance of experts: counts on the device, and the metrics computed from them."""
