# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What studies of many runs share: their runs one after the other, their measures, and intervals over seeds."""
