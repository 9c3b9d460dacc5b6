# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The MoE metrics of one `train()` call, for any training loop around Megatron-Core."""

from collections.abc import MutableMapping

import torch

from nemo_rl_moe.models.megatron.moe_layers import auxiliary_loss_names
from nemo_rl_moe.models.megatron.moe_report import MoEReportOptions, collect_moe_report
from nemo_rl_moe.moe.recorder import ExpertLoadRecorder

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig


def get_moe_metrics(
    loss_scale: float,
    total_loss_dict: MutableMapping[str, float] | None = None,
    per_layer_logging: bool = False,
    *,
    config: TransformerConfig,
    device: torch.device,
    recorder: ExpertLoadRecorder | None = None,
) -> dict[str, float]:
    """The MoE metrics since the last call, reduced over all ranks. Every rank calls it.

    Args:
        loss_scale: `1 / num_microbatches` of the whole `train()` call on each data-parallel rank.
        total_loss_dict: When given, each auxiliary loss is added to its entry, as in Megatron-LM's training loop.
        per_layer_logging: Adds `{name}_layer_{i}` for each MoE layer; `i` is the global decoder layer index, 0-based.
        config: The model's effective configuration; says which losses and which layers there are.
        device: Where the reduction runs.
        recorder: Adds load balance and overload factors from its counts.

    Returns:
        Auxiliary losses before their coefficients: `{name}` is the mean over the MoE layers (their number, not the
        tracker's length). Keys carry no `moe/` prefix: the training loop adds it. A loss that is not enabled has no
        key. The same dictionary on every rank. Megatron's tracker is cleared.
    """
    options = MoEReportOptions(per_layer=per_layer_logging)
    metrics = collect_moe_report(loss_scale, options, config=config, device=device, recorder=recorder).metrics
    if total_loss_dict is not None:
        for name in metrics.keys() & set(auxiliary_loss_names(config)):
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + metrics[name]
    return metrics
