# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rendering by one chat template: the text of conversations and prompts, the form of their tool calls, and the spans to
train on."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nemo_rl_moe.data.left_out import (
    left_out_notes,
    read_keys,
    require_all_shown,
    with_thinking_apart,
    with_thinking_named,
)
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.template_names import names_read
from nemo_rl_moe.data.template_probes import (
    PROBE_CALL,
    PROBE_CALLS,
    PROBE_QUESTION,
    PROBE_REASON,
    PROBE_REASONED,
    PROBE_RESULT,
    PROBE_SHORT,
    PROBE_THOUGHT,
    PROBE_TOOL,
    PROBE_TURNS,
    PROBE_VALUE,
    PROBED,
    PROBES,
)
from nemo_rl_moe.data.tool_call_forms import FORMS, ToolCallForm, best_form, note_on_calls
from nemo_rl_moe.data.turn_ends import UNTRAINED_END, close_turns, end_of, leaves_out_end
from nemo_rl_moe.data.turn_spans import UNPROMPTED, RenderError, Span, common_start, trained_spans, turn_spans
from nemo_rl_moe.errors import LONGEST_LINE, one_line

_SHOWS_NO_TEXTS = (
    "the chat template shows no content that is a text; set policy.tokenizer.chat_template to a template that does"
)
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class TemplateSetup:
    """A chat template with the special tokens of its tokenizer.

    Attributes:
        names: Name -> special token, such as `eos_token`. May also have the run's variables for the template.
        stop_texts: Texts of the tokens that end the model's turns.
    """

    template: str
    names: Mapping[str, Any]
    stop_texts: tuple[str, ...]
    special_tokens: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, with the spans of its pieces to train on."""

    text: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


class TemplateRenderer:
    """Renders one chat template, in Jinja's sandbox."""

    def __init__(self, setup: TemplateSetup):
        self._setup = setup
        self._has_tags = _GENERATION_TAG.search(setup.template) is not None
        self._complete_forms: list[ToolCallForm] | None = None
        self._ends: dict[bool, str] = {}
        self._thinking_keys = read_keys(setup.template)
        self.names = names_read(setup.template)

    def render(
        self,
        given: Sequence[Message],
        given_tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        trained: Collection[int] | None,
    ) -> Rendered:
        """Render a prompt, or a conversation with its spans to train on.

        Args:
            trained: Indices of the assistant turns to train on. None for a prompt, which ends with the generation
                prompt.

        Raises:
            RenderError: The template refuses the conversation or drops a part of it, or turns cannot be separated.
        """
        messages = self._with_thinking_named(given)
        tools = list(given_tools) if given_tools else None
        is_prompt = trained is None

        def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
            return self._render(messages, tools, kwargs, add_generation_prompt)[0]

        def render_variant(messages: Sequence[Message]) -> str:
            return render(messages, is_prompt)

        form, note = self._form_of(messages, render_variant)
        messages = form.of_all(messages)
        spans: list[Span] = []
        notes: list[str] = []
        if not is_prompt and self._has_tags:
            text, spans = self._render(messages, tools, kwargs, False, with_spans=True)
            spans = trained_spans(spans, messages, trained or ())
        else:
            text = render(messages, is_prompt)
        if not self._shows_texts:
            raise RenderError(_SHOWS_NO_TEXTS)
        require_all_shown(messages, text, render_variant)
        shown = text
        if tools and self._needs_no_tools(messages, kwargs, text, is_prompt=is_prompt):
            raise RenderError(
                "there are definitions of tools, and the chat template shows none of them; set "
                "policy.tokenizer.chat_template to a template that does, or leave tools out"
            )
        if not is_prompt and not self._has_tags:
            stop_texts, special_tokens = self._setup.stop_texts, self._setup.special_tokens
            found = turn_spans(messages, trained or (), text, render, special_tokens, self.opening)
            has_calls = bool(messages[-1].get("tool_calls"))
            if messages[-1]["role"] == "assistant":
                text = text.removesuffix(self._opened_behind_the_last)
            text, spans = close_turns(text, found.spans, stop_texts, lambda: self.end_of_turn(with_calls=has_calls))
            notes += [UNPROMPTED] if found.unprompted else []
        notes += [*left_out_notes(messages, shown, spans, render_variant), *([] if note is None else [note])]
        # Not an error, since the author of the template's tags decides what they contain.
        if self._has_tags and any(leaves_out_end(text, span, self._setup.stop_texts) for span in spans):
            notes.append(UNTRAINED_END)
        return Rendered(text, tuple(spans), tuple(notes))

    def prompt_text(
        self,
        given: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text of a prompt with the generation prompt. Does not check that the template shows all of the
        prompt."""
        return self._in_best_form(self._with_thinking_named(given), tools or None, kwargs, True)

    @property
    def template(self) -> str:
        return self._setup.template

    def renders_as(self, other: "TemplateRenderer") -> bool:
        """Return whether another template gives the same texts for all of `PROBES`, except probes with calls that this
        template refuses."""
        for turns in PROBES:
            try:
                own = self._probed(turns)
            except RenderError:
                if not any("tool_calls" in turn for turn in turns):
                    return False
                continue
            try:
                if own != other._probed(turns):
                    return False
            except RenderError:
                return False
        return True

    def end_of_turn(self, *, with_calls: bool) -> str:
        """Return the stop token at which generation ends a turn, or an empty text if the template writes no stop token
        there."""
        turn, follower = (PROBE_CALL, PROBE_RESULT) if with_calls else (PROBE_SHORT, PROBE_QUESTION)
        if with_calls not in self._ends:
            try:
                own, followed = (
                    self._probed(turns).rpartition(PROBE_VALUE)[2]
                    for turns in ((PROBE_QUESTION, turn), (PROBE_QUESTION, turn, follower))
                )
                self._ends[with_calls] = end_of(own, followed, self._setup.stop_texts)
            except RenderError:
                self._ends[with_calls] = ""
        return self._ends[with_calls]

    def stops_inside_turns(self) -> frozenset[str]:
        """Return the stop tokens that the template also writes inside a turn of the model, before its last words."""
        found: set[str] = set()
        for turn in (with_thinking_named(PROBE_REASONED, self._thinking_keys), PROBE_CALL, PROBE_CALLS):
            try:
                prompt, text = self._probed((PROBE_QUESTION,), turn), self._probed((PROBE_QUESTION, turn))
            except RenderError:
                continue
            before = text.removeprefix(common_start(prompt, text)).rpartition(PROBE_VALUE)[0]
            found |= {stop for stop in self._setup.stop_texts if stop and stop in before}
        return frozenset(found)

    def around_thinking(self) -> tuple[str, str]:
        """Return the texts before and after a turn's thinking in a rendering. Both are empty if the template shows no
        thinking."""
        try:
            text = self._probed((PROBE_QUESTION, with_thinking_named(PROBE_REASONED, self._thinking_keys)))
        except RenderError:
            return "", ""
        before, found, behind = text.rpartition(PROBE_REASON)
        return (before, behind) if found else ("", "")

    @cached_property
    def opening(self) -> str:
        """The generation prompt after a question. Empty if it cannot be found."""
        try:
            prompt, text = (self._render([PROBE_QUESTION], None, {}, is_prompt)[0] for is_prompt in (True, False))
        except RenderError:
            return ""
        return prompt[len(text) :] if prompt.startswith(text) else ""

    @cached_property
    def _opened_behind_the_last(self) -> str:
        """The header of a next turn, if the template always writes such a header after the last turn, else an empty
        text."""
        stops = self._setup.stop_texts
        try:
            own = self._probed((PROBE_QUESTION, PROBE_SHORT)).rpartition(PROBE_VALUE)[2]
        except RenderError:
            return ""
        end = end_of(own, "", stops)
        behind = own.partition(end)[2] if end else ""
        others = (token for token in self._setup.special_tokens if token not in stops)
        return behind if any(token in behind for token in others) else ""

    def _needs_no_tools(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], text: str, *, is_prompt: bool
    ) -> bool:
        """Return whether a conversation's text is the same without definitions of tools."""
        try:
            return self._render(messages, None, kwargs, is_prompt)[0] == text
        except RenderError:  # the template needs tools
            return False

    def _with_thinking_named(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with their thinking under the key that the template reads."""
        named = [with_thinking_named(message, self._thinking_keys) for message in messages]
        if not self._shows_blocks_as_they_are:
            return named
        return [with_thinking_apart(message, self._thinking_keys[0]) for message in named]

    @cached_property
    def _shows_texts(self) -> bool:
        """Whether the template shows a message's content if it is a text. Some templates only accept lists of parts."""
        question = {**PROBE_QUESTION, "content": PROBE_VALUE}
        try:
            return PROBE_VALUE in self._render([question], None, {}, True)[0]
        except RenderError:  # the template may refuse only this conversation
            return True

    @cached_property
    def _shows_blocks_as_they_are(self) -> bool:
        """Whether the template reads thinking from a key, and treats a think block in the content as a part of
        the answer."""
        if not self._thinking_keys:
            return False
        try:
            shown, named = (
                self._render([PROBE_QUESTION, turn], None, {}, False)[0]
                for turn in (PROBE_THOUGHT, with_thinking_apart(PROBE_THOUGHT, self._thinking_keys[0]))
            )
        except RenderError:
            return False
        before, found, _ = shown.partition(PROBE_THOUGHT["content"])
        own, is_shown, _ = named.partition(PROBE_REASON)
        # The content comes after a think block of the template, or the template has other marks for thinking.
        return bool(found) and (
            before.rstrip().endswith("</think>") or bool(is_shown and not own.rstrip().endswith("<think>"))
        )

    def _probed(self, turns: Sequence[Message], follower: Message = PROBE_SHORT) -> str:
        """Return the text of turns. The definition of a tool is added if they, or the turn that will follow them, call
        a tool."""
        is_prompt = turns[-1]["role"] != "assistant"
        tools = [PROBE_TOOL] if any("tool_calls" in turn for turn in (*turns, follower)) else None
        return self._in_best_form(turns, tools, {}, is_prompt)

    def _in_best_form(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, tools, kwargs, add_generation_prompt)[0]

        form, _ = self._form_of(messages, render)
        return render(form.of_all(messages))

    def _form_of(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> tuple[ToolCallForm, str | None]:
        """Return the form in which the template shows a conversation's tool calls best, and a note on the parts of
        calls that it drops."""
        # If the template shows the probe's call completely, it shows all calls. Otherwise each conversation is checked,
        # because the template may be made for one tool.
        if not any(message.get("tool_calls") for message in messages):
            return FORMS[0], None
        if self._complete_forms is None:
            self._complete_forms = [form for form in FORMS if self._shows_whole_calls(form)]
        return (self._complete_forms[0], None) if self._complete_forms else best_form(messages, render)

    def _shows_whole_calls(self, form: ToolCallForm) -> bool:
        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, [PROBE_TOOL], {}, False)[0]

        try:
            text, note = render(form.of_all(PROBE_TURNS)), note_on_calls(PROBE_TURNS, form, render)
        except RenderError:
            return False
        # "None" is how Python would write a content that is null.
        return note is None and all(part in text for part in PROBED) and "None" not in text

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        with_spans: bool = False,
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError

        # `apply_chat_template(return_assistant_tokens_mask=True)` marks everything up to the end of the text if a turn
        # ends in a character that has no token for itself. The spans of `render_jinja_template` are correct.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self._setup.template,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=add_generation_prompt,
                **{**self._setup.names, **kwargs},
            )
        except Exception as error:  # a template may raise any error
            reason = str(error) if isinstance(error, TemplateError) else one_line(error)
            raise RenderError(f"the chat template refuses the conversation: {reason[:LONGEST_LINE]}") from None
        return texts[0], spans[0] if with_spans else []
