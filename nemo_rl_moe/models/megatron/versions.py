# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place that knows how the supported versions of Megatron-Core differ."""

import dataclasses
import functools
import importlib.metadata

from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

MEGATRON_VERSION: str = importlib.metadata.version("megatron-core")
HAS_MOE_METRICS_TRACKER: bool = tuple(int(part) for part in MEGATRON_VERSION.split(".")[:2]) >= (0, 17)


def recorded_auxiliary_losses() -> dict[str, Tensor]:
    """What this rank's routers recorded since the last clear.

    Returns:
        Name to a tensor with one entry for each decoder layer, the sum over the microbatches, not reduced over ranks.
        The tensors are Megatron's own: do not write to them.
    """
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}


def record_auxiliary_loss(name: str, value: Tensor, layer_number: int, num_layers: int) -> None:
    """Adds to a layer's auxiliary loss as a router does; `layer_number` counts from 1 as in Megatron."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record(name, value, layer_number, num_layers)
        return
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    save_to_aux_losses_tracker(name, value, layer_number, num_layers)


def clear_auxiliary_losses() -> None:
    """Sets every recorded auxiliary loss of this rank back to zero."""
    # 0.19 returns copies from its old functions, so the sums are cleared where they live.
    for values in recorded_auxiliary_losses().values():
        values.zero_()


@functools.cache
def transformer_config_fields() -> frozenset[str]:
    """Names of the fields that this version's TransformerConfig has."""
    return frozenset(field.name for field in dataclasses.fields(TransformerConfig))
