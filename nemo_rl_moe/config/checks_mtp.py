# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between `policy.megatron_cfg.mtp_num_layers` and other settings. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.schema import MasterConfig

_MEGATRON = "policy.megatron_cfg"


def mtp_can_be_trained(config: MasterConfig) -> Iterator[str]:
    """Check that no setting conflicts with the training of layers of multi-token prediction."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if megatron.mtp_num_layers is None:
        return
    got = f"{_MEGATRON}.mtp_num_layers: got {megatron.mtp_num_layers}, expected null with"
    if algorithm_of(config).sequences_per_sample > 1:
        yield f"{got} the algorithm {algorithm_of(config).name}: the layers would learn the rejected responses too"
    if policy.lora is not None:
        yield f"{got} policy.lora, which trains adapters only"
    if policy.shared_prefix is not False:
        yield f"{got} policy.shared_prefix {str(policy.shared_prefix).lower()}: a shared token has several next tokens"
    if megatron.context_parallel_size > 1:
        yield (
            f"{got} {_MEGATRON}.context_parallel_size {megatron.context_parallel_size}: the next token may be on"
            " another rank"
        )
    if megatron.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"{got} {_MEGATRON}.virtual_pipeline_model_parallel_size {megatron.virtual_pipeline_model_parallel_size},"
            " which is not supported"
        )
    if megatron.pipeline_model_parallel_size > 1 and not megatron.mtp_detach_heads:
        yield (
            f"{_MEGATRON}.mtp_detach_heads: got false, expected true with {_MEGATRON}.pipeline_model_parallel_size"
            f" {megatron.pipeline_model_parallel_size}: the last stage has only a copy of the embedding"
        )
    if megatron.model_overrides.get("gradient_accumulation_fusion") and not megatron.mtp_detach_heads:
        yield (
            f"{_MEGATRON}.mtp_detach_heads: got false, expected true with"
            f" {_MEGATRON}.model_overrides.gradient_accumulation_fusion true, which leaves out the output layer's"
            " gradient of these layers"
        )


MTP_RULES = (mtp_can_be_trained,)
