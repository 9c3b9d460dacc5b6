# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: responses to prompts, scored, and the batch that a policy is trained with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.environments.interface import Score, ScorerInterface, ScoringItem
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationInterface,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.metrics import PhaseClock

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Rollout:
    """One response to one prompt, and what it is worth.

    Attributes:
        prompt: The prompt.
        response: The sampled tokens.
        text: The response as text, without its end token.
        score: The environment's verdict.
    """

    prompt: Prompt
    response: GeneratedSequence
    text: str
    score: Score


@dataclass(frozen=True)
class Roller:
    """Makes rollouts: generates, decodes, scores.

    Attributes:
        generation: The engine.
        scorer: The environment.
        decode: From token ids to text.
    """

    generation: GenerationInterface
    scorer: ScorerInterface
    decode: Decode

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seed_key: Sequence[int],
        clock: PhaseClock,
    ) -> list[Rollout]:
        """Several responses to each prompt.

        Args:
            prompts: At least one.
            num_generations: Responses to each prompt.
            sampling: How tokens are drawn.
            seed_key: Whole numbers that name this call; the same ones give the same responses.
            clock: Gets the phases `generation` and `rewards`.

        Returns:
            The responses to the first prompt, then those to the second, and so on.
        """
        repeated = [prompt for prompt in prompts for _ in range(num_generations)]
        request = GenerationRequest(
            prompts=tuple(prompt.token_ids for prompt in repeated),
            seeds=tuple(np.random.SeedSequence(list(seed_key)).generate_state(len(repeated), np.uint64).tolist()),
            sampling=sampling,
        )
        with clock.phase("generation"):
            responses = self.generation.generate(request)
        clock.count_tokens("generation", sum(len(response.token_ids) for response in responses))
        with clock.phase("rewards"):
            texts = [self._text(response, sampling) for response in responses]
            scores = self.scorer.score(
                [
                    ScoringItem(prompt.sample_id, prompt.text, text, response.is_truncated, prompt.record)
                    for prompt, response, text in zip(repeated, responses, texts, strict=True)
                ]
            )
        columns = zip(repeated, responses, texts, scores, strict=True)
        return [Rollout(*row) for row in columns]

    def _text(self, response: GeneratedSequence, sampling: SamplingParameters) -> str:
        token_ids = response.token_ids.tolist()
        if token_ids and token_ids[-1] in sampling.stop_token_ids:
            token_ids.pop()
        return self.decode(token_ids)


def rewards_of(rollouts: Sequence[Rollout], num_generations: int) -> Float[Tensor, "groups generations"]:
    """The environment's rewards, one row a prompt; float64."""
    rewards = [rollout.score.reward for rollout in rollouts]
    return torch.tensor(rewards, dtype=torch.float64).view(-1, num_generations)


def correctness_of(rollouts: Sequence[Rollout], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Which responses are right, one row a prompt."""
    return torch.tensor([rollout.score.is_correct for rollout in rollouts]).view(-1, num_generations)


def response_lengths(rollouts: Sequence[Rollout], num_generations: int) -> Tensor:
    """Tokens of each response, `[groups, generations]`."""
    return torch.tensor([len(rollout.response.token_ids) for rollout in rollouts]).view(-1, num_generations)


def training_batch(
    rollouts: Sequence[Rollout],
    advantages: Float[Tensor, "groups generations"],
    pad_token_id: int,
    *,
    leave_out_truncated: bool,
) -> TokenBatch:
    """Prompts with their responses, of which only the responses are trained on.

    Args:
        rollouts: In the order of the advantages.
        advantages: One for each response.
        pad_token_id: What stands after a sequence's end.
        leave_out_truncated: Train on no token of a response that was cut at the length limit (DAPO).

    Returns:
        A batch with the extras `advantages` `[batch]` and `generation_logprobs` `[batch, sequence]`.
    """
    prompt_lengths = [len(rollout.prompt.token_ids) for rollout in rollouts]
    lengths = [
        prompt + len(rollout.response.token_ids) for prompt, rollout in zip(prompt_lengths, rollouts, strict=True)
    ]
    shape = (len(rollouts), max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    for row, (rollout, start, end) in enumerate(zip(rollouts, prompt_lengths, lengths, strict=True)):
        input_ids[row, :start] = torch.as_tensor(rollout.prompt.token_ids)
        input_ids[row, start:end] = torch.tensor(rollout.response.token_ids)
        token_mask[row, start:end] = not (leave_out_truncated and rollout.response.is_truncated)
        logprobs[row, start:end] = torch.tensor(rollout.response.logprobs)
    return TokenBatch(
        input_ids=input_ids,
        lengths=torch.tensor(lengths),
        token_mask=token_mask,
        sample_ids=tuple(rollout.prompt.sample_id for rollout in rollouts),
        extras={"advantages": advantages.reshape(-1).float(), "generation_logprobs": logprobs},
    )


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What can be said of responses without knowing their groups; training and validation report the same."""
    rewards = np.array([rollout.score.reward for rollout in rollouts])
    lengths = np.array([len(rollout.response.token_ids) for rollout in rollouts])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "accuracy": float(np.mean([rollout.score.is_correct for rollout in rollouts])),
        "mean_gen_tokens_per_sample": float(lengths.mean()),
        "max_gen_tokens_per_sample": float(lengths.max()),
        "truncation_rate": float(np.mean([rollout.response.is_truncated for rollout in rollouts])),
    }
