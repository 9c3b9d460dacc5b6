# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What passes from counting the experts' loads to computing metrics of them."""

from typing import NotRequired, TypedDict

from torch import Tensor


class LayerLoad(TypedDict):
    """What one MoE layer's experts received.

    Attributes:
        expert_load: `[E]`, assignments of each expert.
        aux_loss: The layer's load balancing loss before its coefficient, a scalar; None where there is none.
        n_experts: E.
        topk: Experts that each token goes to; needed for `cv_null_mean` and `cv_excess_mean`.
    """

    expert_load: Tensor
    aux_loss: Tensor | None
    n_experts: int
    topk: NotRequired[int | None]
