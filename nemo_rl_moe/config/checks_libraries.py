# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of environments that come from other libraries: they drive trajectories themselves."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig
from nemo_rl_moe.config.schema_mixture import environment_key


def verifiers_drives_trajectories(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that environments of verifiers are named, and that nothing else does what they do."""
    for name, env in config.env.environments.items():
        if env.name == "verifiers":
            yield from _problems_with_verifiers(environment_key(name), env)
            key = f"data.environments.{name}" if name in config.data.environments else "data"
            yield from _problems_with_its_data(
                key, config.data.of(name), f"with {environment_key(name)}.name verifiers"
            )


def _problems_with_verifiers(key: str, env: EnvironmentConfig) -> Iterator[str]:
    name, with_it = env.parameters.get("id"), f"with {key}.name verifiers"
    if not isinstance(name, str) or not name:
        got = "is missing" if name is None else f"got {name!r}"
        yield f"{key}.parameters.id: {got}, expected the name of an environment {with_it}, such as {{id: gsm8k}}"
    if env.rollout is not None:
        yield f"{key}.rollout: got {env.rollout}, expected null {with_it}, whose environment drives trajectories"
    if env.tools:
        yield f"{key}.tools: got {', '.join(env.tools)}, expected [] {with_it}, whose environment has its own"
    if env.mcp_servers:
        yield f"{key}.mcp_servers: got {', '.join(env.mcp_servers)}, expected {{}} {with_it}, which has its own tools"
    if env.reward_weights is not None:
        weights = ", ".join(env.reward_weights)
        yield f"{key}.reward_weights: got {weights}, expected null {with_it}, whose rubric has its own"
    if env.answer_after is not None:
        yield f"{key}.answer_after: got {env.answer_after!r}, expected null {with_it}: its rubric reads whole responses"


def _problems_with_its_data(key: str, data: PromptDataConfig, with_it: str) -> Iterator[str]:
    if data.tools:
        yield f"data.tools: got {len(data.tools)}, expected [] {with_it}, whose environment has its own"
    if data.prompt_template is not None:
        yield f"{key}.prompt_template: got a text, expected null {with_it}, whose environment makes prompts"
    for name, source in (("train", data.train), ("validation", data.validation)):
        if source is not None and source.path is not None:
            yield f"{key}.{name}.path: got {source.path}, expected null {with_it}, whose environment has its own data"


def openenv_drives_trajectories(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that OpenEnv environments have a server, and that nothing else does what they do."""
    for name, env in config.env.environments.items():
        if env.name == "openenv" and env.openenv is not None:
            yield from _problems_with_openenv(environment_key(name), env)


def _problems_with_openenv(key: str, env: EnvironmentConfig) -> Iterator[str]:
    assert env.openenv is not None
    with_it = f"with {key}.name openenv"
    if (env.openenv.app is None) == (env.openenv.url is None):
        both = "null, and so is" if env.openenv.app is None else f"{env.openenv.app}, and there is"
        yield f"{key}.openenv.app: got {both} {key}.openenv.url, expected one of them"
    if env.rollout is not None:
        yield f"{key}.rollout: got {env.rollout}, expected null {with_it}, whose server drives trajectories"
    if env.has_tools:
        named = ", ".join([*env.tools, *env.mcp_servers])
        yield f"{key}.tools and {key}.mcp_servers: got {named}, expected none {with_it}, whose actions are responses"
    if env.reward_weights is not None:
        yield f"{key}.reward_weights: got {', '.join(env.reward_weights)}, expected null {with_it}: it gives one reward"


LIBRARY_RULES = (verifiers_drives_trajectories, openenv_drives_trajectories)
