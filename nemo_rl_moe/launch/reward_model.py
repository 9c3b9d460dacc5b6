# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward model of a run. It is checked before any worker starts, and then started in separate workers."""

from functools import partial
from pathlib import Path

from nemo_rl_moe.algorithms.reward_model import RewardModel
from nemo_rl_moe.config.role_keys import role_problems
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_run import REWARD_MODEL_ROLE
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.roles import prepare_role, start_role, tokenizer_of_role
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel, model_as_classifier
from nemo_rl_moe.models.classifiers import classifier_problem
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.peft_files import scores_sequences

_KEY = "reward_model.model_name"


def prepare_reward_model(config: GRPOMasterConfig, run: ModelRun, policy: PreparedModel) -> PreparedModel | None:
    """Fetch and check the reward model, and warn if its chat template differs from the policy's. Return None if the run
    has no reward model."""
    if config.reward_model is None:
        return None
    name, adapter = config.reward_model.model_name, config.reward_model.adapter
    model = prepare_role(config, REWARD_MODEL_ROLE, policy, run.console)
    if adapter is not None and scores_sequences(Path(adapter)):
        try:
            model = model_as_classifier(model)
        except ConfigurationError as error:
            raise ConfigurationError(role_problems(config, REWARD_MODEL_ROLE, error.problems)) from error
    elif problem := classifier_problem(load_config_json(str(model.source.folder())), model.hf_config):
        raise ConfigurationError(f"{_KEY}: got {name}, {problem}")
    theirs = tokenizer_of_role(_KEY, name, config, policy).chat_template
    settings = config.policy.tokenizer
    ours = load_tokenizer(settings.name, settings.chat_template).chat_template  # not corrected by this package
    if ours is not None and theirs is not None and ours != theirs:
        run.console.warn(
            f"{_KEY}: the chat templates of {name} and {settings.name} differ; the template of {settings.name} renders"
            " the conversations to score (policy.tokenizer.chat_template sets another template)"
        )
    return model


def start_reward_model(config: GRPOMasterConfig, run: ModelRun, model: PreparedModel | None) -> RewardModel | None:
    """Start the workers of the reward model for the rest of the run. Return None if the run has no reward model."""
    if config.reward_model is None or model is None:
        return None
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers  # imports Megatron-Core, which takes seconds

    workers = start_role(run, REWARD_MODEL_ROLE, model, partial(ModelWorkers, heads=(Head.SCORE,)))
    return RewardModel(workers, config.reward_model.weight, model.hf_config.pad_token_id)
