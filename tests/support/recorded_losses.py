# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses recorded as a router records them."""

from torch import Tensor

from nemo_rl_moe.models.megatron.model.releases import HAS_MOE_METRICS_TRACKER


def record_auxiliary_loss(name: str, value: Tensor, layer_number: int, num_layers: int) -> None:
    """Add to a layer's auxiliary loss as a router does; `layer_number` counts from 1 as in Megatron."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record(name, value, layer_number, num_layers)
        return
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    save_to_aux_losses_tracker(name, value, layer_number, num_layers)
