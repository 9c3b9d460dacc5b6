# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Replies of a served model over HTTP, made of scripted sequences, and clients that behave badly."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.speech import describe_speech
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.endpoint.http import listen
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
    PromptScores,
    SamplingParameters,
)
from nemo_rl_moe.serving.app import served_application
from nemo_rl_moe.serving.requests import ServedRules
from nemo_rl_moe.serving.served_routes import ServedRoutes
from nemo_rl_moe.serving.service import ServedModel, Service
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.support.conversations import ALL, QUESTION

QWEN = ALL["Qwen3, Qwen3-MoE"]
KEY = "secret"
SAMPLING = SamplingParameters(60, stop_token_ids=QWEN.end_ids)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@dataclass
class Script(GenerationEngine):
    """Answers each request with a text, its end, and routes in which every number is the token's place."""

    text: str = "It is 3."
    error: Exception | None = None
    waits: asyncio.Event | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    num_cancelled: int = 0

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if self.waits is not None:
            try:
                await self.waits.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        token_ids = [*QWEN.encode(self.text), QWEN.end_ids[0]][: request.sampling.max_new_tokens]
        number = len(request.token_ids) + len(token_ids) - 1
        routes = np.arange(number, dtype=np.int16)[:, None, None].repeat(2, 1).repeat(1, 2)
        scores = None
        if request.sampling.scores_prompt:
            own = np.arange(1, len(request.token_ids), dtype=np.float32)
            scores = PromptScores(-own, np.full(len(own), QWEN.end_ids[0]), -own / 2)
        return GeneratedSequence(
            np.array(token_ids),
            np.full(len(token_ids), -0.25, np.float32),
            token_ids[-1] not in request.sampling.stop_token_ids,
            0,
            StoredRows.of(routes),
            prompt_scores=scores,
        )


Client = Callable[..., Awaitable[httpx.Response]]


def served(engine: Script, use: Callable[[Client], Awaitable[None]], **more: Any) -> None:
    """Serve a script on a free port, and let `use` send requests: a path, and the body of a POST."""

    async def run() -> None:
        model = ServedModel(
            "m",
            QWEN.tokenizer,
            Continuation(QWEN.tokenizer),
            max_tokens=200,
            **{"vocabulary_size": len(QWEN.tokenizer), **more},
            tool_format=TOOL_FORMATS["hermes"],
            thinking=describe_speech(QWEN.tokenizer).thinking,
            routes=ServedRoutes((1, 3), 500, 1, list),
        )
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        app = served_application(Service(engine, model, ServedRules("m", SAMPLING, None, None)), KEY, failed)
        runner, port = await listen(app)

        async def ask(path: str, body: dict[str, Any] | None = None, key: str = KEY) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                if body is None:
                    return await client.get(path, headers=headers)
                return await client.post(path, content=json.dumps({"model": "m", **body}), headers=headers)

        try:
            await use(ask)
            if engine.error is not None:
                with pytest.raises(GenerationError):
                    await failed
        finally:
            await runner.cleanup()

    asyncio.run(run())


CHAT: dict[str, Any] = {"messages": [QUESTION]}
LEFT = {"role": "assistant", "content": "<|im_end|>"}
LONG = {"role": "user", "content": "x" * 10**6}


def test_a_chat_has_its_message_its_tokens_and_its_experts() -> None:
    engine = Script("<think>\nhm\n</think>\n\nIt is 3.")

    async def use(ask: Client) -> None:
        body = {**CHAT, "n": 2, "seed": 7, "logprobs": True, "return_token_ids": True, "return_routed_experts": True}
        reply = (await ask("/v1/chat/completions", body)).json()
        prompt = list(engine.requests[0].token_ids)
        assert QWEN.tokenizer.decode(prompt) == QWEN.render([QUESTION], None)
        sampled = [*QWEN.encode(engine.text), QWEN.end_ids[0]]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        for choice in reply["choices"]:
            message = choice["message"]
            assert (message["content"], message["reasoning_content"]) == ("It is 3.", "hm")
            assert (choice["finish_reason"], choice["token_ids"]) == ("stop", sampled)
            assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.25] * len(sampled)
            routes = choice["routed_experts"]
            assert (routes["layers"], routes["num_experts"], routes["num_prompt_tokens"]) == ([1, 3], 500, len(prompt))
            assert "".join(routes["tokens"]) == QWEN.tokenizer.decode([*prompt, *sampled])
            places = [[[place], [place]] for place in range(len(prompt) + len(sampled) - 1)]
            assert routes["experts"] == [*places, None], "the last token was no input"
        assert reply["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 2 * len(sampled),
            "total_tokens": len(prompt) + 2 * len(sampled),
        }
        assert reply["prompt_token_ids"] == prompt
        first, second = (request.seed for request in engine.requests)
        assert first == 7 != second
        await ask("/v1/chat/completions", body)
        assert [request.seed for request in engine.requests[2:]] == [first, second], "a seed repeats"
        await ask("/v1/chat/completions", CHAT)
        await ask("/v1/chat/completions", CHAT)
        assert len({request.seed for request in engine.requests[4:]}) == 2
        assert "routed_experts" not in (await ask("/v1/chat/completions", CHAT)).json()["choices"][0]

    served(engine, use)


def test_token_ids_that_the_model_does_not_have_are_refused_whoever_makes_them() -> None:
    engine = Script()

    async def use(ask: Client) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "ab"})):
            reply = await ask(path, body)
            assert (reply.status_code, engine.requests) == (400, [])
            assert "got the token id" in reply.json()["error"]["message"]

    served(engine, use, vocabulary_size=10)


