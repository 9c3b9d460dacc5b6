# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of other projects with their default requests. They are in an environment of their own: make libraries."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.conversations import ALL, MODEL, Agent, ended, play

QWEN = ALL["Qwen3, Qwen3-MoE"]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = (call("add", '{"a": 1, "b": 2}'), "<think>\nhm\n</think>\n\nIt is 3.")


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def played(agent: Agent, responses: Sequence[str]) -> Trajectory:
    _, found = play(agent, [ended(QWEN, text) for text in responses], QWEN)
    assert (found.fault_message, found.num_turns) == ("", len(responses))
    assert found.metrics["agent/refused_requests"] == 0
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_langchain(streams: bool) -> None:
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    messages = pytest.importorskip("langchain_core.messages")

    def agent(task: AgentTask) -> float:
        model = chat_openai(model=MODEL, base_url=task.base_url, api_key=task.api_key, streaming=streams, seed=1)
        history: list[Any] = [messages.HumanMessage("1+2?")]
        reply = model.bind_tools([add]).invoke(history)
        [asked] = reply.tool_calls
        history += [reply, messages.ToolMessage(str(add(**asked["args"])), tool_call_id=asked["id"])]
        return float(model.bind_tools([add]).invoke(history).content == "It is 3.")

    found = played(agent, CALLS)
    assert (found.reward, found.num_sequences) == (1.0, 1)
    assert found.metrics["agent/other_sampling_requests"] == 2, "the seed"


@pytest.mark.parametrize("streams", [False, True])
def test_litellm(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")

    def agent(task: AgentTask) -> float:
        found = litellm.completion(
            model=f"openai/{MODEL}",
            messages=list(task.messages),
            api_base=task.base_url,
            api_key=task.api_key,
            temperature=0.1,
            stream=streams,
        )
        reply = litellm.stream_chunk_builder(list(found)) if streams else found
        message = reply.choices[0].message
        return float((message.content, message.reasoning_content) == ("It is 3.", "hm"))

    found = played(agent, CALLS[1:])
    assert (found.reward, found.metrics["agent/other_sampling_requests"]) == (1.0, 1)


def test_smolagents() -> None:
    smolagents = pytest.importorskip("smolagents")

    def agent(task: AgentTask) -> float:
        model = smolagents.OpenAIServerModel(MODEL, api_base=task.base_url, api_key=task.api_key)
        solver = smolagents.ToolCallingAgent(tools=[smolagents.tool(add)], model=model, verbosity_level=0)
        return float(solver.run("1+2?") == "3")

    found = played(agent, (CALLS[0], call("final_answer", '{"answer": "3"}')))
    assert (found.reward, found.metrics["agent/other_sampling_requests"]) == (1.0, 2), "tool_choice and stop"


@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents(streams: bool) -> None:
    agents = pytest.importorskip("agents")
    client = pytest.importorskip("openai").AsyncOpenAI
    agents.set_tracing_disabled(True)

    async def solve(task: AgentTask) -> float:
        async with client(base_url=task.base_url, api_key=task.api_key) as asked:
            model = agents.OpenAIChatCompletionsModel(MODEL, asked)
            settings = agents.ModelSettings(parallel_tool_calls=False)
            solver = agents.Agent("solver", model=model, model_settings=settings, tools=[agents.function_tool(add)])
            if not streams:
                return float((await agents.Runner.run(solver, "1+2?")).final_output == "It is 3.")
            run = agents.Runner.run_streamed(solver, "1+2?")
            async for _ in run.stream_events():
                pass
            return float(run.final_output == "It is 3.")

    found = played(lambda task: asyncio.run(solve(task)), CALLS)
    assert (found.reward, found.num_sequences) == (1.0, 1)
    assert found.metrics["agent/other_sampling_requests"] == 2, "parallel_tool_calls"
