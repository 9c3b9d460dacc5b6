# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fast modules for Megatron-Core's layer spec on machines without Transformer Engine.

`fast_layer_spec` puts the fast modules into a stock layer spec if the configuration allows it. Each module computes the
same as the stock module. Parameter names are the same too, except for the routed experts, whose weights are stacked.
"""
