# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward passes with a key-value cache, through a chunk's modules or the fast modules for CPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.models.megatron.cpu.attention import causal_mask
from nemo_rl_moe.models.megatron.cpu.cached_attention import PaddedInferenceContext
from nemo_rl_moe.models.megatron.cpu.cached_forward import CachedForward, has_cached_forward, rotation_of
from nemo_rl_moe.models.megatron.generation.prompt_images import PromptImages
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import RecurrentState
from nemo_rl_moe.models.megatron.model.vision_model import VisionInput


class StockInferenceContext(StaticInferenceContext):
    """Megatron-Core's key-value cache, whose rows can be dropped or copied."""

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index. An index may occur several times."""
        memory = self.key_value_memory_dict
        for layer_number, kept in memory.items():
            if isinstance(kept, RecurrentState):
                kept.select_rows(rows)
            else:
                memory[layer_number] = tuple(tensor.index_select(1, rows) for tensor in kept)


class StockForward:
    """Forward pass of one batch through the modules of one chunk."""

    def __init__(self, chunk: Any, context: StockInferenceContext, images: PromptImages | None):
        self._chunk, self._context, self._images = chunk, context, images

    def __call__(
        self, token_ids: Int[Tensor, "rows columns"], received: Float[Tensor, "columns rows hidden"] | None
    ) -> Float[Tensor, "columns rows hidden"]:
        columns, mask = token_ids.shape[1], None
        if columns > 1:
            # Otherwise Megatron-Core would cache a mask for each length. Training could not use a mask that was made in
            # inference mode.
            mask = ~causal_mask(columns, columns, token_ids.device)[None, None]
        self._chunk.set_input_tensor(received)
        positions: Tensor | None = None
        extra: dict[str, Any] = {}
        if self._images is not None:
            positions = self._images.positions
            if self._chunk.pre_process:
                words = self._chunk.embedding(input_ids=token_ids, position_ids=None)
                placed, deep = self._images.place(words, self._context.sequence_len_offset)
                extra = {"decoder_input": placed, "deep": deep}
        hidden_states: Tensor = self._chunk(
            token_ids, positions, mask, inference_context=self._context, runtime_gather_output=True, **extra
        )
        self._chunk.set_input_tensor(None)
        return hidden_states


@dataclass(frozen=True)
class CachedBatch:
    """One batch of sequences in the key-value cache, with the forward pass of each model chunk."""

    context: PaddedInferenceContext | StockInferenceContext
    forwards: Sequence[CachedForward | StockForward]
    images: PromptImages | None = None

    @property
    def num_filled(self) -> int:
        """Number of slots (token positions of the cache) that hold a token."""
        filled: int = self.context.sequence_len_offset
        return filled

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        self.context.select_rows(rows)
        if self.images is not None:
            self.images.select_rows(rows)


class ForwardPasses:
    """Forward passes through all pipeline stages of the model.

    Attributes:
        padded: Whether prompts are left-padded. True if the fast modules for CPUs support all chunks.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device):
        self._chunks, self._config, self._device = chunks, config, device
        self.padded = all(map(has_cached_forward, chunks))
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        # Ranks that share experts enter the same collectives, even if some have finished their requests.
        experts = parallel_state.get_expert_tensor_and_model_parallel_group()
        self._peers = experts if experts.size() > 1 else None

    def new_batch(
        self,
        num_rows: int,
        num_slots: int,
        num_pads: Int[Tensor, " rows"] | None,
        model_inputs: Sequence[Mapping[str, ModelInput]] = (),
    ) -> CachedBatch:
        images = None
        if isinstance(self._chunks[0], VisionInput):
            starts = [0] * num_rows if num_pads is None else num_pads.tolist()
            images = PromptImages(self._chunks, model_inputs or [{}] * num_rows, starts, num_slots, self._device)
        if not self.padded:
            stock = StockInferenceContext(num_rows, num_slots)
            return CachedBatch(stock, [StockForward(chunk, stock, images) for chunk in self._chunks], images)
        rotation = rotation_of(self._chunks[0], num_slots, None if images is None else images.positions)
        padded = PaddedInferenceContext(num_rows, num_slots, rotation, num_pads)
        place = None if images is None else images.place
        return CachedBatch(padded, [CachedForward(chunk, padded, place) for chunk in self._chunks], images)

    def logits(
        self, token_ids: Int[Tensor, "rows columns"], batch: CachedBatch
    ) -> Float[Tensor, "rows vocabulary"] | None:
        """Run the next tokens. Return the last column's logits on the last pipeline stage, and None on other stages."""
        self._any_peer_works(True)
        return self._through_all_stages(token_ids, batch)

    def wait_for_peers(self) -> None:
        """Take part in the collectives of the ranks that share experts until all of these ranks are done."""
        # With the same token, all waiting ranks would use the same few experts.
        token_id = dist.get_rank() % self._chunks[0].vocab_size
        while self._any_peer_works(False):
            token_ids = torch.full((1, 1), token_id, dtype=torch.int64, device=self._device)
            self._through_all_stages(token_ids, self.new_batch(1, 1, None))

    def _any_peer_works(self, this_one: bool) -> bool:
        if self._peers is None:
            return this_one
        working = torch.tensor([this_one], dtype=torch.int32, device=self._device)
        dist.all_reduce(working, op=dist.ReduceOp.MAX, group=self._peers)
        return bool(working)

    def _through_all_stages(
        self, token_ids: Int[Tensor, "rows columns"], batch: CachedBatch
    ) -> Float[Tensor, "rows vocabulary"] | None:
        rows, columns = token_ids.shape
        hidden_states = None
        for chunk, forward in zip(self._chunks, batch.forwards, strict=True):
            received = None if chunk.pre_process else self._receive(columns, rows)
            hidden_states = forward(token_ids, received)
            if not chunk.post_process:
                self._send(hidden_states)
        batch.context.increment_sequence_len_offset(columns)
        batch.context.enable_decode_mode()
        last = self._chunks[-1]
        return _last_logits(last, hidden_states) if last.post_process and hidden_states is not None else None

    def _receive(self, columns: int, rows: int) -> Float[Tensor, "columns rows hidden"]:
        config = self._config
        received = torch.empty(columns, rows, config.hidden_size, dtype=config.pipeline_dtype, device=self._device)
        dist.recv(received, src=parallel_state.get_pipeline_model_parallel_prev_rank(), group=self._pipeline)
        return received

    def _send(self, hidden_states: Float[Tensor, "columns rows hidden"]) -> None:
        to = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(hidden_states.contiguous(), dst=to, group=self._pipeline)


def _last_logits(
    chunk: GPTModel, hidden_states: Float[Tensor, "columns rows hidden"]
) -> Float[Tensor, "rows vocabulary"]:
    shared = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if shared else None
    logits, _ = chunk.output_layer(hidden_states[-1:], weight=weight, runtime_gather_output=True)
    return logits[0, :, : chunk.real_vocabulary_size]
