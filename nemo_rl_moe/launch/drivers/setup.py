# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs with which drivers are prepared, and functions that several kinds share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import psutil

from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.config.schema_mixture import THE_ONLY_ONE
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.sources import LineSource
from nemo_rl_moe.data.template_inputs import TemplateInputs, run_wide_inputs
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.process.client import RemoteEnvironment
from nemo_rl_moe.rollouts.process.serve import ProcessSettings
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.tools.definitions import Tools, load_tools, with_servers
from nemo_rl_moe.tools.detection import format_of, require_continuable, require_definitions
from nemo_rl_moe.tools.formats.interface import ToolFormat
from nemo_rl_moe.tools.mcp_tools import McpTool, describe_servers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StartDriver = Callable[[ModelRun, Callable[[str], None]], Environment]
"""A function that starts a driver with its workers for the rest of a run. The second argument is called with
warnings."""
StartInProcess = Callable[[], AbstractContextManager[Environment]]
"""A function that starts an environment of user code in a separate process. It must be picklable."""


@dataclass(frozen=True)
class DriverSetup:
    """Inputs with which the driver of one environment is prepared.

    Attributes:
        name: Name of the environment in `env.mixture`. Empty without a mixture.
        sampling: Sampling parameters for training.
    """

    config: GRPOMasterConfig
    tokenizer: "PreTrainedTokenizerBase"
    sampling: SamplingParameters
    name: str = THE_ONLY_ONE

    @property
    def env(self) -> EnvironmentConfig:
        return self.config.env.environments[self.name]

    @property
    def run_wide(self) -> TemplateInputs:
        """Inputs of the chat template that are the same for all prompts, except definitions of tools."""
        return run_wide_inputs([], self.config.data.chat_template_kwargs)

    def continuation(self) -> Continuation:
        """Return the object that renders messages appended to a conversation."""
        data = data_with_tools(self.config, self.name)
        return Continuation(
            self.tokenizer,
            run_wide_inputs(data.tools, data.chat_template_kwargs),
            keep_rewritten=self.env.rewritten_turns == "keep",
            most_tokens=self.config.policy.max_total_sequence_length,
        )

    def tool_format(self, named: str | None) -> ToolFormat:
        """Return the format of tool calls, and check that the chat template renders definitions and results of tools.

        Args:
            named: Name of the format in the configuration. None: the format of the chat template.
        """
        found = format_of(self.tokenizer, named, self.run_wide)
        require_definitions(self.tokenizer, self.run_wide)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        require_continuable(self.continuation(), found, encode, self.sampling.stop_token_ids)
        return found


@dataclass(frozen=True)
class DriverKind:
    """The functions with which a run uses a driver. Their errors are `ConfigurationError`s.

    Attributes:
        prepare: Checks the driver with the run's tokenizer, and returns the function that starts the driver.
        check: Checks that the driver's code, program or library exists. Reads no model.
        prompts: Returns the environment's own prompts. None: the environment has no prompts.
    """

    prepare: Callable[[DriverSetup], StartDriver]
    check: Callable[[], object] = lambda: None
    prompts: Callable[[PromptSourceConfig], LineSource[PromptRecord]] | None = None


def in_separate_process(setup: DriverSetup, name: str, start: StartInProcess) -> StartDriver:
    """Return the function that starts a driver whose code belongs to the user or to a library, in a separate process if
    `grpo.rollouts.process` is true.

    Args:
        name: Name of the code in messages.
    """
    rollouts, env = setup.config.grpo.rollouts, setup.env

    def start_driver(run: ModelRun, warn: Callable[[str], None]) -> Environment:
        if not rollouts.process:
            return run.use(start())
        settings = ProcessSettings(
            start,
            setup.tokenizer,
            setup.continuation(),
            setup.config.policy.max_total_sequence_length,
            env.reward_weights,
            env.rollout_timeout_s,
            rollouts.process_memory_mb or psutil.virtual_memory().total // 2**21,
        )
        show = Notices(run.console.message, run.console.warn).message
        return run.use(running_in_process(settings, name, show, warn))

    return start_driver


@contextmanager
def running_in_process(
    settings: ProcessSettings, name: str, show: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[RemoteEnvironment]:
    """Begin to start the process of an environment, and yield the environment. The process ends with this context."""
    environment = RemoteEnvironment(settings, name, show, warn)
    try:
        yield environment
    finally:
        environment.stop()


def data_with_tools(config: GRPOMasterConfig, name: str = THE_ONLY_ONE) -> PromptDataConfig:
    """Return the `data` section of an environment with the definitions of its tools added."""
    driver, data = config.env.environments[name].driver, config.data.of(name)
    if not isinstance(driver, ToolsConfig):
        return data
    return data.model_copy(update={"tools": [dict(tool.definition) for tool in described_tools(driver).values()]})


def described_tools(driver: ToolsConfig) -> Tools:
    """Return the tools of an environment, for the run's main process.

    Tools of MCP servers cannot be called there, only in the tool workers.
    """

    def elsewhere(**arguments: object) -> object:
        raise NotImplementedError("tools of servers are called in the tool workers")

    found: list[McpTool] = describe_servers(driver.mcp_servers) if driver.mcp_servers else []
    return with_servers(load_tools(driver.tools, driver.parameters), [(tool, elsewhere) for tool in found])
