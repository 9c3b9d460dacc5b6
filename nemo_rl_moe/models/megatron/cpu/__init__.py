# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fast modules for Megatron-Core's layer spec on machines without Transformer Engine.

`fast_layer_spec` puts them into a stock layer spec if the configuration allows. Each computes the same as the stock
module. Parameter names are the stock ones, except for the routed experts, whose weights are stacked.
"""
