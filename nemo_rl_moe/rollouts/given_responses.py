# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A source of trajectories whose responses are in the data instead of sampled."""

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

from nemo_rl_moe.data.encoding import most_characters
from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import DataError, counted
from nemo_rl_moe.generation.interface import TokenIds
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutGroups, SourceState
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory


class GivenResponses:
    """A `RolloutSource` with one trajectory per prompt, whose response is read from the prompt's record.

    Responses are cut to the runner's limit on tokens.

    Args:
        runner: Its engine is only used for validations.
        rounds: The prompts of each epoch in rounds, one per step. There must be at least one round.
        response_key: Key of the response in a record.
        end: Tokens to add after each response, such as the end token. May be empty.
        batches_taken: Number of rounds that the resumed run has already taken.

    Attributes:
        steps_per_epoch: Number of steps of one pass over the prompts.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        rounds: PromptRounds,
        num_epochs: int,
        response_key: str,
        end: TokenIds,
        batches_taken: int = 0,
    ):
        self._runner, self._end, self._response_key = runner, end, response_key
        self.steps_per_epoch, self._taken = len(rounds), batches_taken
        first_epoch, first_round = divmod(batches_taken, len(rounds))
        all_rounds = (prompts for epoch in range(first_epoch, num_epochs) for prompts in rounds.epoch(epoch))
        self._rounds = islice(all_rounds, first_round, None)
        self._next_round = next(self._rounds, None)  # one ahead, so that a loop recognizes its last step

    @property
    def is_used_up(self) -> bool:
        return self._next_round is None

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        self._runner.engine.sleep()  # a validation may have woken it
        prompts, self._next_round = self._next_round, next(self._rounds, None)
        assert prompts is not None
        self._taken += 1
        pairs = zip(prompts, prompt_inputs(prompts), strict=True)
        trajectories = [self._trajectory(prompt, inputs) for prompt, inputs in pairs]
        return RolloutGroups(trajectories, [], num_generations=1, num_filled=0)

    def update_pending(self, step: int) -> None:
        """Do nothing, as nothing is generated."""

    def updated(self, step: int) -> None:
        """Do nothing, as nothing is generated."""

    def state(self, step: int) -> SourceState:
        return SourceState(self._taken)

    def _trajectory(self, prompt: Prompt, inputs: Mapping[str, ModelInput]) -> Trajectory:
        text = prompt.record[self._response_key]
        tokens = [*prompt.token_ids, *self._runner.encode(text[: most_characters(self._runner.max_tokens)]), *self._end]
        token_ids = np.array(tokens[: self._runner.max_tokens], dtype=np.int64)
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
            finish_reason="stop" if len(token_ids) == len(tokens) else "length",
            prompt_text=prompt.text,
            response_text=text,
            environment=prompt.environment,
        )


_MOST_NAMED = 3


def check_given_responses(prompts: Iterable[Prompt], response_key: str) -> None:
    """Check that each record has a response."""
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
