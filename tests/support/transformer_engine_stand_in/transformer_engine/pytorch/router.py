# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of routers, which nothing here stands in for: `moe_router_fusion` is off by default."""

from typing import NoReturn


def _missing(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("moe_router_fusion needs a GPU")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _missing
