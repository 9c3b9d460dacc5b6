# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `env` of GRPO: the environment that drives trajectories, and what scores responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import (
    CustomCode,
    ExpectedWords,
    PathText,
    PositiveInt,
    Processes,
    Seconds,
    StrictModel,
    Text,
)
from nemo_rl_moe.config.user_code import is_custom

RewardWeight = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
RewardName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100),
    ExpectedWords("letters, digits, underscores, hyphens and dots, at most 100"),
]

OnFailure = Literal["leave_out", "lowest", "zero", "retry"]
"""Treatment of a response that the environment failed to score, as `env.on_failure` names it."""


class ReasoningGymConfig(StrictModel):
    """A task of reasoning-gym."""

    task: Text
    """Its name, such as basic_arithmetic."""
    parameters: dict[str, Any]
    """The task's own parameters; what is left out is the task's default."""
    partial_credit: bool
    """true: the verifier's score is the reward; false: 1 for a score of 1, otherwise 0."""


class CallableConfig(StrictModel):
    """A Python function of the user's own."""

    function: Text
    """`package.module:function`; takes a `ScoringItem`, returns a reward, or a reward and whether it is right; with
    `env.reward_weights`, a dict of rewards in its place."""


class ToolLimitsConfig(StrictModel):
    """Limits of calls of tools."""

    num_workers: Processes
    """Processes that run tools, each one call at a time."""
    call_timeout_s: Seconds
    """Seconds that a call may take; then the model is told so in place of the result."""
    turn_timeout_s: Seconds
    """Seconds that the calls of one turn may take together; later ones are not made. The limit of a trajectory is
    `env.rollout_timeout_s`."""
    max_result_characters: PositiveInt
    """Longest result; a longer one is cut, and its end tells the model so."""
    memory_mb: PositiveInt
    """Megabytes that the tools of a process may take."""


class McpServerConfig(StrictModel):
    """A server of the Model Context Protocol, which speaks through its standard input and output."""

    command: PathText
    """The program: on the path, or its file."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment beside PATH, HOME and the like: it sees no others of the run's."""


class OpenEnvConfig(StrictModel):
    """Servers of an OpenEnv environment."""

    app: Text | None
    """`package.module:app`, an app that `openenv.core.create_app` makes; the run serves it on the loopback interface.
    null: `url`."""
    url: Text | None
    """Address of a server that runs already; null: `app`."""
    num_servers: Processes
    """Processes that serve `app`; a `url` is one server."""
    sessions_per_server: PositiveInt
    """Episodes that a server takes at a time, its `max_concurrent_envs`; other trajectories wait."""
    action_key: Text
    """Field of an action that takes the model's response."""
    observation_key: Text
    """Field of an observation that the model reads."""


class AgentLimitsConfig(StrictModel):
    """Limits of agents. That of a trajectory in time is `env.rollout_timeout_s`, that of its responses
    `env.max_turns`."""

    num_workers: Processes
    """Agents that run at the same time, each in a process of its own on the driver's machine; trajectories beyond them
    wait."""
    memory_mb: PositiveInt
    """Megabytes that the process of an agent may take, and each process that it starts."""


