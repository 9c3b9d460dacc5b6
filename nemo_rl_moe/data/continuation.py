# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuation of a conversation after a sampled turn: tokens in, tokens out.

Sampled tokens are never rendered again, because the same text may be tokenized in another way. Instead, the
conversation is rendered with a stand-in for the sampled turn. The text after the end token of the stand-in consists of
the glue (the template's text between turns), the new messages and the next generation prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.chat_template import prompt_renderer_for, text_renderer_for
from nemo_rl_moe.data.control_tokens import ControlTokens, content_spans
from nemo_rl_moe.data.messages import Message, parse_messages
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.thinking import THINK_END, THINK_START
from nemo_rl_moe.data.tool_call_forms import not_shown
from nemo_rl_moe.data.turn_glue import (
    THOUGHT_MARK,
    Glue,
    GlueFinder,
    NoExtension,
    OtherEnd,
    Refusal,
    Rewritten,
    marked_and_shown,
    require_unchanged,
    stand_ins,
    with_calls,
)
from nemo_rl_moe.data.turn_spans import RenderError, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERING_ROLES = ("tool", "user", "system", "developer")
"""Roles of messages that may follow a sampled turn. Only the model writes the assistant's turns."""
_NO_TEMPLATE = "the tokenizer has no chat template; set policy.tokenizer.chat_template"


@dataclass(frozen=True)
class SampledTurn:
    """A turn that the model sampled, with the conversation that it answers.

    Attributes:
        before: Messages of the conversation before the turn.
        token_ids: Sampled tokens, including the end token if there is one.
        text_before: Rendering of `before`, from the previous extension. None: render it anew.
    """

    before: Sequence[Message]
    token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    inputs: TemplateInputs = NO_INPUTS
    text_before: str | None = None

    @property
    def end_token_id(self) -> int | None:
        """The token that ended the turn. None if the turn was cut at the length limit, or ended with a stop string."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.stop_token_ids else None


@dataclass(frozen=True)
class Extension:
    """Continuation of a conversation after a sampled turn.

    Attributes:
        token_ids: Tokens to append to the sampled tokens: the end token if the turn has none, the template's text
            between turns, the new messages and the next generation prompt.
        messages: The conversation so far, which is `before` of the next turn. If the template requires calls as
            structured fields, sampled turns that contain calls as text are replaced by turns with such fields.
        text: Rendering of `messages`, which is `text_before` of the next turn.
        begins_anew: Whether `token_ids` are the entire conversation, rendered anew, instead of tokens to append.
    """

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    text: str
    begins_anew: bool = False


class Continuation:
    """Continues conversations with one tokenizer and its chat template.

    The text to append is found in a short conversation: one question, a stand-in for the sampled turn, and the new
    messages. The entire conversation is rendered too, as a check that it ends with the same text and that its beginning
    is unchanged.

    Args:
        keep_rewritten: Whether to continue even if the chat template would now render earlier turns in another way,
            such as without their thinking. The tokens of earlier turns then stay as they are.
        most_tokens: Maximum number of tokens of a sequence. Tokenization of a longer text stops soon after this number.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        run_wide: TemplateInputs = NO_INPUTS,
        *,
        keep_rewritten: bool = False,
        most_tokens: int | None = None,
    ):
        self._tokenizer, self._keep_rewritten = tokenizer, keep_rewritten
        self._render_text = text_renderer_for(tokenizer, run_wide) if tokenizer.chat_template else None
        self._render_checked = prompt_renderer_for(tokenizer, run_wide) if tokenizer.chat_template else None
        self._controls = ControlTokens(tokenizer, most_tokens) if tokenizer.chat_template else None
        self._glue = GlueFinder(self._render, self._controls)

    def extend(self, turn: SampledTurn, messages: Sequence[Mapping[str, object]]) -> Extension:
        """Continue a conversation after a sampled turn, up to the next generation prompt. Return the tokens to append.

        Args:
            messages: Answers to the turn, with a role in `ANSWERING_ROLES`, such as tools' results.

        Raises:
            RecordError: A message is malformed, or the template does not show it.
            Rewritten: The chat template changes the conversation so far when the answers follow.
            NoExtension: The end of the turn cannot be found, or the template cannot show the conversation.
        """
        new = self._checked(messages)
        try:
            return self._extension(turn, new)
        except OtherEnd as error:
            # As in gpt-oss: a final answer ends with <|return|>, which the template replaces by <|end|> once a user has
            # replied.
            if turn.end_token_id is None or any(message["role"] == "tool" for message in new):
                raise
            raise Rewritten(str(error)) from None
        except Refusal:
            before = with_calls(turn.before)
            if before == turn.before:
                raise
            return self._extension(replace(turn, before=before, text_before=None), new)

    def begin(self, messages: Sequence[Message], inputs: TemplateInputs) -> Extension:
        """Return the tokens of a new conversation with the generation prompt.

        Texts of control tokens in messages are tokenized as plain text, except in messages of the assistant.

        Raises:
            RecordError: The template does not show all of the conversation, or a name contains a control token.
            NoExtension: There is no chat template, or the tokenizer has no other tokens for a control token's text.
        """
        if self._render_checked is None:
            raise NoExtension(_NO_TEMPLATE)
        self._require_controls().require_none_in_names(messages)
        rendered = self._render_checked([PromptRecord("", tuple(messages), False, {}, inputs)])[0]
        text = "" if isinstance(rendered, str) else rendered.text
        if (broken := not_shown(messages, text)) is not None:
            reason = rendered if isinstance(rendered, str) else "the chat template shows arguments of an object alone"
            raise RecordError(
                f"a call has the arguments {shortened(broken)!r}, which is no JSON of an object: {reason}"
            )
        if isinstance(rendered, str):
            raise RecordError(rendered)
        plain = self._plain(lambda shown: self._render(shown, inputs), messages, 0, text)
        return Extension(tuple(self._encode(text, plain)), tuple(messages), text, begins_anew=True)

    def begin_anew(
        self, turn: SampledTurn, messages: Sequence[Mapping[str, object]], num_prompt_messages: int
    ) -> Extension:
        """Return the tokens of a conversation with a sampled turn and its answers, rendered anew. `extend` must have
        checked the answers.

        The first `num_prompt_messages` messages are tokenized as in any prompt.

        Raises:
            NoExtension: The template would not show the sampled text.
        """
        new = self._checked(messages)
        if any("tool_calls" in message for message in turn.before[num_prompt_messages:]):
            raise NoExtension("the chat template accepts turns with calls only as structured fields")
        before = [*turn.before, self._shown_again(turn, new)]
        if any(isinstance(message["content"], list) for message in before):
            raise NoExtension("the conversation has images")

        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, turn.inputs)

        marked_and_shown(lambda marked: render([*before, *marked]), new)
        whole = [*before, *new]
        text = render(whole)
        return Extension(
            tuple(self._encode(text, self._plain(render, whole, num_prompt_messages, text))),
            tuple(whole),
            text,
            begins_anew=True,
        )

    def _shown_again(self, turn: SampledTurn, new: Sequence[Message]) -> Message:
        """Return the turn as a message for the template. A header that the model sampled is removed if the template
        adds it."""
        prompted = self._render(turn.before, turn.inputs) if turn.text_before is None else turn.text_before
        own = self._as_text(turn, prompted)
        header = self._glue.header(new, turn.inputs)
        if not header.replace(THINK_START, "").replace(THINK_END, "").strip():
            return own
        # As in gpt-oss: the model writes the header itself, after thinking, which the template drops.
        _, found, text = own["content"].rpartition(header)
        if not found:
            raise NoExtension(f"the chat template writes {header!r} before a turn's text, but the model did not")
        return {**own, "content": text}

    def _plain(
        self, render: Callable[[Sequence[Message]], str], whole: Sequence[Message], first: int, text: str
    ) -> list[Span]:
        """Return the spans in `text` of message contents that contain control tokens and are not the model's."""
        controls = self._require_controls()
        chosen = [
            index
            for index, message in enumerate(whole)
            if index >= first and message["role"] != "assistant" and controls.first_in(message["content"])
        ]
        try:
            return content_spans(render, whole, chosen, text)
        except RenderError as error:
            raise NoExtension(str(error)) from None

    def _extension(self, turn: SampledTurn, new: Sequence[Message]) -> Extension:
        prompted = self._render(turn.before, turn.inputs) if turn.text_before is None else turn.text_before
        sampled, as_text = self._sampled_text(turn), self._as_text(turn, prompted)
        try:
            shown: str | None = self._render([*turn.before, as_text, *new], turn.inputs)
        except NoExtension:  # the template refuses tool calls that are text
            shown = None
        ends = {self._text_of(token_id): token_id for token_id in turn.stop_token_ids}
        problem: NoExtension | None = None
        numbered: str | None = None
        for form, stand_in in enumerate(stand_ins(new)):
            try:
                glue = self._glue.find(form, stand_in, new, turn.inputs, ends)
                ids = self._ids(glue, turn)
                # Some templates keep thinking only in turns with calls. This stand-in has thinking, so it is only for
                # turns that think.
                thinks = THOUGHT_MARK in stand_in("a").values()
                if thinks and not _thinking_of(sampled):
                    continue
                if not thinks and shown is not None and shown.endswith(glue.text):
                    own, text = as_text, shown
                else:
                    own = stand_in("a")
                    text = self._render([*turn.before, own, *new], turn.inputs)
                if not self._keep_rewritten:
                    own_text, rendering = (THOUGHT_MARK, text) if thinks else (sampled, shown)
                    require_unchanged(text, prompted, own_text, rendering)
                if not text.endswith(glue.text):
                    numbered = text if form == 0 else numbered
                    raise NoExtension(
                        "the text that the chat template writes after a turn depends on the turns before it"
                    )
            except NoExtension as error:
                problem = problem or error
                continue
            return Extension(tuple(ids), (*turn.before, own, *new), text)
        assert problem is not None
        if numbered is None or shown is None or not shown.startswith(prompted + sampled):
            raise problem
        # As in Kimi-K2, which numbers the calls of a conversation: find the glue in the conversation itself.
        conversation = [*turn.before, as_text]
        glue = self._glue.read_off(
            lambda messages: self._render([*conversation, *messages], turn.inputs), new, prompted + sampled, ends
        )
        if not numbered.endswith(glue.text):
            raise problem
        return Extension(tuple(self._ids(glue, turn)), (*conversation, *new), shown)

    def _checked(self, messages: Sequence[Mapping[str, object]]) -> list[Message]:
        parsed = parse_messages(list(messages), "messages")
        for index, message in enumerate(parsed):
            if message["role"] not in ANSWERING_ROLES:
                raise RecordError(
                    f"messages[{index}].role is {message['role']!r}, expected {', '.join(ANSWERING_ROLES)}: the model"
                    " alone writes the assistant's turns"
                )
            if not isinstance(message["content"], str):
                raise RecordError(f"messages[{index}].content has images, expected text")
        if self._controls is not None:
            self._controls.require_none_in_names(parsed)
        return parsed

    def _render(self, messages: Sequence[Message], inputs: TemplateInputs) -> str:
        if self._render_text is None:
            raise NoExtension(_NO_TEMPLATE)
        try:
            return self._render_text(messages, inputs)
        except RenderError as error:
            raise Refusal(str(error)) from None

    def _ids(self, glue: Glue, turn: SampledTurn) -> list[int]:
        """Return the tokens of the text after the turn's content, without the end token if the turn already has it."""
        sampled = turn.end_token_id
        if sampled is not None and sampled != glue.end and self._is_special(sampled):
            raise OtherEnd(
                f"the turn ends with {self._text_of(sampled)!r}, but if another turn follows, the chat template ends it"
                f" with {self._text_of(glue.end)!r}"
            )
        ids = self._encode(glue.text, glue.plain)
        # Encoded with the end token at the beginning, so that the rest is tokenized as in a conversation.
        if ids[:1] != [glue.end]:
            raise NoExtension(f"the tokenizer does not encode {self._text_of(glue.end)!r} as one token if text follows")
        return ids[1:] if sampled == glue.end else ids

    def _encode(self, text: str, plain: Sequence[Span]) -> list[int]:
        try:
            return self._require_controls().encode(text, plain)
        except RenderError as error:
            raise NoExtension(str(error)) from None

    def _require_controls(self) -> ControlTokens:
        if self._controls is None:
            raise NoExtension(_NO_TEMPLATE)
        return self._controls

    def _as_text(self, turn: SampledTurn, prompted: str) -> Message:
        """Return the turn as a message with the sampled text. If the generation prompt ends with the mark that begins
        thinking, the text begins with this mark."""
        text = self._sampled_text(turn)
        is_opened = prompted.rstrip().endswith(THINK_START) and THINK_END in text
        return {"role": "assistant", "content": prompted[prompted.rindex(THINK_START) :] + text if is_opened else text}

    def _is_special(self, token_id: int) -> bool:
        """Return whether a token is a mark, such as the end of a turn, instead of a part of a text."""
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        return added is not None and added.special

    def _sampled_text(self, turn: SampledTurn) -> str:
        size = len(turn.token_ids) - (turn.end_token_id is not None)
        return str(self._tokenizer.decode(list(turn.token_ids[:size]), skip_special_tokens=False))

    def _text_of(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _thinking_of(sampled: str) -> str:
    """Return the thinking of a sampled turn, or an empty text if the turn has no thinking or its thinking does not
    end."""
    before, found, _ = sampled.partition(THINK_END)
    return before.replace(THINK_START, "").strip() if found else ""
