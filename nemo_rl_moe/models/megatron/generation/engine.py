# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation with the weights that are being trained, on the ranks that train them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.models.megatron.generation.forward_passes import ForwardPasses
from nemo_rl_moe.models.megatron.generation.inference_mode import inference
from nemo_rl_moe.models.megatron.generation.responses import Responses
from nemo_rl_moe.models.megatron.generation.sampling import sample
from nemo_rl_moe.models.megatron.generation.slots import plan_slots
from nemo_rl_moe.models.megatron.generation.stopping import StopCondition
from nemo_rl_moe.models.megatron.generation.validation import check_request
from nemo_rl_moe.models.megatron.parallel_state import parallel_coordinates

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

LEAVE_SHARE = 0.1
"""When this share of a batch's rows has ended, they leave it. Each time the cache is copied."""


class MegatronGenerator:
    """Generates with this rank's part of the model, together with the ranks that hold the other parts.

    Args:
        chunks: This rank's model chunks, without wrappers. The weights stay theirs.
        config: Their configuration.
        tokenizer: For stop strings alone; otherwise None will do.
        device: Where the chunks are.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, tokenizer: Any, device: torch.device):
        self._chunks, self._config, self._device = chunks, config, device
        self._tokenizer = tokenizer
        self._coordinates = parallel_coordinates()
        self._passes = ForwardPasses(chunks, config, device)
        group = parallel_state.get_model_parallel_group()
        self._model_parallel = group if group.size() > 1 else None
        self._sampling_rank = dist.get_process_group_ranks(group)[-config.tensor_model_parallel_size]

    def generate(
        self, request: GenerationRequest, *, weight_version: int, max_batch_size: int | None = None
    ) -> list[GeneratedSequence]:
        """One response for each prompt, in the order of the prompts.

        Every rank of the job calls it: those of one data-parallel rank with the same request, others with their own,
        which can be empty. It leaves the model in evaluation mode, and everything else as it was.

        Args:
            request: What to continue, and how.
            weight_version: Goes into the responses.
            max_batch_size: Most sequences at a time; None for all at once.

        Returns:
            The responses; an empty list on ranks that do not report for their data-parallel rank.

        Raises:
            ValueError: The request cannot be served; nothing has been done then.
        """
        check_request(request, self._chunks[0], self._config, max_batch_size)
        stop = StopCondition(request.sampling, self._tokenizer)
        sequences: dict[int, GeneratedSequence] = {}
        with inference(self._chunks, self._config, self._device, own_forward=self._passes.padded):
            for batch in _batches(request, max_batch_size):
                responses = self._run(request, batch, stop)
                sequences |= zip(batch, responses.sequences(weight_version), strict=True)
            self._passes.wait_for_peers()
        return [sequences[index] for index in range(len(sequences))] if self._coordinates.reports_loss else []

    def _run(self, request: GenerationRequest, batch: Sequence[int], stop: StopCondition) -> Responses:
        """Responses to some of the prompts, together."""
        parameters = request.sampling
        plan = plan_slots(
            [request.prompts[index] for index in batch],
            [request.seeds[index] for index in batch],
            parameters.max_new_tokens,
            padded=self._passes.padded,
            device=self._device,
        )
        responses = Responses(len(batch), parameters.max_new_tokens, stop)
        cached = self._passes.new_batch(len(batch), len(plan.prompt_tokens), plan.num_pads)
        rows, first_sampled = np.arange(len(batch)), plan.first_sampled.cpu().numpy()
        inputs, last_prompt = plan.prompt_tokens[: plan.prefill].t(), first_sampled.max()
        while True:
            logits = self._passes.logits(inputs, cached)
            slot = cached.num_filled
            chosen = self._choose(logits, plan.uniforms[slot], parameters)
            token_ids, logprobs = chosen.cpu().numpy()
            ended = responses.append(rows, token_ids.astype(np.int64), logprobs, slot >= first_sampled)
            inputs = chosen[0].long()
            if slot < last_prompt:
                inputs = torch.where(plan.first_sampled > slot, plan.prompt_tokens[slot], inputs)
            num_ended = np.count_nonzero(ended)
            if num_ended == len(rows):
                return responses
            if num_ended >= LEAVE_SHARE * len(rows):
                rows, first_sampled = rows[~ended], first_sampled[~ended]
                kept = torch.from_numpy(np.flatnonzero(~ended)).to(self._device)
                plan, inputs = plan.keep(kept), inputs[kept]
                cached.keep_rows(kept)
            inputs = inputs[:, None]

    def _choose(
        self, logits: Float[Tensor, "rows vocabulary"] | None, uniforms: Float[Tensor, " rows"], how: SamplingParameters
    ) -> Float[Tensor, "2 rows"]:
        """Token ids and log-probabilities, chosen by one rank for all that hold a part of the model.

        Rounding can differ between ranks that compute the same: each choosing for itself, they could go apart.
        """
        if logits is not None and self._coordinates.reports_loss:
            # In one tensor, so that one copy to the host and one message will do; float64 holds both exactly.
            chosen = torch.stack([values.double() for values in sample(logits, uniforms, how)])
        else:
            chosen = torch.empty(2, len(uniforms), dtype=torch.float64, device=self._device)
        if self._model_parallel is not None:
            dist.broadcast(chosen, src=self._sampling_rank, group=self._model_parallel)
        return chosen


def _batches(request: GenerationRequest, max_batch_size: int | None) -> list[list[int]]:
    """Which prompts run together: those of like length, the longest first."""
    order = sorted(range(len(request.prompts)), key=lambda index: -len(request.prompts[index]))
    size = max_batch_size or max(len(order), 1)
    return [order[first : first + size] for first in range(0, len(order), size)]
