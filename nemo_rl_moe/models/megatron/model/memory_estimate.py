# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters and memory of each worker, by arithmetic, without a model or process groups."""

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig, generating
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.config.schema_policy import BASE_OF_ADAPTERS, FreezeConfig, OptimizerConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.layer_kinds import Mixer, layers_with_mlp, mixers_of
from nemo_rl_moe.models.megatron.layers.indexer import indexer_parameters
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import recurrent_sizes
from nemo_rl_moe.models.megatron.model.activation_estimate import (
    head_activations,
    layer_activations,
    recomputed_activations,
)
from nemo_rl_moe.models.megatron.model.adapter_estimate import adapter_parameters, rounding_of_frozen_experts
from nemo_rl_moe.models.megatron.model.gpt_model import padded_vocabulary_size
from nemo_rl_moe.models.megatron.model.releases import ADAM_COPIES_MOMENTS
from nemo_rl_moe.models.megatron.model.sparse_attention import choice_bytes
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import num_trained_mtp_layers
from nemo_rl_moe.models.megatron.model.vision_model import vision_parameters
from nemo_rl_moe.models.megatron.training.optimizer import CHUNK_PARAMETERS
from nemo_rl_moe.routing.routers import moe_layer_indices

_FLOAT32 = 4
_MOMENT_BYTES = {"float32": _FLOAT32, "bfloat16": 2}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by how their gradients and optimizer state are sharded.

    Attributes:
        dense: Number of parameters sharded over data-parallel ranks: all but routed experts.
        experts: Number of parameters sharded over expert-data-parallel ranks: routed experts.
        frozen: Number of parameters without gradients.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.dense + other.dense, self.experts + other.experts, self.frozen + other.frozen)

    @property
    def trained(self) -> int:
        return self.dense + self.experts

    @property
    def total(self) -> int:
        return self.trained + self.frozen


