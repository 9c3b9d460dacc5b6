# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers to requests: from the engine's sequences to replies in OpenAI's form."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl_moe.data.chat_template import text_renderer_for
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.encoding import encode_each, most_characters, num_characters
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.data.thinking import THINK_START, Thinking
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.data.turn_spans import RenderError
from nemo_rl_moe.endpoint.chat_requests import ChatRequest, shown
from nemo_rl_moe.endpoint.replies import chat_choice, chat_reply, message_of, read_turn, usage_of, without_thinking
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
    TokenIds,
)
from nemo_rl_moe.serving.requests import Prompt, Sampling, ServedCompletion, ServedRules
from nemo_rl_moe.serving.served_routes import ServedRoutes
from nemo_rl_moe.tools.formats.interface import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_TOKENS = 16


@dataclass(frozen=True)
class ServedModel:
    """A model as requests see it.

    Attributes:
        name: Its id in requests and replies.
        max_tokens: Maximum number of tokens of a sequence, prompt included.
        vocabulary_size: Number of token ids.
        tool_format: Format in which the model writes calls. None without tools.
        thinking: Marks of the model's thinking. None if it has none.
        routes: Reader of routed experts. None if the engine does not capture them.
    """

    name: str
    tokenizer: "PreTrainedTokenizerBase"
    continuation: Continuation
    max_tokens: int
    vocabulary_size: int
    tool_format: ToolFormat | None
    thinking: Thinking | None
    routes: ServedRoutes | None

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        known = {token_id: self.decode([token_id]) for token_id in set(token_ids)}
        return [known[token_id] for token_id in token_ids]

    def plain(self, text: str) -> str:
        """Return a text without special tokens."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def begin(self, messages: Sequence[Message], inputs: TemplateInputs) -> TokenIds:
        """Return the tokens of a conversation up to the response.

        Raises:
            RequestError: The template cannot show the conversation, or it is too long.
        """
        try:
            # Checks of the messages take long, so a conversation that is too long is refused first.
            rendered = text_renderer_for(self.tokenizer, inputs)(messages, inputs)
            [token_ids] = encode_each(lambda texts: self.tokenizer(list(texts))["input_ids"], [rendered], len)
            if len(token_ids) > self.max_tokens:
                raise self.too_long(len(token_ids), 1, "messages")
            return self.continuation.begin(messages, inputs).token_ids
        except (NoExtension, RecordError, RenderError) as error:
            raise RequestError(str(error), parameter="messages") from None

    def too_long(self, num_prompt: int, num_new: int, name: str) -> RequestError:
        """Return the error about a prompt in the parameter `name`."""
        message = (
            f"this model has a limit of {self.max_tokens:,} tokens (policy.max_total_sequence_length), and the request"
            f" asks for {num_prompt + num_new:,}: {num_prompt:,} of the {name} and {num_new:,} of the response"
            " (max_tokens)"
        )
        return RequestError(message, code="context_length_exceeded", parameter=name)


@dataclass(frozen=True)
class _Response:
    """A response with its prompt. `text` ends before the stop token or the stop string."""

    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: tuple[float, ...]
    text: str
    is_cut: bool
    sequence: GeneratedSequence


class Service:
    """Answers requests with the sequences of a generation engine."""

    def __init__(self, engine: GenerationEngine, model: ServedModel, rules: ServedRules):
        self._engine, self._model, self._rules = engine, model, rules
        self._started = int(time.time())

    def models(self) -> dict[str, Any]:
        """Return the list of models, with the sizes of the model's MoE layers."""
        model: dict[str, Any] = {
            "id": self._model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "nemo_rl_moe",
            "max_model_len": self._model.max_tokens,
        }
        if self._model.routes is not None:
            model["moe"] = self._model.routes.description
        return {"object": "list", "data": [model]}

    async def chat(self, body: object) -> dict[str, Any]:
        """Return the reply to a request for chat completions.

        Raises:
            RequestError: The request is malformed, too long, or asks for what the model cannot do.
        """
        request = self._rules.chat(body)
        chat, model = request.chat, self._model
        self._require_short(num_characters((chat.messages, chat.tools)), "messages")
        inputs = TemplateInputs(chat.tools or None, request.template_kwargs)
        prompt_ids = await asyncio.to_thread(model.begin, chat.messages, inputs)
        sampling = request.sampling
        if chat.max_tokens is None:
            room = max(1, model.max_tokens - len(prompt_ids))
            limit = min(sampling.parameters.max_new_tokens, room)
            sampling = replace(sampling, parameters=replace(sampling.parameters, max_new_tokens=limit))
        tail = model.decode(prompt_ids[-_TAIL_TOKENS:]).rstrip()
        found = await self._responses([prompt_ids], sampling, "messages")
        choices = [self._chat_choice(index, chat, tail, response) for index, response in enumerate(found)]
        await self._add_routes(choices, found, sampling)
        num_sampled = sum(len(response.token_ids) for response in found)
        return chat_reply(chat, choices, prompt_ids, num_sampled, name=_new_id("chatcmpl"), model=model.name)

    def _chat_choice(self, index: int, chat: ChatRequest, tail: str, response: _Response) -> dict[str, Any]:
        model = self._model
        read = read_turn(response.text, chat, model.tool_format, begins_in_thinking=tail.endswith(THINK_START))
        is_opened = model.thinking is not None and tail.endswith(model.thinking.start)
        read = without_thinking(read, model.thinking, is_opened=is_opened)
        message = message_of(replace(read, content=model.plain(read.content)), 0)
        return chat_choice(
            chat, message, response.token_ids, response.logprobs, model.decode, is_cut=response.is_cut, index=index
        )

    async def complete(self, body: object) -> dict[str, Any]:
        """Return the reply to a request for completions. Raises as `chat` does."""
        request = self._rules.completion(body)
        sampling, scores = request.sampling, request.echoes and request.wants_logprobs
        # An engine always samples one token. It is dropped if the request wants none.
        limit = max(1, sampling.parameters.max_new_tokens)
        prompts = await asyncio.to_thread(self._tokenized, request.prompts, limit)
        parameters = replace(sampling.parameters, scores_prompt=scores, max_new_tokens=limit)
        found = await self._responses(prompts, replace(sampling, parameters=parameters), "prompt")
        if sampling.parameters.max_new_tokens == 0:
            found = [_without_response(response) for response in found]
        choices = await asyncio.to_thread(self._completion_choices, found, request)
        await self._add_routes(choices, found, sampling)
        return {
            "id": _new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": choices,
            "usage": usage_of(sum(map(len, prompts)), sum(len(response.token_ids) for response in found)),
        }

    def _completion_choices(self, found: Sequence[_Response], request: ServedCompletion) -> list[dict[str, Any]]:
        choices = []
        for index, response in enumerate(found):
            before = self._model.decode(response.prompt_ids) if request.echoes else ""
            choices.append(
                {
                    "index": index,
                    "text": before + self._model.plain(response.text),
                    "finish_reason": "length" if response.is_cut else "stop",
                    "logprobs": self._completion_logprobs(response, echoes=request.echoes)
                    if request.wants_logprobs
                    else None,
                }
            )
        return choices

    def _completion_logprobs(self, response: _Response, *, echoes: bool) -> dict[str, Any]:
        """Return the log-probabilities of a choice in OpenAI's old form. The first token of a prompt has none."""
        texts_of = self._model.texts
        tokens = texts_of(response.token_ids)
        logprobs: list[float | None] = list(response.logprobs)
        top: list[dict[str, float] | None] = [
            {text: logprob} for text, logprob in zip(tokens, response.logprobs, strict=True)
        ]
        if echoes:
            scores = response.sequence.prompt_scores
            if scores is None:
                message = "logprobs: the engine gives no log-probabilities of a prompt; leave out echo or logprobs"
                raise RequestError(message, parameter="logprobs")
            texts = texts_of(response.prompt_ids)
            own, likeliest = [float(each) for each in scores.logprobs], texts_of(scores.top_ids.tolist())
            best = [float(each) for each in scores.top_logprobs]
            pairs = zip(likeliest, best, texts[1:], own, strict=True)
            tokens = [*texts, *tokens]
            logprobs = [None, *own, *logprobs]
            # Tokens with parts of characters may have the same text. Then the likeliest one is kept.
            top = [None, *({text: logprob} | {name: high} for name, high, text, logprob in pairs), *top]
        ends = np.cumsum([0, *map(len, tokens)])[:-1]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": ends.tolist()}

    async def _responses(self, prompts: Sequence[TokenIds], sampling: Sampling, name: str) -> list[_Response]:
        """Return the responses to each prompt, prompt after prompt.

        Args:
            name: Name of the parameter with the prompts.
        """
        parameters, model = sampling.parameters, self._model
        for prompt_ids in prompts:
            if len(prompt_ids) + parameters.max_new_tokens > model.max_tokens:
                raise model.too_long(len(prompt_ids), parameters.max_new_tokens, name)
            if (largest := max(prompt_ids)) >= model.vocabulary_size:
                message = f"{name}: got the token id {shown(largest)}, expected less than {model.vocabulary_size}"
                raise RequestError(message, parameter=name)
        first = secrets.randbits(63) if sampling.seed is None else sampling.seed
        number = len(prompts) * sampling.num_choices
        seeds = [first, *np.random.SeedSequence(first).generate_state(number - 1, np.uint64).tolist()]
        tasks = [
            asyncio.ensure_future(self._engine.generate(GenerationRequest(prompt_ids, seed, parameters)))
            for prompt_ids, seed in zip(
                (each for each in prompts for _ in range(sampling.num_choices)), seeds, strict=True
            )
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # of a client that has disconnected
                task.cancel()
        return [
            self._response(prompts[index // sampling.num_choices], sequence, parameters)
            for index, sequence in enumerate(found)
        ]

    def _response(self, prompt_ids: TokenIds, sequence: GeneratedSequence, how: SamplingParameters) -> _Response:
        token_ids = tuple(sequence.token_ids.tolist())
        is_stopped = bool(token_ids) and token_ids[-1] in how.stop_token_ids
        text = self._model.decode(token_ids[:-1] if is_stopped else token_ids)
        cuts = [place for stop in how.stop_strings if (place := text.find(stop)) >= 0]
        is_cut = sequence.is_truncated and not cuts
        logprobs = tuple(float(each) for each in sequence.logprobs)
        return _Response(prompt_ids, token_ids, logprobs, text[: min(cuts, default=len(text))], is_cut, sequence)

    async def _add_routes(
        self, choices: Sequence[dict[str, Any]], found: Sequence[_Response], sampling: Sampling
    ) -> None:
        """Add the routed experts to each choice if the request asks for them."""
        routes = self._model.routes
        if not sampling.wants_routes or routes is None:
            return
        for choice, response in zip(choices, found, strict=True):
            token_ids = (*response.prompt_ids, *response.token_ids)
            experts = await asyncio.to_thread(routes.experts, response.sequence.routed_experts, len(token_ids))
            choice["routed_experts"] = {
                "tokens": self._model.texts(token_ids),
                "num_prompt_tokens": len(response.prompt_ids),
                **routes.description,
                "experts": experts,
            }

    def _tokenized(self, prompts: Sequence[Prompt], num_new: int) -> list[TokenIds]:
        """Tokenize the prompts. The first one that leaves no room for `num_new` tokens ends it."""
        found = []
        for prompt in prompts:
            token_ids: Sequence[int] | str = prompt
            if isinstance(prompt, str):
                self._require_short(len(prompt), "prompt")
                [token_ids] = encode_each(lambda texts: self._model.tokenizer(list(texts))["input_ids"], [prompt], len)
            if isinstance(token_ids, str):
                raise RequestError(f"prompt: {token_ids}", parameter="prompt")
            if not token_ids:
                raise RequestError("prompt: got no token, expected at least one", parameter="prompt")
            if len(token_ids) + num_new > self._model.max_tokens:
                raise self._model.too_long(len(token_ids), num_new, "prompt")
            found.append(tuple(token_ids))
        return found

    def _require_short(self, length: int, name: str) -> None:
        """Refuse a text of so many characters that it cannot fit, because tokenizing it would take long."""
        if length > most_characters(self._model.max_tokens):
            message = (
                f"{name}: got {length:,} characters, which do not fit into {self._model.max_tokens:,} tokens"
                " (policy.max_total_sequence_length)"
            )
            raise RequestError(message, code="context_length_exceeded", parameter=name)


def _without_response(response: _Response) -> _Response:
    return replace(response, token_ids=(), logprobs=(), text="", is_cut=True)


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