def test_replies_have_no_special_tokens() -> None:
    engine = Script(f"It {QWEN.ends[0]}is 3.")

    async def use(ask: Client) -> None:
        assert (await ask("/v1/chat/completions", CHAT)).json()["choices"][0]["message"]["content"] == "It is 3."
        assert (await ask("/v1/completions", {"prompt": "ab"})).json()["choices"][0]["text"] == "It is 3."

    served(engine, use)


def test_calls_are_read_and_streamed() -> None:
    engine = Script('I call.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')

    async def use(ask: Client) -> None:
        reply = (await ask("/v1/chat/completions", {**CHAT, "tools": [TOOL]})).json()
        [choice] = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert QWEN.render([QUESTION], [TOOL]) == QWEN.tokenizer.decode(engine.requests[0].token_ids)
        stream = await ask("/v1/chat/completions", {**CHAT, "tools": [TOOL], "stream": True})
        *chunks, end = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
        assert end == "[DONE]"
        first, last = map(json.loads, chunks)
        assert first["choices"][0]["delta"]["content"] == "I call."
        assert last["choices"][0]["finish_reason"] == "tool_calls"

    served(engine, use)


def test_completions_echo_their_prompts_with_log_probabilities() -> None:
    engine = Script()

    async def use(ask: Client) -> None:
        body = {"prompt": ["ab", "1+2="], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        reply = (await ask("/v1/completions", body)).json()
        for prompt, choice in zip(body["prompt"], reply["choices"], strict=True):
            texts = [QWEN.tokenizer.decode([each]) for each in (*QWEN.encode(prompt), *QWEN.encode("It is 3.")[:1])]
            found = choice["logprobs"]
            assert (choice["text"], found["tokens"], choice["finish_reason"]) == ("".join(texts), texts, "length")
            own = [-float(place) for place in range(1, len(texts) - 1)]
            assert found["token_logprobs"] == [None, *own, -0.25]
            end = QWEN.ends[0]
            top = [{end: value / 2, text: value} for value, text in zip(own, texts[1:-1], strict=True)]
            assert found["top_logprobs"] == [None, *top, {texts[-1]: -0.25}]
            assert found["text_offset"] == [sum(map(len, texts[:place])) for place in range(len(texts))]
        empty = (await ask("/v1/completions", {**body, "max_tokens": 0})).json()
        assert [choice["text"] for choice in empty["choices"]] == body["prompt"]
        assert empty["usage"]["completion_tokens"] == 0
        plain = (await ask("/v1/completions", {"prompt": QWEN.encode("ab"), "stop": [" is"]})).json()["choices"][0]
        assert (plain["text"], plain["finish_reason"], plain["logprobs"]) == ("It", "stop", None)
        assert engine.requests[-1].sampling.stop_strings == (" is",)
        stream = await ask(
            "/v1/completions", {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
        )
        *lines, _ = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
        chunks = [json.loads(line) for line in lines]
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["It is 3."]
        assert chunks[-1]["usage"]["completion_tokens"] == len(QWEN.encode("It is 3.")) + 1

    served(engine, use)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 500}, 400, "context_length_exceeded"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 10**6}]},
            400,
            "context_length_exceeded",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "users", "content": "x"}]}, 400, None),
        ("/v1/completions", {"prompt": "a" * 190}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": [5] * 200, "echo": True, "max_tokens": 0}, 400, "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": [QUESTION, LEFT, QUESTION] * 200}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": ""}, 400, None),
        ("/v1/completions", {"prompt": "\ud800"}, 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ("/v1/completions", {"prompt": [10**6]}, 400, None),
        ("/v1/embeddings", {"input": "a"}, 404, None),
    ],
)
def test_bad_requests_get_errors_in_openais_form(
    path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    engine = Script()

    async def use(ask: Client) -> None:
        reply = await ask(path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert not engine.requests
        assert (await ask("/v1/models", key="wrong")).status_code == 401
        [model] = (await ask("/v1/models")).json()["data"]
        assert (model["id"], model["moe"]) == ("m", {"layers": [1, 3], "num_experts": 500, "num_experts_per_token": 1})

    served(engine, use)


def test_the_request_of_a_client_that_leaves_is_cancelled() -> None:
    engine = Script()

    async def use(ask: Client) -> None:
        engine.waits = asyncio.Event()
        leaving = asyncio.create_task(ask("/v1/chat/completions", {**CHAT, "n": 3}))
        while len(engine.requests) < 3:
            await asyncio.sleep(0.01)
        leaving.cancel()
        while engine.num_cancelled < 3:
            await asyncio.sleep(0.01)
        engine.waits = None
        assert (await ask("/v1/chat/completions", CHAT)).status_code == 200

    served(engine, use)


def test_an_engine_that_fails_is_an_error_of_the_server() -> None:
    async def use(ask: Client) -> None:
        reply = await ask("/v1/chat/completions", CHAT)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")

    served(Script(error=GenerationError("a worker died")), use)


def test_a_bug_is_an_error_of_its_request_alone() -> None:
    engine = Script(error=KeyError("x"))

    async def use(ask: Client) -> None:
        reply = await ask("/v1/chat/completions", CHAT)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        engine.error = None
        assert (await ask("/v1/chat/completions", CHAT)).status_code == 200

    served(engine, use)


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere() -> None:
    async def use(ask: Client) -> None:
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            reply = await ask(path, key="none")
            assert reply.status_code == 200
            assert reply.headers["Content-Type"].startswith(kind)
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            assert KEY not in reply.text
            assert "http" not in reply.text.replace("HTTP", "")

    served(Script(), use)
