# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a generation engine that has a copy of the weights, and of weights in transit, by arithmetic."""

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.config.engine import EngineSize
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.models.megatron.model.memory_estimate import parameters_of_layers
from nemo_rl_moe.routing.routers import moe_layer_indices
from nemo_rl_moe.weight_sync.folder import BUCKET_BYTES, MAX_UNACKNOWLEDGED
from nemo_rl_moe.weight_sync.transport_backends import DEVICE_BUCKET_BYTES

ON_DEVICE = ("cuda_ipc", "nccl")
"""Weight transports that need no host memory."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine.

    Attributes:
        cache_of_a_token: Bytes of the key-value cache for one token.
    """

    weights: int
    cache_of_a_token: int

    def cache(self, total: int, utilization: float) -> int:
        return max(0, int(total * utilization) - self.weights)

    def fits_from(self, held_beside: int, utilization: float) -> float:
        """Return the bytes of the smallest device with room for the engine, or infinity if no device has enough.

        Args:
            held_beside: Bytes on the device that the trainer needs at the same time.
            utilization: Fraction of the device's memory that the engine takes.
        """
        rest = 1 - utilization
        beside = 0.0 if held_beside == 0 else float("inf") if rest == 0 else held_beside / rest
        return max(beside, self.weights / utilization)


def engine_memory(size: EngineSize, transformer: TransformerConfig, hf_config: Any) -> EngineMemory:
    """Return the memory of each rank of an engine.

    Tensor parallelism splits every matrix and replicates norms and routers. With more ranks than key and value heads,
    each rank holds one full head. Experts need the same memory whether they are split or distributed.
    """
    ranks, itemsize, multiple = size.ranks, _BYTES[size.dtype], size.vocabulary_multiple
    vocabulary = -(-hf_config.vocab_size // multiple) * multiple // ranks
    num_ends = 1 if hf_config.tie_word_embeddings else 2
    parameters = parameters_of_layers(transformer, hf_config, ranks)
    parameters += (num_ends * vocabulary + 1) * transformer.hidden_size
    groups, layers = transformer.num_query_groups, transformer.num_layers
    if transformer.multi_latent_attention:
        # Every rank caches all latents.
        of_a_token = layers * (transformer.kv_lora_rank + transformer.qk_pos_emb_head_dim)
    else:
        held = max(1, groups // ranks)
        keys_and_values = 2 * groups * transformer.kv_channels * transformer.hidden_size
        parameters += layers * (keys_and_values * held // groups - keys_and_values // ranks)
        of_a_token = layers * held * 2 * transformer.kv_channels
    return EngineMemory(int(parameters * itemsize), int(of_a_token * itemsize))


def bytes_on_the_way(config: GRPOMasterConfig, transformer: TransformerConfig, hf_config: Any) -> int:
    """Return the maximum bytes of buckets between trainer and engines while weights are sent.

    Each trainer rank has `MAX_UNACKNOWLEDGED` buckets in transit. A bucket is at least as large as a layer's largest
    matrix. The buckets of embedding and output layer are even larger, but there is only one of each.
    """
    itemsize = transformer.params_dtype.itemsize
    widths = [transformer.num_attention_heads * transformer.kv_channels, transformer.moe_ffn_hidden_size or 0]
    if len(moe_layer_indices(transformer)) < transformer.num_layers:
        widths.append(transformer.ffn_hidden_size)
    bucket = max(BUCKET_BYTES, transformer.hidden_size * max(widths) * itemsize)
    embedding = hf_config.vocab_size * transformer.hidden_size * itemsize
    num_ends = 1 if hf_config.tie_word_embeddings else 2
    return int(config.cluster.world_size * MAX_UNACKNOWLEDGED * bucket + num_ends * max(0, embedding - bucket))


def refit_bytes(config: GRPOMasterConfig, transformer: TransformerConfig, memory: EngineMemory) -> int:
    """Return the bytes that buffers need while weights arrive, on a GPU that trainer and engine share.

    The engine buffers a layer until it is complete. With a transport from device to device (`ON_DEVICE`), the
    trainer's rank also holds `MAX_UNACKNOWLEDGED` sent buckets, and one bucket that it fills.
    """
    on_device = config.policy.generation.weight_transport in ON_DEVICE
    buckets = (MAX_UNACKNOWLEDGED + 1) * DEVICE_BUCKET_BYTES if on_device else 0
    return buckets + memory.weights // int(transformer.num_layers)
