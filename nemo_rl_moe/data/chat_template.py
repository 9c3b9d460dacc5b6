# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rendering of conversations and prompts for a tokenizer: by its chat template or, without a template, by joining
texts."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.cures import Cures, Request
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import Example
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.template_renderer import Rendered, TemplateRenderer, TemplateSetup
from nemo_rl_moe.data.turn_spans import RenderError
from nemo_rl_moe.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Renderer = Callable[[Sequence[Example]], list[Rendered | str]]
"""A function that returns the text of each conversation with its pieces to train on, or the problem with the
conversation."""
PromptRenderer = Callable[[Sequence[PromptRecord]], list[Rendered | str]]
"""A function that returns the text of each prompt, or the problem with the prompt."""
TextRenderer = Callable[[Sequence[Message], TemplateInputs], str]
"""A function that returns the text of messages with the generation prompt. Raises `RenderError`."""
_TOO_DEEP = "the conversation is nested too deeply"


def renderer_for(
    tokenizer: "PreTrainedTokenizerBase",
    run_wide: TemplateInputs = NO_INPUTS,
    stop_texts: Sequence[str] | None = None,
) -> Renderer:
    """Make the function that renders conversations for this tokenizer.

    - A chat template with `{% generation %}` tags marks the assistant's text itself.
    - With any other chat template the conversation is rendered up to each assistant turn, and the texts are compared.
    - Without a chat template a prompt and a completion that are strings are joined, and the end token is added.

    `stop_texts` are the tokens that end the model's turns, by default the tokenizer's end token.
    """
    if not tokenizer.chat_template:
        return _plain_renderer(tokenizer, run_wide, _stops(tokenizer, stop_texts))
    template = _Template(tokenizer, run_wide, stop_texts)
    return lambda examples: [template.render(example, example.trained_messages) for example in examples]


def prompt_renderer_for(tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs = NO_INPUTS) -> PromptRenderer:
    """Return a function that renders prompts, in the same way as `renderer_for` renders the same turns for training.

    With a chat template, the text ends with the generation prompt. Without a template, a prompt must be a string, and
    the begin token precedes it if the tokenizer begins every text with that token.
    """
    if tokenizer.chat_template:
        template = _Template(tokenizer, run_wide)
        return lambda prompts: [template.render(prompt, None) for prompt in prompts]
    start = _opening(tokenizer)
    _require_no_tools(run_wide)

    def render(prompt: PromptRecord) -> Rendered | str:
        if not prompt.is_text or prompt.inputs.has_tools or prompt.images:
            return _needs_template(prompt, "the prompt is a list of messages", "the prompt as a string")
        return Rendered(f"{start}{prompt.messages[0]['content']}", ())

    return lambda prompts: [render(prompt) for prompt in prompts]


def text_renderer_for(tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs = NO_INPUTS) -> TextRenderer:
    """Return a function that renders messages by the chat template. It does not check that the template shows all of
    them."""
    return _Template(tokenizer, run_wide).prompt_text


