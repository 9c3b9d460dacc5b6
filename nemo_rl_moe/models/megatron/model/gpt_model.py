# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""This rank's model chunks: Megatron-Core's GPTModel with the layer spec for the machine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.decoder import inverse_frequencies
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.layer_kinds import Mixer, layers_with_mlp, mixers_of
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.cpu.spec import FastGPTModel, block_spec
from nemo_rl_moe.models.megatron.layers.all_heads_norm import normalize_all_heads
from nemo_rl_moe.models.megatron.layers.deep_features import use_deep_layers
from nemo_rl_moe.models.megatron.layers.indexer import add_indexers
from nemo_rl_moe.models.megatron.layers.latent_attention import use_latent_attention
from nemo_rl_moe.models.megatron.layers.mixers import use_mixers
from nemo_rl_moe.models.megatron.layers.mtp import MtpLayers
from nemo_rl_moe.models.megatron.layers.routers import limit_groups, noise_in_training_only, release_dispatches
from nemo_rl_moe.models.megatron.layers.sparse_attention import set_choices, use_sparse_attention
from nemo_rl_moe.models.megatron.layers.tree_attention import attend_along_trees
from nemo_rl_moe.models.megatron.model.releases import (
    correct_expert_bias_with_padding,
    mark_attention_sinks,
    mark_duplicated_weights,
    mark_expert_parameters,
)
from nemo_rl_moe.models.megatron.model.sparse_attention import chooses_tokens
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import num_trained_mtp_layers
from nemo_rl_moe.models.megatron.model.transformer_engine import use_transformer_engine
from nemo_rl_moe.models.megatron.model.value_head import ValueHead, add_value_head
from nemo_rl_moe.models.megatron.model.vision_model import VisionInput, add_vision, freeze_parts
from nemo_rl_moe.models.megatron.training.chunked_head import chunked_token_statistics
from nemo_rl_moe.models.megatron.training.prefix_tree import TreeSeqParams, predecessors_of
from nemo_rl_moe.models.megatron.training.token_statistics import vocabulary_entropy
from nemo_rl_moe.routing.routers import routers_of


