# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The formats that `nemo-rl-moe convert` knows."""

from typing import Literal, get_args

WeightsFormat = Literal["hf", "megatron"]
NumberFormat = Literal["float32", "bfloat16"]
WEIGHTS_FORMATS: tuple[WeightsFormat, ...] = get_args(WeightsFormat)
NUMBER_FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)
