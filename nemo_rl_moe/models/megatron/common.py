# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The MoE metrics of one `train()` call: reduced over all ranks once, the same numbers on every rank."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.versions import clear_auxiliary_losses, recorded_auxiliary_losses
from nemo_rl_moe.moe.packed_reduction import sum_over_ranks

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

_NAME_OF_BALANCING_TYPE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_Z_LOSS = "z_loss"


def auxiliary_loss_names(config: TransformerConfig) -> list[str]:
    """The losses that this model's routers record, in a fixed order; by the configuration, so equal on all ranks."""
    types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(types, str):
        types, coefficients = [types], [coefficients]
    enabled = {kind for kind, coefficient in zip(types, coefficients, strict=True) if coefficient > 0}
    names = [name for kind, name in _NAME_OF_BALANCING_TYPE.items() if kind in enabled]
    return [*names, _Z_LOSS] if config.moe_z_loss_coeff is not None else names


def moe_layer_indices(config: TransformerConfig) -> list[int]:
    """Global 0-based indices of the decoder layers that have experts, the same on every pipeline stage."""
    if config.num_moe_experts is None:
        return []
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
    return [index for index, has_experts in enumerate(pattern) if has_experts]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the parallel axes over which the recorded values are partial or repeated."""

    tensor_context: int
    data: int


def _share_of_rank(name: str, sizes: _Sizes) -> float:
    """What one rank's recorded value weighs in the sum over all ranks.

    The routers record: for the micro-batch and sequence losses, this rank's part of a sum over the tensor and context
    ranks; for the global-batch loss, its part of a sum over the data-parallel ranks too; for the z-loss, the mean over
    its own tokens. Reported is the mean over data-parallel ranks.
    """
    if name == "global_load_balancing_loss":
        return 1.0
    if name == _Z_LOSS:
        return 1.0 / (sizes.data * sizes.tensor_context)
    return 1.0 / sizes.data


def _reduce_over_ranks(names: Sequence[str], config: TransformerConfig, device: torch.device) -> Tensor:
    """Sum over all ranks, each with its share; [names, layers] in float64 on the host.

    One collective over all axes at once and one copy to the host. A pipeline stage adds zeros for the layers it does
    not hold, and a rank without any record adds zeros throughout, so every rank takes part whatever it holds.
    """
    sizes = _Sizes(
        tensor_context=parallel_state.get_tensor_and_context_parallel_group().size(),
        data=parallel_state.get_data_parallel_world_size(),
    )
    recorded = recorded_auxiliary_losses()
    shares = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        if name in recorded:
            shares[row] = recorded[name][: config.num_layers].to(shares) * _share_of_rank(name, sizes)
    (sums,) = sum_over_ranks([shares], device)
    return sums


def get_moe_metrics(
    loss_scale: float,
    total_loss_dict: MutableMapping[str, float] | None = None,
    per_layer_logging: bool = False,
    *,
    config: TransformerConfig,
    device: torch.device,
) -> dict[str, float]:
    """The auxiliary losses recorded since the last call, before their coefficients. Every rank calls it.

    Args:
        loss_scale: `1 / num_microbatches` of the whole `train()` call on each data-parallel rank.
        total_loss_dict: When given, each `{name}` is added to its entry, as in Megatron-LM's training loop.
        per_layer_logging: Adds `{name}_layer_{i}` for each MoE layer; `i` is the global decoder layer index, 0-based.
        config: The model's effective configuration; says which losses and which layers there are.
        device: Where the reduction runs.

    Returns:
        `{name}`: mean over the MoE layers (their number, not the tracker's length). Keys carry no `moe/` prefix: the
        training loop adds it. A loss that is not enabled has no key. The same dictionary on every rank. The tracker is
        cleared.
    """
    names, layers = auxiliary_loss_names(config), moe_layer_indices(config)
    metrics: dict[str, float] = {}
    if names and layers:
        by_layer = _reduce_over_ranks(names, config, device)[:, layers] * loss_scale
        for name, values in zip(names, by_layer.tolist(), strict=True):
            metrics[name] = sum(values) / len(layers)
            if per_layer_logging:
                metrics |= {f"{name}_layer_{i}": value for i, value in zip(layers, values, strict=True)}
    clear_auxiliary_losses()
    if total_loss_dict is not None:
        for name in metrics.keys() & set(names):
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + metrics[name]
    return metrics