class _Template:
    """A tokenizer's chat template. Some tokenizers have a second template for conversations with tools."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        run_wide: TemplateInputs,
        stop_texts: Sequence[str] | None = None,
    ):
        self._run_wide = run_wide
        setups = [template_setup(tokenizer, with_tools=tools, stop_texts=stop_texts) for tools in (False, True)]
        self._without_tools = TemplateRenderer(setups[0])
        self._with_tools = self._without_tools if setups[0] == setups[1] else TemplateRenderer(setups[1])
        for renderer in (self._without_tools, self._with_tools):
            _require_read(run_wide, tuple(renderer.names))
        self._cures = {
            renderer: Cures(renderer.names, setups[0].names, partial(_render_request, renderer))
            for renderer in (self._without_tools, self._with_tools)
        }

    def render(self, record: Example | PromptRecord, trained: Collection[int] | None) -> Rendered | str:
        """Return the rendering of a conversation, or of a prompt if `trained` is None, or return the problem with the
        record."""
        try:
            inputs = record.inputs.or_else(self._run_wide)
            request = Request(record.messages, inputs.tools, inputs.kwargs, trained)
            renderer = self._renderer_of(inputs)
            try:
                return _render_request(renderer, request)
            except RenderError as error:
                return f"{error}{self._cures[renderer].advice(str(error), request)}"
        except RecordError as error:
            return str(error)
        except RecursionError:
            return _TOO_DEEP

    def prompt_text(self, messages: Sequence[Message], given: TemplateInputs) -> str:
        """Return the text of messages with the generation prompt. Does not check that the template shows all of
        them."""
        inputs = given.or_else(self._run_wide)
        try:
            return self._renderer_of(inputs).prompt_text(messages, inputs.tools, inputs.kwargs)
        except RecursionError:
            raise RenderError(_TOO_DEEP) from None

    def _renderer_of(self, inputs: TemplateInputs) -> TemplateRenderer:
        return self._with_tools if inputs.tools else self._without_tools


def _render_request(renderer: TemplateRenderer, request: Request) -> Rendered:
    return renderer.render(request.messages, request.tools, request.kwargs, trained=request.trained)


def template_setup(
    tokenizer: "PreTrainedTokenizerBase", *, with_tools: bool, stop_texts: Sequence[str] | None = None
) -> TemplateSetup:
    """Return the chat template with the special tokens that it reads. `stop_texts` are as in `renderer_for`."""
    try:
        template = tokenizer.get_chat_template(tools=[] if with_tools else None)
    except ValueError as error:
        raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from None
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    special = (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens)
    return TemplateSetup(template, names, _stops(tokenizer, stop_texts), tuple(dict.fromkeys(map(str, special))))


def _stops(tokenizer: "PreTrainedTokenizerBase", stop_texts: Sequence[str] | None) -> tuple[str, ...]:
    if stop_texts is not None:
        return tuple(stop_texts)
    return () if tokenizer.eos_token is None else (str(tokenizer.eos_token),)


def _require_read(run_wide: TemplateInputs, variables: Sequence[str]) -> None:
    for name in run_wide.kwargs:
        if name not in variables:
            raise ConfigurationError(
                f"data.chat_template_kwargs.{name}: the chat template reads no such name; it reads "
                f"{', '.join(variables) or 'none'}{did_you_mean(nearest(name, variables))}"
            )


def _opening(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the begin token if the tokenizer begins every text with it, else an empty text."""
    opens = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if opens else ""


def _require_no_tools(run_wide: TemplateInputs) -> None:
    if run_wide.tools or run_wide.kwargs:
        key = "tools" if run_wide.tools else "chat_template_kwargs"
        raise ConfigurationError(
            f"data.{key}: the tokenizer has no chat template that could show them; set policy.tokenizer.chat_template"
        )


def _needs_template(record: Example | PromptRecord, form: str, plain: str) -> str:
    reason = "there are images" if record.images else "there are tools" if record.inputs.has_tools else form
    return f"{reason}, but the tokenizer has no chat template; set policy.tokenizer.chat_template, or give {plain}"


def _plain_renderer(
    tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs, stop_texts: Sequence[str]
) -> Renderer:
    if not stop_texts:
        raise DataError("the tokenizer has neither a chat template nor an end token: an answer would never end")
    _require_no_tools(run_wide)
    start = _opening(tokenizer)
    end = stop_texts[0]

    def render(example: Example) -> Rendered | str:
        if example.plain is None or example.inputs.has_tools or example.images:
            return _needs_template(example, "the example is a conversation", "prompt and completion as strings")
        prompt, completion = example.plain
        text = f"{start}{prompt}{completion}{end}"
        return Rendered(text, ((len(start) + len(prompt), len(text)),))

    return lambda examples: [render(example) for example in examples]
