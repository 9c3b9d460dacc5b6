# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which layers have experts, which pipeline stage holds them, and which auxiliary losses their routers record."""

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

Z_LOSS = "z_loss"
GLOBAL_BATCH_LOSS = "global_load_balancing_loss"
_NAME_OF_BALANCING_TYPE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": GLOBAL_BATCH_LOSS,
}


def auxiliary_loss_names(config: TransformerConfig) -> list[str]:
    """The losses that this model's routers record, in a fixed order; by the configuration, so equal on all ranks."""
    types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(types, str):
        types, coefficients = [types], [coefficients]
    enabled = {kind for kind, coefficient in zip(types, coefficients, strict=True) if coefficient > 0}
    names = [name for kind, name in _NAME_OF_BALANCING_TYPE.items() if kind in enabled]
    return [*names, Z_LOSS] if config.moe_z_loss_coeff is not None else names


def moe_layer_indices(config: TransformerConfig) -> list[int]:
    """Global 0-based indices of the decoder layers that have experts, the same on every pipeline stage."""
    if config.num_moe_experts is None:
        return []
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
    return [index for index, has_experts in enumerate(pattern) if has_experts]


def layers_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[range]:
    """For each model chunk of a pipeline stage, the global 0-based indices of its decoder layers."""
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    layers_of_chunk = config.num_layers // (stages * chunks)
    # Interleaved: the first chunks of all stages hold the first layers, then come the second chunks.
    starts = [(chunk * stages + pipeline_rank) * layers_of_chunk for chunk in range(chunks)]
    return [range(start, start + layers_of_chunk) for start in starts]


def moe_positions_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[list[int]]:
    """For each model chunk of a pipeline stage, the positions of its layers in `moe_layer_indices`."""
    positions = {index: position for position, index in enumerate(moe_layer_indices(config))}
    return [[positions[i] for i in layers if i in positions] for layers in layers_of_chunks(config, pipeline_rank)]
