# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rendering of conversations and prompts for a tokenizer: by its chat template, or joined where it has none."""

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
"""From conversations to their texts and the pieces to train on, or to what is wrong with each."""
PromptRenderer = Callable[[Sequence[PromptRecord]], list[Rendered | str]]
"""From prompts to the texts that the model answers, or to what is wrong with each."""
TextRenderer = Callable[[Sequence[Message], TemplateInputs], str]
"""From messages to their text with the generation prompt; raises `RenderError`."""
_TOO_DEEP = "the conversation is nested too deeply"


def renderer_for(
    tokenizer: "PreTrainedTokenizerBase",
    run_wide: TemplateInputs = NO_INPUTS,
    stop_texts: Sequence[str] | None = None,
) -> Renderer:
    """Make the function that renders conversations for this tokenizer.

    - A chat template with `{% generation %}` tags says itself what the assistant wrote.
    - With any other chat template the conversation is rendered up to each assistant turn, and the texts are compared.
    - Without a chat template a prompt and a completion that are strings are joined, and the end token is added.

    Args:
        stop_texts: Tokens that end the model's turns; None: the tokenizer's end token.
    """
    if not tokenizer.chat_template:
        return _plain_renderer(tokenizer, run_wide, _stops(tokenizer, stop_texts))
    template = _Template(tokenizer, run_wide, stop_texts)
    return lambda examples: [template.render(example, example.trained_messages) for example in examples]


def prompt_renderer_for(tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs = NO_INPUTS) -> PromptRenderer:
    """Make the function that renders prompts as `renderer_for` renders the same turns in training.

    With a chat template the messages end in what opens the assistant's turn. Without one, a prompt that is a text is
    taken as it is, after the begin token where the tokenizer opens every text with it.
    """
    if tokenizer.chat_template:
        template = _Template(tokenizer, run_wide)
        return lambda prompts: [template.render(prompt, None) for prompt in prompts]
    start = _opening(tokenizer)
    _require_no_tools(run_wide)

    def render(prompt: PromptRecord) -> Rendered | str:
        if not prompt.is_text or prompt.inputs.has_tools or prompt.images:
            what = "there are tools" if prompt.inputs.has_tools else "the prompt is a list of messages"
            what = "there are images" if prompt.images else what
            return (
                f"{what}, but the tokenizer has no chat template; "
                "set policy.tokenizer.chat_template, or give the prompt as a string"
            )
        return Rendered(f"{start}{prompt.messages[0]['content']}", ())

    return lambda prompts: [render(prompt) for prompt in prompts]


def text_renderer_for(tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs = NO_INPUTS) -> TextRenderer:
    """Make the function that renders as `prompt_renderer_for`, without its checks that all of a prompt is shown.

    Args:
        tokenizer: One with a chat template.
    """
    return _Template(tokenizer, run_wide).prompt_text


class _Template:
    """A tokenizer's chat template; some have a second one for conversations with tools."""

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
        """Render a conversation or a prompt, or return what is wrong with it.

        Args:
            trained: Assistant turns to train on; None: a prompt.
        """
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
        """Render messages with the generation prompt, without a check that all of them are shown."""
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
    """Return the chat template, and what it needs of the tokenizer.

    Args:
        stop_texts: Tokens that end the model's turns; None: the tokenizer's end token.
    """
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
    """Begin token of a tokenizer that begins every text with it."""
    opens = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if opens else ""


def _require_no_tools(run_wide: TemplateInputs) -> None:
    if run_wide.tools or run_wide.kwargs:
        key = "tools" if run_wide.tools else "chat_template_kwargs"
        raise ConfigurationError(
            f"data.{key}: the tokenizer has no chat template that could show them; set policy.tokenizer.chat_template"
        )


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
            what = "there are tools" if example.inputs.has_tools else "the example is a conversation"
            what = "there are images" if example.images else what
            return (
                f"{what}, but the tokenizer has no chat template; "
                "set policy.tokenizer.chat_template, or give prompt and completion as strings"
            )
        prompt, completion = example.plain
        text = f"{start}{prompt}{completion}{end}"
        return Rendered(text, ((len(start) + len(prompt), len(text)),))

    return lambda examples: [render(example) for example in examples]