class EnvironmentConfig(StrictModel):
    """Scoring of responses."""

    name: Literal["math", "exact", "reasoning_gym", "callable", "verifiers", "openenv", "reward_model"] | CustomCode
    """math: math-verify against the record's answer; exact: the same text as the record's answer; reasoning_gym: the
    task's verifier; callable: a function; verifiers: an environment of that library, with its own prompts, which drives
    trajectories and scores them; openenv: servers of an OpenEnv environment, which do the same for the data's prompts;
    reward_model: the model of that section alone; otherwise `package.module:name`, a class or function that makes an
    environment of your own."""
    parameters: dict[str, Any]
    """Named arguments of an environment of your own; of verifiers `id`, the environment's name, and the arguments of
    its `load_environment`; {}: none."""
    num_workers: Processes
    """Processes that score."""
    timeout_s: Seconds
    """Seconds that one response may take; then scoring it has failed."""
    on_failure: OnFailure
    """Treatment of a response that the environment failed to score: it raised, took too long, returned no number or
    lost its worker. leave_out: neither trained on nor compared with others, and a group with fewer than two other
    responses is left out with it; lowest: it gets the lowest reward of its group's scored responses, and no positive
    advantage; zero: reward 0, which is better than a negative one; retry: its prompt is answered once more, in a fresh
    session, and left out if that fails too."""
    answer_after: Text | None
    """Score what follows the last such text, and all of a response without it; null: all of every response."""
    score_truncated: bool
    """Score responses that were truncated at the length limit; false: they get reward 0."""
    reasoning_gym: ReasoningGymConfig | None
    """Read when `name` is reasoning_gym."""
    callable: CallableConfig | None
    """Read when `name` is callable."""
    openenv: OpenEnvConfig | None
    """Read when `name` is openenv."""
    reward_weights: dict[RewardName, RewardWeight] | None
    """Weights of several rewards by their names, of which the weighted sum is trained on and each is logged; 0: logged
    alone. Every response has to get each of them. null: a response gets one number."""
    rollout: Text | None
    """`package.module:function` of a coroutine that drives a trajectory over several turns; null: one response to the
    prompt, scored by the reward function that `name` names."""
    rollout_timeout_s: Seconds | None
    """Seconds that the code and the tools of one trajectory of `rollout`, or its agent, may take; then it has failed,
    and is counted. Time in which it waits for the model's responses or for `session.score()` does not count, nor that
    of other trajectories. null: no limit."""
    agent: Text | None
    """`package.module:function` that drives a trajectory through an OpenAI-compatible endpoint: it takes an
    `AgentTask`, and returns a reward, or None where the reward function that `name` names scores the last response;
    null: none."""
    agent_command: list[PathText]
    """Program and arguments that drive a trajectory in the same way, in place of `agent`; []: none."""
    agent_limits: AgentLimitsConfig
    """Read when there is an `agent` or an `agent_command`."""
    tools: list[Text]
    """Tools that the model may call, until it answers without a call: `package.module:function`, typed and with a
    docstring, or calculator, python, search; []: none."""
    mcp_servers: dict[Text, McpServerConfig]
    """MCP servers by names of your choice, whose tools the model may call too; each process that runs tools starts its
    own; {}: none."""
    tool_parameters: dict[str, dict[str, Any]]
    """Values of keyword-only parameters of tools, by the name of the tool: the model does not see them; {}: none."""
    tool_format: Text | None
    """Format in which the model writes calls, of `tools` or of those that an agent's requests have: hermes,
    qwen3_coder, glm45, deepseek_v3, deepseek_v31, mistral, mistral_args, llama3_json, function_calls, olmo3,
    harmony, or `package.module:FORMAT`; null: the one that the chat template writes."""
    tool_limits: ToolLimitsConfig
    """Read when there are `tools` or `mcp_servers`."""
    max_turns: PositiveInt
    """Most responses of a trajectory with `tools` or an agent; calls in the last one of `tools` are not made, and
    further requests of an agent are refused."""
    tool_call_cost: Annotated[float, Field(ge=0, le=1_000)]
    """Cost of each call of a tool, taken from the reward of its trajectory, so that the model learns when not to call;
    0: none. `accuracy` does not change. Not with `reward_weights`."""
    rewritten_turns: Literal["begin_anew", "keep"]
    """Sets how `session.append_message` continues where the chat template now renders earlier turns in another way,
    such as without their thinking. begin_anew: a new training sequence begins with a fresh rendering, as the model is
    used later; keep: the sequence goes on with all tokens that are there."""

    @property
    def has_tools(self) -> bool:
        """Return whether the model may call tools of the run."""
        return bool(self.tools or self.mcp_servers)

    @property
    def driven_by(self) -> str | None:
        """Return the code, program or library that drives trajectories; None: none does."""
        own = self.rollout or self.agent or " ".join(self.agent_command)
        return own or (self.name if self.scores_trajectories else None)

    @property
    def scores_trajectories(self) -> bool:
        """Return whether an environment of a library makes trajectories with their scores; no reward function does."""
        return self.name in ("verifiers", "openenv")

    @property
    def leaves_it_to_the_model(self) -> bool:
        """Return whether the reward model alone scores responses."""
        return self.name == "reward_model"

    @property
    def needs_answers(self) -> bool:
        """Return whether a response is compared with the answer of its record."""
        return not (self.is_custom or self.scores_trajectories or self.leaves_it_to_the_model)

    @property
    def reads_whole_records(self) -> bool:
        """Return whether code or a library drives or scores, which may read any key of a record."""
        return self.is_custom or self.driven_by is not None

    @property
    def has_own_prompts(self) -> bool:
        """Return whether prompts are the environment's own data."""
        return self.name == "verifiers"

    @property
    def has_agent(self) -> bool:
        """Return whether a program drives trajectories through the endpoint."""
        return self.agent is not None or bool(self.agent_command)

    @property
    def is_custom(self) -> bool:
        """Return whether custom code scores: it may read a whole record, and give several rewards by name."""
        return self.name == "callable" or is_custom(self.name)
