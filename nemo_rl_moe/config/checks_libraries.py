# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of environments that come from other libraries: they drive trajectories themselves."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig


def verifiers_drives_trajectories(config: "GRPOMasterConfig") -> Iterator[str]:
    """Check that an environment of verifiers is named, and that nothing else does what it does."""
    env, data = config.env, config.data
    if env.name != "verifiers":
        return
    name, with_it = env.parameters.get("id"), "with env.name verifiers"
    if not isinstance(name, str) or not name:
        yield f"env.parameters.id: {_got(name)}, expected the name of an environment {with_it}, such as {{id: gsm8k}}"
    if env.rollout is not None:
        yield f"env.rollout: got {env.rollout}, expected null {with_it}, whose environment drives trajectories"
    if env.tools:
        yield f"env.tools: got {', '.join(env.tools)}, expected [] {with_it}, whose environment has its own"
    if env.mcp_servers:
        yield f"env.mcp_servers: got {', '.join(env.mcp_servers)}, expected {{}} {with_it}, which has its own tools"
    if env.reward_weights is not None:
        weights = ", ".join(env.reward_weights)
        yield f"env.reward_weights: got {weights}, expected null {with_it}, whose rubric has its own"
    if env.answer_after is not None:
        yield f"env.answer_after: got {env.answer_after!r}, expected null {with_it}: its rubric reads whole responses"
    if data.tools:
        yield f"data.tools: got {len(data.tools)}, expected [] {with_it}, whose environment has its own"
    if data.prompt_template is not None:
        yield f"data.prompt_template: got a text, expected null {with_it}, whose environment makes prompts"
    for key, source in (("train", data.train), ("validation", data.validation)):
        if source is not None and source.path is not None:
            yield f"data.{key}.path: got {source.path}, expected null {with_it}, whose environment has its own data"


def openenv_drives_trajectories(config: "GRPOMasterConfig") -> Iterator[str]:
    """Check that an OpenEnv environment has a server, and that nothing else does what it does."""
    env, with_it = config.env, "with env.name openenv"
    if env.name != "openenv" or env.openenv is None:
        return
    if (env.openenv.app is None) == (env.openenv.url is None):
        both = "null, and so is" if env.openenv.app is None else f"{env.openenv.app}, and there is"
        yield f"env.openenv.app: got {both} env.openenv.url, expected one of them"
    if env.rollout is not None:
        yield f"env.rollout: got {env.rollout}, expected null {with_it}, whose server drives trajectories"
    if env.has_tools:
        named = ", ".join([*env.tools, *env.mcp_servers])
        yield f"env.tools and env.mcp_servers: got {named}, expected none {with_it}, whose actions are responses"
    if env.reward_weights is not None:
        yield f"env.reward_weights: got {', '.join(env.reward_weights)}, expected null {with_it}: it gives one reward"


def _got(value: object) -> str:
    return "is missing" if value is None else f"got {value!r}"


LIBRARY_RULES = (verifiers_drives_trajectories, openenv_drives_trajectories)
