# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agreement of captured routing with the routers that train, and checks of captured routes."""
