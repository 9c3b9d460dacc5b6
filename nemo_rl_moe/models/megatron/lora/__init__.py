# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0

from nemo_rl_moe.models.megatron.cpu import first_import  # noqa: F401