@dataclass(frozen=True)
class _Cut:
    """Numbers of ranks that share a dense matrix, the experts of a layer, and the matrix of an expert."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


def whole_model_parameters(config: TransformerConfig, hf_config: Any) -> int:
    """Count the parameters of the full model, without padding of the vocabulary. Tied embeddings count once."""
    layers = sum(_layer(config, hf_config, index, _Cut(), False).total for index in range(config.num_layers))
    embeddings = hf_config.vocab_size * config.hidden_size * (1 if hf_config.tie_word_embeddings else 2)
    return int(layers + embeddings + config.hidden_size + sum(vision_parameters(hf_config)))


def parameters_of_layers(config: TransformerConfig, hf_config: Any, tensor: int) -> int:
    """Count the parameters of all layers on each of `tensor` tensor-parallel ranks. The ranks split the experts too."""
    cut = _Cut(tensor=tensor, expert_tensor=tensor)
    return sum(_layer(config, hf_config, index, cut, False).total for index in range(config.num_layers))


def active_parameters(config: TransformerConfig, hf_config: Any) -> int:
    """Count the parameters that one token passes through, with `topk` routed experts per layer."""
    total = whole_model_parameters(config, hf_config)
    if config.num_moe_experts is None:
        return total
    idle = config.num_moe_experts - config.moe_router_topk
    return int(total - idle * _routed_expert(config) * len(moe_layer_indices(config)))


def rank_parameters(
    config: TransformerConfig,
    hf_config: Any,
    stage: int,
    *,
    routers_frozen: bool = False,
    freeze: FreezeConfig | None = None,
    lora: LoraConfig | None = None,
    mtp_layers: int = 0,
) -> Parameters:
    """Count the parameters of a rank of a pipeline stage. All ranks of a stage hold the same number.

    Args:
        mtp_layers: Number of trained layers of multi-token prediction, which are on the last stage.
    """
    cut = _Cut(
        config.tensor_model_parallel_size, config.expert_model_parallel_size, config.expert_tensor_parallel_size or 1
    )
    stages = config.pipeline_model_parallel_size
    is_first, is_last = stage == 0, stage == stages - 1
    vocabulary = padded_vocabulary_size(hf_config.vocab_size, cut.tensor) // cut.tensor * config.hidden_size
    # With one stage, tied embeddings are one tensor. With several, the last stage has a copy.
    shared = is_first and is_last and hf_config.tie_word_embeddings
    ends = vocabulary * (is_first + is_last - shared) + config.hidden_size * is_last
    layers = _layers_of_stage(config, stage)
    decoder = sum(
        (_layer(config, hf_config, index, cut, routers_frozen) for index in layers), start=Parameters(dense=ends)
    )
    if is_last and mtp_layers:
        layer = _layer(config, hf_config, _like_mtp_layers(config), cut, routers_frozen)
        ends_of_layer = Parameters(dense=2 * config.hidden_size**2 + 3 * config.hidden_size)
        decoder = sum([layer + ends_of_layer] * mtp_layers, start=decoder)
        # With several stages, the last one has a copy of the embedding.
        decoder += Parameters(frozen=0 if is_first else vocabulary)
    if freeze is not None and freeze.language_model:
        decoder = Parameters(frozen=decoder.total)
    if lora is not None:
        with_experts = moe_layer_indices(config)
        dense, experts = adapter_parameters(
            config, hf_config, lora, [(index, index in with_experts) for index in layers]
        )
        decoder = Parameters(dense, experts, decoder.total)
    return decoder + _vision(hf_config, freeze if lora is None else BASE_OF_ADAPTERS) if is_first else decoder


def _like_mtp_layers(config: TransformerConfig) -> int:
    """Return the index of a decoder layer with the form of layers of multi-token prediction."""
    return max(index for index, mixer in enumerate(mixers_of(config)) if mixer is Mixer.ATTENTION)


def _layers_of_stage(config: TransformerConfig, stage: int) -> list[int]:
    return [index for chunk in layers_of_chunks(config, stage) for index in chunk]


def _vision(hf_config: Any, freeze: FreezeConfig | None) -> Parameters:
    """Count the parameters of tower and projector. Every rank of the first stage holds them in full."""
    are_frozen = (False, False) if freeze is None else (freeze.vision_tower, freeze.projector)
    parts = zip(vision_parameters(hf_config), are_frozen, strict=True)
    found = [Parameters(frozen=size) if is_frozen else Parameters(dense=size) for size, is_frozen in parts]
    return sum(found, start=Parameters())


def _layer(config: TransformerConfig, hf_config: Any, index: int, cut: _Cut, routers_frozen: bool) -> Parameters:
    indexer = indexer_parameters(hf_config) if index in family_of(hf_config).indexed_layers(hf_config) else 0
    mixer, has_mlp = mixers_of(config)[index], index in layers_with_mlp(config)
    attention = Parameters(config.hidden_size * (has_mlp + (mixer is not None)))  # norms
    if mixer is Mixer.ATTENTION:
        norms = _query_and_key_norms(config, hf_config)
        attention += Parameters(
            _attention(config, cut.tensor) + norms + _attention_vectors(config, cut.tensor), 0, indexer
        )
    elif mixer is not None:
        attention += Parameters(recurrent_sizes(config, cut.tensor).parameters(config.hidden_size))
    if not has_mlp:
        return attention
    biased = config.add_bias_linear
    if index not in moe_layer_indices(config):
        matrices = _mlp(config, config.hidden_size, config.ffn_hidden_size) // cut.tensor
        biases = 2 * config.ffn_hidden_size // cut.tensor + config.hidden_size if biased else 0
        return attention + Parameters(dense=matrices + biases)
    router = config.num_moe_experts * (config.hidden_size + (1 if biased else 0))
    # Experts with biases are not split.
    expert = _routed_expert(config) // cut.expert_tensor
    return attention + Parameters(
        dense=_shared_experts(config, cut.tensor) + (0 if routers_frozen else router),
        experts=config.num_moe_experts // cut.expert * expert,
        frozen=router if routers_frozen else 0,
    )


def _attention(config: TransformerConfig, tensor: int) -> int:
    """Count the query, key, value and output matrices."""
    if config.multi_latent_attention:
        return _latent_attention(config, tensor)
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    matrices = config.hidden_size * ((3 if config.attention_output_gate else 2) * queries + 2 * keys)
    return int(matrices // tensor)


def _query_and_key_norms(config: TransformerConfig, hf_config: Any) -> int:
    """Count the weights of the query and key norms. Every rank holds them in full."""
    if not config.qk_layernorm or config.multi_latent_attention:
        return 0
    of_all_heads = family_of(hf_config).normalizes_all_heads
    heads = config.num_attention_heads + config.num_query_groups if of_all_heads else 2
    return int(heads * config.kv_channels)


def _attention_vectors(config: TransformerConfig, tensor: int) -> int:
    """Count the biases and sinks of attention."""
    keys = config.num_query_groups * config.kv_channels
    queries = config.num_attention_heads * config.kv_channels
    mixed = (queries + 2 * keys) // tensor if config.add_bias_linear or config.add_qkv_bias else 0
    output = config.hidden_size if config.add_bias_linear else 0
    sinks = config.num_attention_heads // tensor if config.softmax_type == "learnable" else 0
    return int(mixed + output + sinks)


def _latent_attention(config: TransformerConfig, tensor: int) -> int:
    """Count the parameters of latent attention. Every rank holds the projections down to the latents in full."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
    replicated = hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim) + config.kv_lora_rank
    up_from = hidden
    if config.q_lora_rank is not None:
        replicated += hidden * config.q_lora_rank + config.q_lora_rank
        up_from = config.q_lora_rank
    of_a_head = up_from * head_dim + config.kv_lora_rank * (config.qk_head_dim + config.v_head_dim)
    return int(replicated + heads * (of_a_head + config.v_head_dim * hidden) // tensor)


def _shared_experts(config: TransformerConfig, tensor: int) -> int:
    """Count the parameters of shared experts and of projections to and from latents. All tokens pass through them."""
    projections = 2 * config.hidden_size * (config.moe_latent_size or 0)
    if config.moe_shared_expert_intermediate_size is None:
        return int(projections)
    gate = config.hidden_size if config.moe_shared_expert_gate else 0
    matrices = _mlp(config, config.hidden_size, config.moe_shared_expert_intermediate_size)
    return int(projections + gate + matrices // tensor)


def _routed_expert(config: TransformerConfig) -> int:
    size = config.moe_latent_size or config.hidden_size
    biases = 2 * config.moe_ffn_hidden_size + size if config.add_bias_linear else 0
    return _mlp(config, size, config.moe_ffn_hidden_size) + int(biases)


def _mlp(config: TransformerConfig, size: int, intermediate_size: int) -> int:
    return (3 if config.gated_linear_unit else 2) * size * intermediate_size


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of one rank's share of the optimizer.

    Attributes:
        state: Bytes on the device: Adam's two moments, and a float32 master copy unless the weights are float32. If
            some parameters are updated on the host, also float32 gradients of the parameters on the device.
        on_the_host: Masters, moments and float32 gradients of the parameters that are updated on the host.
        float32_gradients: Float32 copies of gradients during a step, if gradients are reduced in another type.
        float32_moments: Float32 copies of moments during a step, if moments are stored in another type.
    """

    state: int
    on_the_host: int
    float32_gradients: int
    float32_moments: int


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one worker.

    Attributes:
        gradients: Megatron-Core's buffers: float32 with `grad_reduce_in_fp32`, else in the type of the weights.
        optimizer: Sharded over (expert-)data-parallel and context-parallel ranks by the distributed optimizer.
        activations_at_least: What one microbatch keeps for the backward pass (`activation_estimate`), and the larger of
            a recomputed layer and the output layer on the last stage. A lower bound: the experts may be unbalanced.
        tower_activations: Lower bound of the vision tower's activations with the maximum number of patches. No sum
            includes it, because few microbatches have so many patches.
        snapshot: Copy for a checkpoint in host memory: this rank's share of the weights, and of the optimizer's state
            unless the state moves to the host anyway.
        is_moved: Whether gradients are freed and the optimizer's state moves to the host during generation.
    """

    weights: int
    gradients: int
    optimizer: OptimizerMemory
    activations_at_least: int
    tower_activations: int
    key_value_cache: int
    reference_weights: int
    snapshot: int
    is_moved: bool

    @property
    def always(self) -> int:
        """Bytes of weights, gradients and optimizer state. With `is_moved`, only training holds all of them."""
        return self.weights + self.gradients + self.optimizer.state

    @property
    def while_generating(self) -> int:
        """Bytes held during generation, without the cache."""
        return self.weights if self.is_moved else self.always

    @property
    def moved(self) -> int:
        """Bytes that move from the device to the host for generation."""
        return self.optimizer.state if self.is_moved else 0

    @property
    def while_training_at_least(self) -> int:
        """Lower bound of the peak of training. The peak is in a backward pass or in the optimizer step."""
        in_a_step = self.optimizer.float32_gradients + self.optimizer.float32_moments
        return self.always + max(self.activations_at_least, in_a_step)

    @property
    def peak_at_least(self) -> int:
        """Lower bound of the peak of training and generation."""
        return max(self.while_training_at_least, self.while_generating + self.key_value_cache)


def worker_memory(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, stage: int) -> WorkerMemory:
    megatron, generates = config.policy.megatron_cfg, generating(config.policy)
    parallel = megatron.distributed_data_parallel_config
    parameters = rank_parameters(
        transformer,
        hf_config,
        stage,
        routers_frozen=megatron.freeze_moe_router,
        freeze=config.policy.frozen_parts,
        lora=config.policy.lora,
        mtp_layers=num_trained_mtp_layers(config.policy, hf_config),
    )
    weight_bytes = transformer.params_dtype.itemsize
    gradient_bytes = _FLOAT32 if parallel.grad_reduce_in_fp32 else weight_bytes
    updated = parameters.trained
    if parallel.use_distributed_optimizer:
        updated = -(-parameters.dense // (config.data_parallel_size * megatron.context_parallel_size))
        updated += -(-parameters.experts // expert_data_parallel_size(config))
    weights = parameters.total * weight_bytes
    if config.policy.frozen_parts.language_model:
        weights += rounding_of_frozen_experts(transformer, _layers_of_stage(transformer, stage))
    copies_reference = algorithm_of(config).needs_reference(config) and config.policy.lora is None
    optimizer = _optimizer_memory(megatron.optimizer, updated, weight_bytes, gradient_bytes)
    is_moved = generates is not None and generates.offload_optimizer_for_generation
    saved = config.checkpointing
    state = optimizer.state + optimizer.on_the_host if saved.save_optimizer and not is_moved else 0
    return WorkerMemory(
        weights=weights,
        gradients=parameters.trained * gradient_bytes,
        optimizer=optimizer,
        activations_at_least=_activations_at_least(config, transformer, hf_config, stage),
        tower_activations=_tower_activations(config, transformer, hf_config, stage),
        key_value_cache=_key_value_cache(config, transformer, hf_config, stage),
        reference_weights=weights if copies_reference else 0,
        snapshot=updated * weight_bytes + state if saved.enabled else 0,
        is_moved=is_moved,
    )


def _optimizer_memory(chosen: OptimizerConfig, updated: int, weight_bytes: int, gradient_bytes: int) -> OptimizerMemory:
    if chosen.optimizer_cpu_offload:
        on_the_host = round(updated * chosen.optimizer_offload_fraction)
        each = 4 * _FLOAT32  # master, two moments and gradient
        return OptimizerMemory((updated - on_the_host) * each, on_the_host * each, 0, 0)
    master = 0 if weight_bytes == _FLOAT32 else _FLOAT32
    if not chosen.use_precision_aware_optimizer:
        copies = 0 if gradient_bytes == _FLOAT32 else updated * _FLOAT32
        return OptimizerMemory(updated * (master + 2 * _FLOAT32), 0, copies, 0)
    moments = [_MOMENT_BYTES[name] for name in (chosen.exp_avg_dtype, chosen.exp_avg_sq_dtype)]
    are_copied = ADAM_COPIES_MOMENTS or len(set(moments)) > 1
    copied = min(updated, CHUNK_PARAMETERS) * _FLOAT32 * sum(each != _FLOAT32 for each in moments) * are_copied
    return OptimizerMemory(updated * (master + sum(moments)), 0, 0, copied)


def expert_data_parallel_size(config: MasterConfig) -> int:
    megatron = config.policy.megatron_cfg
    of_one_copy = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return config.cluster.world_size // (of_one_copy * megatron.pipeline_model_parallel_size)


def microbatch_tokens(config: MasterConfig) -> int:
    """Return the maximum number of tokens of a microbatch on all its context-parallel ranks together, with padding."""
    policy = config.policy
    for budget in (policy.sequence_packing, policy.dynamic_batching):
        if budget.enabled:
            return budget.train_mb_tokens
    return policy.train_micro_batch_size * algorithm_of(config).sequences_per_sample * policy.max_total_sequence_length


def microbatch_patches(config: MasterConfig, hf_config: Any) -> int:
    """Return the maximum number of patches of a microbatch, 0 for a text model. A single sample may have more.

    Without a limit in the configuration, all tokens could be image tokens.
    """
    vision = family_of(hf_config).vision
    if vision is None:
        return 0
    patches = microbatch_tokens(config) * vision.shape(hf_config).merge_size ** 2
    for budget in (config.policy.sequence_packing, config.policy.dynamic_batching):
        if budget.enabled and budget.train_mb_patches is not None:
            return min(patches, budget.train_mb_patches)
    return patches


def generation_batch_size(config: MasterConfig) -> int:
    """Return the maximum number of sequences that a rank generates at a time, 0 if the ranks do not generate.

    Without a limit it is the rank's share of the responses that the algorithm asks for at a time.
    """
    algorithm, generates = algorithm_of(config), generating(config.policy)
    if algorithm.responses_at_a_time is None or generates is None or not generates.generation.engine.shares_weights:
        return 0
    share = -(-algorithm.responses_at_a_time(config) // config.data_parallel_size)
    return min(share, generates.generation.max_batch_size or share)


def _activations_at_least(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, stage: int) -> int:
    tokens = -(-microbatch_tokens(config) // transformer.context_parallel_size)
    tensor = transformer.tensor_model_parallel_size
    megatron = config.policy.megatron_cfg
    is_replayed = isinstance(megatron, RolloutMegatronConfig) and megatron.routing_replay != "none"
    layers = _layers_of_stage(transformer, stage)
    is_packed = config.policy.sequence_packing.enabled
    kept = sum(
        layer_activations(transformer, index, is_replayed=is_replayed, is_packed=is_packed).total for index in layers
    )
    # Tensor-parallel ranks share tokens (sequence parallelism), heads, and the logits (by vocabulary).
    found = tokens * kept // tensor
    of_choice = choice_bytes(config.policy, hf_config, transformer.params_dtype.itemsize)
    # Every tensor-parallel rank has the mask of all tokens. Recomputation keeps the mask of one layer at a time.
    found += tokens * of_choice.mask * (1 if transformer.recompute_granularity == "full" else len(layers))
    # Every rank has the replayed positions of all layers, as they come and as they are used.
    found += tokens * 2 * of_choice.positions * len(family_of(hf_config).indexed_layers(hf_config))
    has_adapters = config.policy.lora is not None and config.policy.lora.experts != "none"
    of_layers = (
        recomputed_activations(transformer, index, is_packed=is_packed, are_experts_adapted=has_adapters)
        for index in layers
    )
    at_once = tokens * max(of_layers, default=0) // tensor
    if stage == transformer.pipeline_model_parallel_size - 1:
        has_logits = not algorithm_of(config).scores_sequences
        vocabulary = padded_vocabulary_size(hf_config.vocab_size, tensor) // tensor if has_logits else 0
        head = head_activations(
            transformer,
            tokens,
            vocabulary,
            config.policy.logprob_chunk_size,
            is_frozen=config.policy.frozen_parts.language_model,
        )
        if mtp_layers := num_trained_mtp_layers(config.policy, hf_config):
            of_layer = layer_activations(transformer, _like_mtp_layers(transformer), is_packed=is_packed).total
            head += mtp_layers * (head + tokens * of_layer // tensor)
        at_once = max(at_once, head)
    return found + at_once


def _tower_activations(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, stage: int) -> int:
    """Return the bytes of the tower's activations on each first-stage rank, 0 if the tower is frozen."""
    vision = family_of(hf_config).vision
    if vision is None or stage > 0 or config.policy.frozen_parts.vision_tower:
        return 0
    patches = microbatch_patches(config, hf_config)
    return vision.shape(hf_config).activations_at_least(patches, transformer.params_dtype.itemsize)


def _key_value_cache(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, stage: int) -> int:
    """Return the bytes of the cache: keys and values up to the maximum length, also keys of indexers with the positions
    that they choose under replay, and states of recurrent layers."""
    layers = _layers_of_stage(transformer, stage)
    mixers = [mixers_of(transformer)[layer] for layer in layers]
    num_attention = mixers.count(Mixer.ATTENTION)
    num_recurrent = len(mixers) - mixers.count(None) - num_attention
    groups = transformer.num_query_groups // transformer.tensor_model_parallel_size
    # Latent attention caches keys and values, not latents.
    value_dim = transformer.v_head_dim if transformer.multi_latent_attention else transformer.kv_channels
    of_a_layer = groups * (transformer.kv_channels + value_dim) * transformer.params_dtype.itemsize
    a_token = num_attention * of_a_layer
    of_choice = choice_bytes(config.policy, hf_config, transformer.params_dtype.itemsize)
    num_indexed = len({*layers} & {*family_of(hf_config).indexed_layers(hf_config)})
    a_token += num_indexed * (of_choice.key + of_choice.positions)
    a_row = a_token * config.policy.max_total_sequence_length
    if num_recurrent:
        a_row += num_recurrent * recurrent_sizes(transformer).state_bytes(transformer.params_dtype.itemsize)
    return int(a_row * generation_batch_size(config))
