# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats that vLLM's parsers read, `vllm:NAME`, if vLLM is installed."""

import logging
import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.thinking import THINK_END, THINK_START
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.tools.formats.interface import MalformedCall, ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, arguments_of, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "vllm:"
_THOUGHT = re.compile(rf"\s*{THINK_START}(?s:.*?)(?:{THINK_END}|\Z)")


def vllm_format(key: str, name: str, tokenizer: "PreTrainedTokenizerBase", example: str) -> ToolFormat:
    """Return the format that a parser of vLLM reads. `name` is a name such as `vllm:hermes`, the value of the
    configuration's `key`."""
    if find_spec("vllm") is None:
        raise ConfigurationError(
            f"{key}: {name} needs vLLM, which is not installed; install it with make vllm (on GPUs make gpu), or name a"
            " format without vllm:"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigurationError(f"{key}: {name}: vLLM's parsers cannot be imported: {one_line(error)}") from error
    for package in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(package).setLevel(logging.CRITICAL + 1)  # vLLM's parsers log each text without a call
    parser_name, known = name.removeprefix(PREFIX), ToolParserManager.list_registered()
    if parser_name not in known:
        hint = did_you_mean(nearest(parser_name, known))
        raise ConfigurationError(f"{key}: got {name!r}, expected {PREFIX} and one of {', '.join(known)}{hint}")
    try:
        parser = ToolParserManager.get_tool_parser(parser_name)
    except ImportError as error:
        raise ConfigurationError(f"{key}: {name}: the parser cannot be imported: {one_line(error)}") from error
    # A cached tokenizer, because a parser looks up its marks in the vocabulary, which would be rebuilt each time.
    parse = _Parser(parser, get_cached_tokenizer(tokenizer))
    try:
        parse.new(())
    except Exception as error:
        raise ConfigurationError(
            f"{key}: {name}: the parser does not take the run's tokenizer: {one_line(error)}"
        ) from error
    return ToolFormat(parse, example)


class _Parser:
    """A parser of vLLM as a function of text and schemas. A new instance parses each text, as for requests in vLLM."""

    def __init__(self, parser: Any, tokenizer: Any):
        self._parser, self._tokenizer = parser, tokenizer

    def new(self, tools: Any) -> Any:
        return self._parser(self._tokenizer, list(tools))

    def __call__(self, text: str, schemas: Schemas) -> list[ParsedCall]:
        thought = _THOUGHT.match(text)
        try:
            found = self._found(text if thought is None else text[thought.end() :], schemas)
        except Exception as error:
            return [MalformedCall(f"the parser cannot read it: {one_line(error)}")]
        return [_call(each.function) for each in found]

    def _found(self, text: str, schemas: Schemas) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        functions = [
            {"name": name, "parameters": {"type": "object", "properties": dict(properties)}}
            for name, properties in schemas.items()
        ]
        tools = [
            ChatCompletionToolsParam.model_validate({"type": "function", "function": function})
            for function in functions
        ]
        request = ChatCompletionRequest(model="", messages=[], tools=tools or None)
        return self.new(tools).extract_tool_calls(text, request).tool_calls


def _call(function: Any) -> ParsedCall:
    try:
        if not function.name:
            raise CallProblem("the call has no name of a tool")
        value, _ = read_json(function.arguments, 0)
        return ToolCall(function.name, arguments_of(value))
    except CallProblem as problem:
        return MalformedCall(str(problem))
