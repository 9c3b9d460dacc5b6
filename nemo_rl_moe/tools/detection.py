# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Detection of a chat template's format of tool calls: a known call is rendered, and parsed in each format."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import described, import_attribute, is_custom, with_colon
from nemo_rl_moe.data.chat_template import TextRenderer, text_renderer_for
from nemo_rl_moe.data.continuation import Continuation, SampledTurn
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.thinking import THINK_END, THINK_START
from nemo_rl_moe.data.turn_glue import NoExtension, Rewritten
from nemo_rl_moe.data.turn_spans import RenderError, common_start
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.tools.formats.interface import ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from nemo_rl_moe.tools.formats.vllm_parsers import PREFIX, vllm_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_KEY = "env.driver.format"
_EXPECTED = f"one of {', '.join(TOOL_FORMATS)}, {PREFIX} and the name of a parser of vLLM, or package.module:FORMAT"
_NO_TEMPLATE = (
    "env.driver: the tokenizer has no chat template that could show tools; set policy.tokenizer.chat_template"
)
_QUESTION: Message = {"role": "user", "content": "a"}
_RESULT = "result-qx7"
_CALL_ID = "abcdefghi"  # some templates require ids of nine letters and digits
_KNOWN = ToolCall("probe_tool", {"text": "two words", "count": 3})
_PROPERTIES = {"text": {"type": "string", "description": "a"}, "count": {"type": "integer", "description": "b"}}
_DEFINITION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _KNOWN.name,
        "description": "c",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["text", "count"]},
    },
}


def format_of(tokenizer: "PreTrainedTokenizerBase", name: str | None, run_wide: TemplateInputs) -> ToolFormat:
    """Return the format in which a model writes calls: the format `name` or, if it is None, the format of the chat
    template."""
    named = None if name is None or name.startswith(PREFIX) else _named(name)
    if not tokenizer.chat_template:
        raise ConfigurationError(_NO_TEMPLATE)
    if named is not None:
        return named
    if name is not None and (known := TOOL_FORMATS.get(name.removeprefix(PREFIX))) is not None:
        return vllm_format(FORMAT_KEY, name, tokenizer, known.example)
    rendered = _rendered_call(text_renderer_for(tokenizer, TemplateInputs(kwargs=run_wide.kwargs)))
    if name is not None:
        turn = rendered.partition(tokenizer.eos_token)[0] if tokenizer.eos_token else rendered
        return vllm_format(FORMAT_KEY, name, tokenizer, turn.strip().replace(_KNOWN.name, "tool"))
    schemas = {_KNOWN.name: _PROPERTIES}
    for tool_format in TOOL_FORMATS.values():
        if _has_its_marks(rendered, tool_format) and tool_format.calls(rendered, schemas) == [_KNOWN]:
            return tool_format
    raise ConfigurationError(
        f"{FORMAT_KEY}: null, and the chat template writes calls in no known format: {rendered[:200]!r}; expected"
        f" {_EXPECTED}"
    )


def require_definitions(tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs) -> None:
    """Check that the chat template renders the definitions of tools. Raises `ConfigurationError` if not."""
    if not tokenizer.chat_template:
        raise ConfigurationError(_NO_TEMPLATE)
    render = text_renderer_for(tokenizer, TemplateInputs(kwargs=run_wide.kwargs))
    try:
        with_tools = render([_QUESTION], TemplateInputs(tools=(_DEFINITION,)))
        without = render([_QUESTION], NO_INPUTS)
    except RenderError as error:
        raise ConfigurationError(f"env.driver: the chat template refuses a question with tools: {error}") from None
    if with_tools == without:
        raise ConfigurationError(
            "env.driver: the chat template shows no definitions of tools; set policy.tokenizer.chat_template to a"
            " template that shows them"
        )


def calls_line(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return a line for the user on a model's format of tool calls, or None if its template shows no tools."""
    try:
        require_definitions(tokenizer, NO_INPUTS)
    except (ConfigurationError, DataError):
        return None
    try:
        found = format_of(tokenizer, None, NO_INPUTS)
    except ConfigurationError:
        return f"tool calls: the chat template writes them in an unknown format; set {FORMAT_KEY}"
    return f"tool calls: {next(name for name, known in TOOL_FORMATS.items() if known is found)} ({FORMAT_KEY})"


def require_continuable(
    continuation: Continuation, tool_format: ToolFormat, encode: Callable[[str], Sequence[int]], stops: Sequence[int]
) -> None:
    """Check that the chat template can show results after a turn with calls, at least if all turns are rendered anew.

    Raises:
        ConfigurationError: The results cannot be shown.
    """
    written = list(encode(tool_format.example))
    ends = [[]] if written[-1] in stops else [[stop] for stop in stops] or [[]]
    problem: NoExtension | None = None
    for end in ends:
        try:
            _extend_or_begin_anew(continuation, SampledTurn((_QUESTION,), [*written, *end], stops))
        except NoExtension as error:
            problem = problem or error
        else:
            return
    raise ConfigurationError(
        f"env.driver: no result of a tool can follow a call: {problem}; expected a policy.tokenizer.chat_template that"
        " shows results, and the token that ends a call in policy.generation.stop_token_ids"
    )


def _extend_or_begin_anew(continuation: Continuation, turn: SampledTurn) -> None:
    results = [_result_of("tool")]
    try:
        continuation.extend(turn, results)
    except Rewritten:
        continuation.begin_anew(turn, results, len(turn.before))


def _result_of(name: str) -> Message:
    return {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": _RESULT}


def _named(name: str) -> ToolFormat:
    if not is_custom(name):
        if name not in TOOL_FORMATS:
            hint = did_you_mean(with_colon(name) or nearest(name, TOOL_FORMATS))
            raise ConfigurationError(f"{FORMAT_KEY}: got {name!r}, expected {_EXPECTED}{hint}")
        return TOOL_FORMATS[name]
    found = import_attribute(FORMAT_KEY, name, form="package.module:FORMAT")
    if not isinstance(found, ToolFormat):
        raise ConfigurationError(f"{FORMAT_KEY}: {name} is {described(found)}, expected a ToolFormat")
    return found


def _has_its_marks(rendered: str, tool_format: ToolFormat) -> bool:
    """Return whether a rendering has the format's mark around calls. Parsing is not enough, because a format may also
    read calls within another format's marks."""
    mark = tool_format.mark
    return mark in rendered if len(mark) > 1 else rendered.lstrip().startswith(mark)


def _rendered_call(render: TextRenderer) -> str:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _KNOWN.name, "arguments": dict(_KNOWN.arguments)}}
    turns: Sequence[Message] = (
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        _result_of(_KNOWN.name),
    )
    inputs = TemplateInputs(tools=(_DEFINITION,))
    try:
        prompt, whole = render([_QUESTION], inputs), render(turns, inputs)
    except RenderError as error:
        raise ConfigurationError(
            f"env.driver: the chat template cannot render a tool call and its result: {error}"
        ) from error
    # The generation prompt may open a think block that the turn lacks.
    if prompt.rstrip().removesuffix(THINK_END).rstrip().endswith(THINK_START):
        prompt = prompt.rpartition(THINK_START)[0]
    return whole.removeprefix(common_start(prompt, whole)).partition(_RESULT)[0]
