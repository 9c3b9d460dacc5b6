# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the pipeline stages, by Megatron-Core's rules."""

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.routing.routers import moe_layer_indices


def layers_of_stages(config: TransformerConfig) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, by Megatron-Core's rule."""
    stages = config.pipeline_model_parallel_size
    ends = {0: config.num_layers_in_first_pipeline_stage, stages - 1: config.num_layers_in_last_pipeline_stage}
    given = {stage: layers for stage, layers in ends.items() if layers is not None}
    others = stages - len(given)
    each = (config.num_layers - sum(given.values())) // others if others else 0
    return [given.get(stage, each) for stage in range(stages)]


def layers_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[range]:
    """Return the global 0-based indices of the decoder layers of each model chunk of a pipeline stage."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layers_of_chunk = [layers // chunks for layers in layers_of_stages(config)]
    before = sum(layers_of_chunk[:pipeline_rank])
    # Interleaved: the first chunks of all stages hold the first layers, and so on.
    starts = [chunk * sum(layers_of_chunk) + before for chunk in range(chunks)]
    return [range(start, start + layers_of_chunk[pipeline_rank]) for start in starts]


def moe_positions_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[list[int]]:
    """Return the positions in `moe_layer_indices` of the MoE layers of each model chunk of a pipeline stage."""
    positions = {index: position for position, index in enumerate(moe_layer_indices(config))}
    return [[positions[i] for i in layers if i in positions] for layers in layers_of_chunks(config, pipeline_rank)]
