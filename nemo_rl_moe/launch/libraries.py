# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of other libraries: checked before anything starts."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.launch.tools import continuation_of
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import Environment, RolloutFunction
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.tools.detection import format_of, require_continuable
from nemo_rl_moe.tools.formats.interface import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NoRewardFunction:
    """Reward function of a run whose environment scores trajectories itself: nobody asks it."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Refuse to score."""
        raise NotImplementedError("the environment scores its trajectories itself")


def library_environment(
    config: GRPOMasterConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: Sequence[int],
    prompts: Sequence[Prompt],
) -> Environment:
    """Return the environment of the library that a configuration names.

    Args:
        prompts: Those to train on; their tools are the environment's.

    Raises:
        ConfigurationError: There is no such environment, or the chat template cannot show calls of its tools.
    """
    env = config.env
    tool_format = None
    if any(prompt.inputs.tools for prompt in prompts):
        tool_format = _tool_format(config, tokenizer, stop_token_ids)
    rollout = VerifiersRollout(load_verifiers(env.parameters), tool_format, score_truncated=env.score_truncated)
    return RolloutFunction(rollout, str(env.driven_by))


def _tool_format(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int]
) -> ToolFormat:
    tool_format = format_of(tokenizer, config.env.tool_format, run_wide_inputs([], config.data.chat_template_kwargs))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    require_continuable(continuation_of(config, tokenizer), tool_format, encode, stop_token_ids)
    return tool_format
