# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction, trained on the tokens after the next one (DeepSeek-AI 2024, arXiv:2412.19437, 2.2).

Layer `k` combines the last hidden state at position `i` with the embedding of token `i + k`, and predicts token
`i + k + 1` with the model's output layer:

    h_k[i] = norm(decoder_layer(eh_proj([enorm(embedding(t[i + k])), hnorm(h_{k-1}[i])])))

`h_0` is the output of the model's final norm. Parameters have the names of Megatron-Core's `MultiTokenPredictionLayer`,
but `eh_proj` is on every tensor-parallel rank in full, so that a rank computes its part of the sequence alone.
Megatron-Core shifts tokens in a loop over packed sequences, and averages the loss over each microbatch. Here targets
are the microbatch's labels, shifted, and the mean is over the algorithm's global batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_moe.models.megatron.layers.latent_attention import DuplicatedLinear
from nemo_rl_moe.models.megatron.training.chunked_head import chunked_token_statistics

_OF_LAYERS = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
"""Arguments of a decoder layer among the arguments of `GPTModel._postprocess`."""


class MtpLayer(MegatronModule):
    """One layer of multi-token prediction.

    Args:
        layer_spec: Spec of its decoder layer.
        norm: Module of its norms.
        number: Number of the layer among these layers, from 1. Its decoder layer is counted after the model's.
    """

    def __init__(self, config: TransformerConfig, layer_spec: ModuleSpec, norm: Any, number: int, vp_stage: int | None):
        super().__init__(config=config)
        size = config.hidden_size
        self.enorm, self.hnorm, self.final_layernorm = (
            build_module(norm, config=config, hidden_size=size, eps=config.layernorm_epsilon) for _ in range(3)
        )
        weight = torch.empty(size, 2 * size, dtype=config.params_dtype)
        self.eh_proj = DuplicatedLinear(weight, sequence_parallel=config.sequence_parallel)
        after_stage = config.num_layers - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            layer_spec, config=config, vp_stage=vp_stage, layer_number=after_stage + number
        )

    @property
    def mtp_model_layer(self) -> Any:
        """The decoder layer, by the name that Megatron-Core 0.19 has for it."""
        return self.transformer_layer

    def forward(self, embeddings: Tensor, hidden_states: Tensor, **of_layer: Any) -> Tensor:
        """Return the normed hidden states, `[local_columns, rows, hidden]`, as the inputs are."""
        joined, _ = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], -1))
        found, _ = self.transformer_layer(hidden_states=joined, **of_layer)
        normed: Tensor = self.final_layernorm(found)
        return normed


class MtpLayers(MegatronModule):
    """The layers of multi-token prediction of the last stage's chunk.

    Args:
        is_detached: Whether the layers' loss has no gradient in the model: in its hidden states, embedding and output
            layer.
    """

    def __init__(self, chunk: GPTModel, layer_spec: ModuleSpec, norm: Any, num_layers: int, *, is_detached: bool):
        super().__init__(config=chunk.config)
        self.is_detached = is_detached
        numbers = range(1, num_layers + 1)
        self.layers: Any = torch.nn.ModuleList(
            MtpLayer(chunk.config, layer_spec, norm, number, chunk.vp_stage) for number in numbers
        )
        # A tuple, so that the copy is none of the chunk's parameters, which are trained, saved and exported.
        embedding = chunk.embedding if chunk.pre_process else _embedding_like_the_first_stage(chunk)
        self._embedding: tuple[Any] = (embedding,)

    def logprobs(
        self,
        chunk: Any,
        hidden_states: Float[Tensor, "local_columns rows hidden"],
        labels: Int[Tensor, "rows columns"],
        padding_mask: Tensor | None,
        of_postprocess: Mapping[str, Any],
    ) -> list[Float[Tensor, "rows columns"]]:
        """Return for each layer `k` the log-probability of token `i + k + 1` at position `i`.

        Entries without such a token in the sequence have no meaning.

        Args:
            labels: Token `i + 1` at position `i`.
            of_postprocess: Arguments of `GPTModel._postprocess`.
        """
        of_layers = {name: of_postprocess[name] for name in _OF_LAYERS} | {"padding_mask": padding_mask}
        hidden_states = hidden_states.detach() if self.is_detached else hidden_states
        found = []
        for layer in self.layers:
            with torch.no_grad() if self.is_detached else nullcontext():
                embeddings = self._embedding[0](input_ids=labels, position_ids=of_postprocess["position_ids"])
            hidden_states = layer(embeddings, hidden_states, **of_layers)
            labels = pad(labels[:, 1:], (0, 1))
            statistics = chunked_token_statistics(
                chunk, hidden_states, labels, chunk.temperature, is_weight_frozen=self.is_detached
            )
            found.append(statistics.logprobs)
        return found

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # The default would take a list of layers for weights that no rank shares.
        found: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            found |= layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata)
        return found

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self._embedding[0].word_embeddings.weight
        return weight


def _embedding_like_the_first_stage(chunk: GPTModel) -> LanguageModelEmbedding:
    """Return an embedding for a copy of the first stage's weights, which are never trained here."""
    found = LanguageModelEmbedding(
        chunk.config, chunk.vocab_size, chunk.max_sequence_length, chunk.position_embedding_type
    )
    return found.requires_grad_(False).to(dtype=chunk.config.params_dtype)


def share_embedding(chunks: Sequence[Any]) -> None:
    """Copy the first stage's embedding to the last stage's layers of multi-token prediction. Every rank calls it."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or not parallel_state.is_rank_in_embedding_group():
        return
    first, last = chunks[0], chunks[-1]
    weight = first.embedding.word_embeddings.weight if first.pre_process else last.mtp.embedding_weight
    source = parallel_state.get_pipeline_model_parallel_first_rank()
    dist.broadcast(weight.data, source, group=parallel_state.get_embedding_group())
