# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rendering of conversations by a chat template, with the spans of characters that the assistant wrote."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.data.records import Example, Message
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
RenderMessages = Callable[[Sequence[Message], bool], str]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_STAND_IN = "\u27e6assistant turn\u27e7"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: The whole conversation, special tokens spelled out.
        spans: First character and the one after the last of each piece to train on.
    """

    text: str
    spans: tuple[Span, ...]


class RenderError(ValueError):
    """A conversation cannot be rendered; the message is the reason, without the place."""


Renderer = Callable[[Example], Rendered]


def renderer_for(tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    """Makes the function that renders conversations for this tokenizer.

    - A chat template with `{% generation %}` tags says itself what the assistant wrote.
    - With any other chat template the conversation is rendered up to each assistant turn, and the texts are compared.
    - Without a chat template a prompt and a completion that are strings are joined, and the end token is added.

    The returned function raises `RenderError` for a conversation that cannot be rendered.

    Raises:
        DataError: The tokenizer has neither a usable chat template nor an end token.
    """
    if not tokenizer.chat_template:
        return _plain_renderer(tokenizer)
    template, special_tokens = _chosen_template(tokenizer)
    if _GENERATION_TAG.search(template):
        return lambda example: _render_with_tags(example, template, special_tokens)

    def render_messages(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return _render(messages, template, special_tokens, add_generation_prompt, with_spans=False)[0]

    end_token = str(tokenizer.eos_token or "")
    return lambda example: _render_by_prefixes(example, render_messages, end_token)


PromptRenderer = Callable[[Sequence[Message], bool], str]
"""From messages, and whether the user wrote them as a text, to the text that the model answers."""


def prompt_renderer_for(tokenizer: "PreTrainedTokenizerBase") -> PromptRenderer:
    """Makes the function that renders prompts as `renderer_for` renders the same turns in training.

    With a chat template the messages end in what opens the assistant's turn. Without one, a prompt that is a text is
    taken as it is, after the begin token where the tokenizer opens every text with it.

    The returned function raises `RenderError` for a prompt that cannot be rendered.

    Raises:
        DataError: The tokenizer's chat template cannot be used.
    """
    if tokenizer.chat_template:
        template, special_tokens = _chosen_template(tokenizer)
        return lambda messages, _: _render(
            messages, template, special_tokens, add_generation_prompt=True, with_spans=False
        )[0]
    start = _opening(tokenizer)

    def render(messages: Sequence[Message], is_text: bool) -> str:
        if not is_text:
            raise RenderError(
                "the prompt is a list of messages, but the tokenizer has no chat template; "
                "set policy.tokenizer.chat_template, or give the prompt as a string"
            )
        return f"{start}{messages[0]['content']}"

    return render


def _chosen_template(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, dict[str, str]]:
    """The chat template, and the special tokens that it may name."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from None
    _require_valid_jinja(template)
    return template, dict(tokenizer.special_tokens_map)


def _opening(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The begin token of a tokenizer that opens every text with it."""
    opens = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if opens else ""


def _plain_renderer(tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    if tokenizer.eos_token is None:
        raise DataError("the tokenizer has neither a chat template nor an end token: an answer would never end")
    start = _opening(tokenizer)
    end = str(tokenizer.eos_token)

    def render(example: Example) -> Rendered:
        if example.plain is None:
            raise RenderError(
                "the example is a conversation, but the tokenizer has no chat template; "
                "set policy.tokenizer.chat_template, or give prompt and completion as strings"
            )
        prompt, completion = example.plain
        text = f"{start}{prompt}{completion}{end}"
        return Rendered(text, ((len(start) + len(prompt), len(text)),))

    return render


def _require_valid_jinja(template: str) -> None:
    """Rejects a template that does not parse once, rather than with every line of the data."""
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "a"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
    except TemplateError:
        pass  # it wants something that this conversation lacks; the real ones may have it


def _render(
    messages: Sequence[Message],
    template: str,
    special_tokens: dict[str, str],
    add_generation_prompt: bool,
    with_spans: bool,
) -> tuple[str, list[Span]]:
    # `apply_chat_template(return_assistant_tokens_mask=True)` would do for the tags, but it marks everything up to the
    # end of the text where a turn ends in a character without a token of its own: take the spans, not its mask.
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=with_spans,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise RenderError(f"the chat template refuses the conversation: {error}") from None
    return texts[0], spans[0] if with_spans else []


def _render_with_tags(example: Example, template: str, special_tokens: dict[str, str]) -> Rendered:
    text, spans = _render(example.messages, template, special_tokens, add_generation_prompt=False, with_spans=True)
    context = example.messages[: example.first_trained_message]
    num_context_turns = sum(message["role"] == "assistant" for message in context)
    num_turns = sum(message["role"] == "assistant" for message in example.messages)
    if num_context_turns and len(spans) != num_turns:
        raise RenderError(
            f"the chat template marks {len(spans)} pieces in {num_turns} assistant turns, "
            "so that those of the prompt cannot be told from those of the completion"
        )
    return Rendered(text, tuple(spans[num_context_turns:]))


def _render_by_prefixes(example: Example, render: RenderMessages, end_token: str) -> Rendered:
    messages = example.messages
    text = render(messages, False)
    spans: list[Span] = []
    for index in range(example.first_trained_message, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = render(messages[:index], True)
        if not text.startswith(before):
            raise _unstable(index, "what stands before it is rendered in another way once it follows")
        end = len(text) if index + 1 == len(messages) else _end_of_turn(messages, index, text, render)
        spans.append((len(before), _without_trailing_space(text, len(before), end, end_token)))
    return Rendered(text, tuple(spans))


def _end_of_turn(messages: Sequence[Message], index: int, text: str, render: RenderMessages) -> int:
    """End in `text` of the turn at `index`, its end-of-turn token included."""
    up_to_turn = render(messages[: index + 1], False)
    if text.startswith(up_to_turn):
        return len(up_to_turn)
    # Some templates (Qwen3's) render the last turn in another way than earlier ones. Put a stand-in for the turn's
    # text: what follows the stand-in when the turn is the last one is its ending, what follows it in the whole
    # conversation tells where the turn's text ends.
    stand_in = {**messages[index], "content": _STAND_IN}
    whole = render([*messages[:index], stand_in, *messages[index + 1 :]], False)
    head, found, tail = whole.partition(_STAND_IN)
    _, found_as_last, ending = render([*messages[:index], stand_in], False).partition(_STAND_IN)
    if not (found and found_as_last and text.startswith(head) and text.endswith(tail) and tail.startswith(ending)):
        raise _unstable(index, "it is rendered in another way once further turns follow")
    return len(text) - len(tail) + len(ending)


def _without_trailing_space(text: str, start: int, end: int, end_token: str) -> int:
    """Leaves out a newline after the end token: generation stops before it."""
    stripped = text[start:end].rstrip()
    return start + len(stripped) if end_token and stripped.endswith(end_token) else end


def _unstable(index: int, what: str) -> RenderError:
    return RenderError(
        f"the tokens of turn {index} cannot be told from the rest: with this chat template {what}; "
        "set policy.tokenizer.chat_template to a template with {% generation %} tags"
    )