def padded_vocabulary_size(vocabulary_size: int, tensor_parallel_size: int) -> int:
    """Return the vocabulary size, rounded up so that all tensor-parallel ranks hold the same number of rows."""
    return -(-vocabulary_size // tensor_parallel_size) * tensor_parallel_size


_PADDING_MASK = 5
"""Index of the padding mask of a rank's columns in the result of `GPTModel._preprocess`."""


class _PolicyOutput:
    """Mixin of GPTModel with the outputs of a policy model:

    - Every softmax excludes padded rows of the vocabulary, so that tensor parallelism changes no number.
    - Logits are divided by the sampling temperature, because tokens are sampled from the policy at this temperature.
    - Entropies and values are computed on request. Values can replace the logits.
    - With `logprob_chunk_size`, logits exist for one chunk of tokens at a time.
    - With layers of multi-token prediction (`mtp`), a training pass also predicts the tokens after the next one.

    Attributes:
        returns_hidden_states: Whether to return the final norm's output, [sequence, batch, hidden], without logits.
        entropy: Entropies of the last pass, [batch, sequence], with their graph. The code that reads them clears them.
        candidate_column: Column of token ids whose log-probabilities the training pass also computes, or None.
        candidates: Log-probabilities of the ids in `candidate_column`, [batch, sequence, k]. Cleared like `entropy`.
        mtp_logprobs: Results of `MtpLayers.logprobs` of the last training pass. Cleared like `entropy`.
        trains_mtp: Whether the model has trained layers of multi-token prediction, on any stage.
        model_columns: Name -> additional input of the microbatch. An input with a value per token has the shape
            `[rows, columns, ...]`, like the token ids, and is not split by sequence parallelism. Set
            on every pipeline stage during the forward pass, but empty during activation recomputation: read it before
            the layers, or pass it to the layers.
    """

    real_vocabulary_size: int
    temperature: float = 1.0
    logprob_chunk_size: int | None = None
    returns_hidden_states: bool = False
    needs_entropy: bool = False
    entropy: Tensor | None = None
    candidate_column: str | None = None
    candidates: Tensor | None = None
    has_value_head: bool = False
    is_classifier: bool = False
    value_head: ValueHead
    predicts_tokens: bool = True
    values: Tensor | None = None
    mtp: MtpLayers  # only exists in a chunk that has the layers, because Megatron-Core's schedule looks for it
    trains_mtp: bool = False
    mtp_logprobs: Sequence[Tensor] = ()
    token_copies: Tensor | None = None
    _padding_mask: Tensor | None = None
    model_columns: Mapping[str, Tensor] = MappingProxyType({})

    def forward(self, *args: Any, model_columns: Mapping[str, Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the chunk's forward pass, during which the attribute `model_columns` has the argument's value."""
        if not model_columns:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        self.model_columns = model_columns
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.model_columns = MappingProxyType({})

    def share_tokens(self, copies: Tensor | None) -> None:
        """Set the routers' `token_copies` for the next microbatch: None if its sequences do not share tokens."""
        if copies is None and self.token_copies is None:
            return
        self.token_copies = copies
        for _, router in routers_of(self):  # type: ignore[arg-type]
            router.token_copies = copies  # type: ignore[assignment]

    def _preprocess(
        self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        found = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]
        if hasattr(self, "mtp"):
            self._padding_mask = found[_PADDING_MASK]
        embeddings, angles, *others = found
        if angles is None or not isinstance(packed_seq_params, TreeSeqParams):  # None: latent attention has its own
            return tuple(found)
        return (embeddings, angles.index_select(0, packed_seq_params.position_ids), *others)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the negative log-probability of each label, [batch, sequence]."""
        logits = self.mask_logits(logits)
        if self.temperature != 1.0:
            # In float32, like generation: in bfloat16 the division alone is off by 0.02 nats per token.
            logits = logits.float() / self.temperature
        if self.needs_entropy:
            # Entropies come before the loss, because the loss's backward pass may overwrite the logits.
            group = parallel_state.get_tensor_model_parallel_group()
            self.entropy = vocabulary_entropy(logits, group).transpose(0, 1)
        return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]

    def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.returns_hidden_states:
            return hidden_states
        if self.has_value_head and labels is not None:
            self.values = self.value_head(hidden_states)
            if not self.predicts_tokens:
                return self.values
        if hasattr(self, "mtp") and labels is not None:
            self.mtp_logprobs = self.mtp.logprobs(self, hidden_states, labels, self._padding_mask, kwargs)
        predecessors = predecessors_of(kwargs.get("packed_seq_params"))
        in_chunks = predecessors is not None or (labels is not None and self._computes_in_chunks(labels))
        if labels is None or not self.post_process or not in_chunks:  # type: ignore[attr-defined]
            return super()._postprocess(hidden_states, *args, labels=labels, **kwargs)  # type: ignore[misc]
        found = chunked_token_statistics(
            self,
            hidden_states,
            labels,
            self.temperature,
            with_entropy=self.needs_entropy,
            candidate_ids=None if self.candidate_column is None else self.model_columns[self.candidate_column],
            predecessors=predecessors,
        )
        self.entropy, self.candidates = found.entropy, found.candidates
        return -found.logprobs

    def _computes_in_chunks(self, labels: Tensor) -> bool:
        most = self.logprob_chunk_size
        return self.candidate_column is not None or (most is not None and labels.numel() > most)

    def mask_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, [..., local vocabulary], with padded entries set to the lowest number of their type."""
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        real_columns = self.real_vocabulary_size - first
        if real_columns >= logits.shape[-1]:
            return logits
        padded = torch.arange(logits.shape[-1], device=logits.device) >= real_columns
        return logits.masked_fill(padded, torch.finfo(logits.dtype).min)


class PolicyGPTModel(_PolicyOutput, GPTModel):
    """Megatron-Core's GPTModel with a policy model's outputs."""


class FastPolicyGPTModel(_PolicyOutput, FastGPTModel):
    """`PolicyGPTModel` with this project's modules for machines without Transformer Engine."""


class VisionGPTModel(_PolicyOutput, VisionInput, GPTModel):
    """`PolicyGPTModel` of a vision-language model."""


class FastVisionGPTModel(_PolicyOutput, VisionInput, FastGPTModel):
    """`FastPolicyGPTModel` of a vision-language model."""


def build_model_chunks(
    policy: PolicyConfig, config: TransformerConfig, hf_config: Any, heads: Collection[Head] = (Head.LOGPROBS,)
) -> list[GPTModel]:
    """Build this rank's model chunks (one for each virtual pipeline stage), without weights."""
    correct_expert_bias_with_padding()
    virtual_stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual_stages or 1):
        chunk = _build_chunk(policy, config, hf_config, vp_stage=stage if virtual_stages else None)
        if Head.LOGPROBS in heads and num_trained_mtp_layers(policy, hf_config):
            add_mtp(chunk, policy, config, num_trained_mtp_layers(policy, hf_config))
        if not cpu_backend.ACTIVE:
            chunk.cuda(torch.cuda.current_device())
        mark_duplicated_weights(chunk)
        mark_expert_parameters(chunk)
        limit_groups(chunk, as_deepseek="moe_router_group_topk" in family_of(hf_config).router_fields)
        noise_in_training_only(chunk)
        release_dispatches(chunk)
        mark_attention_sinks(chunk)
        if policy.megatron_cfg.freeze_moe_router:
            freeze_routers(chunk)
        freeze_parts(chunk, policy.freeze, hf_config)
        add_value_head(chunk, heads)
        chunks.append(chunk)
    return chunks


def add_mtp(chunk: GPTModel, policy: PolicyConfig, config: TransformerConfig, number: int) -> None:
    """Add layers of multi-token prediction to the last stage's chunk, and mark the chunks of other stages."""
    chunk.trains_mtp = True
    if chunk.post_process:
        block = _attention_block(policy, config, chunk.vp_stage, _uses_fast_modules(policy))
        is_detached = policy.megatron_cfg.mtp_detach_heads
        # Their decoder layers have the form of the model's last layer, but never a gated delta net.
        chunk.mtp = MtpLayers(chunk, block.layer_specs[-1], block.layer_norm, number, is_detached=is_detached)


def freeze_routers(model: torch.nn.Module) -> None:
    """Freeze the routers' weights."""
    for name, parameter in model.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)


def _build_chunk(policy: PolicyConfig, config: TransformerConfig, hf_config: Any, vp_stage: int | None) -> GPTModel:
    fast = _uses_fast_modules(policy)
    family = family_of(hf_config)
    has_vision = family.vision is not None
    classes = (VisionGPTModel, FastVisionGPTModel) if has_vision else (PolicyGPTModel, FastPolicyGPTModel)
    model_class: Callable[..., GPTModel] = classes[fast]
    chunk = model_class(
        config=config,
        transformer_layer_spec=_block_spec(policy, config, hf_config, vp_stage, fast),
        vocab_size=padded_vocabulary_size(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="mrope" if family.vision is not None and family.vision.has_mrope else "rope",
        rotary_base=family.rotary_base(hf_config),
        rotary_percent=family.rotary_percent(hf_config),
        # Image features replace embeddings before the embeddings are split.
        scatter_embedding_sequence_parallel=not has_vision,
        vp_stage=vp_stage,
    )
    chunk.real_vocabulary_size = hf_config.vocab_size
    chunk.logprob_chunk_size = policy.logprob_chunk_size
    _stretch_positions(chunk, hf_config)
    if policy.shared_prefix is not False and use_transformer_engine(policy):
        attend_along_trees(chunk)
    add_indexers(chunk, hf_config)
    if chooses_tokens(policy, hf_config):
        set_choices(chunk, hf_config.index_topk)
    if has_vision:
        add_vision(chunk, hf_config, policy.init_seed)
    return chunk


def _uses_fast_modules(policy: PolicyConfig) -> bool:
    return policy.megatron_cfg.layer_spec == "auto" and not use_transformer_engine(policy)


def _stretch_positions(chunk: GPTModel, hf_config: Any) -> None:
    """Set the rotary frequencies of a model with scaled positions, unless multi-latent attention sets them.

    Without rotation the frequencies are 0: cosines of 1 and sines of 0 leave queries and keys unchanged.
    """
    if chunk.config.multi_latent_attention:
        return
    if not family_of(hf_config).rotates:
        chunk.rotary_pos_emb.inv_freq = torch.zeros_like(chunk.rotary_pos_emb.inv_freq)
        return
    frequencies = inverse_frequencies(hf_config)
    if frequencies is not None:
        chunk.rotary_pos_emb.inv_freq = frequencies.to(chunk.rotary_pos_emb.inv_freq)


def _attention_block(
    policy: PolicyConfig, config: TransformerConfig, vp_stage: int | None, fast: bool
) -> TransformerBlockSubmodules:
    """Return the spec of a chunk's decoder with attention in every layer."""
    block: TransformerBlockSubmodules = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_transformer_engine(policy), normalization="RMSNorm", vp_stage=vp_stage
    )
    # torch's norms refuse sequence parallelism, and have no zero-centred weights.
    needs_own_norms = config.sequence_parallel or config.layernorm_zero_centered_gamma
    if fast or (needs_own_norms and not use_transformer_engine(policy)):
        block = block_spec(config, block, fast=fast)
    return use_latent_attention(block) if config.multi_latent_attention else block


def _block_spec(
    policy: PolicyConfig, config: TransformerConfig, hf_config: Any, vp_stage: int | None, fast: bool
) -> TransformerBlockSubmodules:
    block = _attention_block(policy, config, vp_stage, fast)
    mixers, with_mlp = mixers_of(config), layers_with_mlp(config)
    if any(mixer is not Mixer.ATTENTION for mixer in mixers):
        layers = layers_of_chunks(config, parallel_state.get_pipeline_model_parallel_rank())[vp_stage or 0]
        block = use_mixers(block, [mixers[layer] for layer in layers], [layer in with_mlp for layer in layers])
    family = family_of(hf_config)
    if chooses_tokens(policy, hf_config):
        block = use_sparse_attention(block)
    if family.normalizes_all_heads:
        block = normalize_all_heads(block)
    if family.vision is not None and parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage):
        block = use_deep_layers(block, family.vision.deep_layers(hf_config))
    return block
