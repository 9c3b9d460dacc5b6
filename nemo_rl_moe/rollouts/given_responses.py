# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses that the records of prompts hold, as a source of trajectories that nobody samples."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.encoding import most_characters
from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import DataError, counted
from nemo_rl_moe.generation.interface import SamplingParameters, TokenIds
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.failed_responses import FailureRule
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutGroups, SynchronousSource
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker


class GivenResponses(SynchronousSource):
    """A `RolloutSource` whose trajectories are prompts with the response of their record, one of each prompt.

    What is beyond a sequence's limit is cut off.

    Args:
        config: The `grpo` section.
        worker: Its engine answers validations alone.
        rounds: As of `SynchronousSource`.
        sampling: As of `SynchronousSource`.
        failures: As of `SynchronousSource`.
        response_key: Key of a record that holds its response.
        end: The token at which generation would have ended a response; empty: none.
    """

    def __init__(
        self,
        config: GRPOConfig,
        worker: RolloutWorker,
        rounds: PromptRounds,
        sampling: SamplingParameters,
        failures: FailureRule,
        response_key: str,
        end: TokenIds,
    ):
        super().__init__(
            config, worker, rounds, sampling, failures, lambda found: torch.ones(len(found), dtype=torch.bool)
        )
        self._end, self._response_key = end, response_key

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the next round of prompts with their responses."""
        self._worker.engine.sleep()  # a validation may have woken it
        prompts = self._take()
        pairs = zip(prompts, prompt_inputs(prompts), strict=True)
        trajectories = [self._trajectory(prompt, inputs) for prompt, inputs in pairs]
        return RolloutGroups(trajectories, [], num_generations=1, num_rounds=1, num_filled=0)

    def _trajectory(self, prompt: Prompt, inputs: Mapping[str, ModelInput]) -> Trajectory:
        text = prompt.record[self._response_key]
        whole = [*prompt.token_ids, *self._worker.encode(text[: most_characters(self._worker.max_tokens)]), *self._end]
        token_ids = np.array(whole[: self._worker.max_tokens], dtype=np.int64)
        sequence = TokenSequence(
            token_ids=token_ids,
            loss_mask=np.arange(len(token_ids)) >= len(prompt.token_ids),
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            weight_versions=np.full(len(token_ids), NOT_SAMPLED),
            model_inputs=inputs,
        )
        return Trajectory(
            sample_id=prompt.sample_id,
            group_id=prompt.sample_id,
            sequences=(sequence,),
            reward=0.0,
            is_correct=False,
            finish_reason="stop" if len(token_ids) == len(whole) else "length",
            prompt_text=prompt.text,
            response_text=text,
            environment=prompt.environment,
        )


_MOST_NAMED = 3


def check_given_responses(prompts: Iterable[Prompt], response_key: str) -> None:
    """Check that each record has a response.

    Raises:
        DataError: Some have none, or one that is no text or an empty one; names the first.
    """
    without = [
        prompt.sample_id
        for prompt in prompts
        if not (isinstance(response := prompt.record.get(response_key), str) and response)
    ]
    if without:
        raise DataError(
            f"{counted(len(without), 'record')} without a response, expected a text under {response_key!r}"
            f" (distillation.response_key): {', '.join(without[:_MOST_NAMED])}"
            + (", ..." if len(without) > _MOST_NAMED else "")
        )
