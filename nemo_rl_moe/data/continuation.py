# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuation of a conversation behind a turn that the model sampled: tokens in, tokens out.

Sampled tokens are never rendered again, because another tokenization of the same text is not what the model wrote. What
follows them is found by rendering the conversation with a stand-in for the sampled turn: the text behind its end token
is the glue, the new messages and the next generation prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.data.chat_template import text_renderer_for
from nemo_rl_moe.data.messages import Message, parse_messages
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.turn_spans import RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERING_ROLES = ("tool", "user", "system", "developer")
"""Roles of messages that may follow a sampled turn: the model alone writes the assistant's."""
StandIn = Callable[[str], Message]
"""Makes a turn of the model with a text in it."""
_MARKS = ("stand-in-qx7", "another-zk94")
_QUESTION: Message = {"role": "user", "content": "q"}
_CALL_ID = "abcdefghi"  # some templates want ids of nine letters and digits


class NoExtension(ValueError):
    """No tokens are known to continue a conversation without a change of what is there; the message is the reason."""


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model, with the conversation that it answers.

    Attributes:
        before: Messages of that conversation.
        token_ids: Sampled tokens, the end token included where there is one.
        stop_token_ids: Tokens that end a turn.
        inputs: Tools and further names for the chat template.
        text_before: Rendering of `before`, as the extension before it has it; None: it is rendered.
    """

    before: Sequence[Message]
    token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    inputs: TemplateInputs = NO_INPUTS
    text_before: str | None = None

    @property
    def end_token_id(self) -> int | None:
        """Return the token that ended the turn; None: it was cut, or ended by a text."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.stop_token_ids else None


@dataclass(frozen=True)
class Extension:
    """What continues a conversation.

    Attributes:
        token_ids: Tokens that follow the sampled ones: the end token where the turn has none, glue, the new messages,
            the next generation prompt.
        messages: The conversation up to there, for the next turn's `before`. A turn of calls that the template takes in
            their own form alone is a stand-in.
        text: Their rendering, for the next turn's `text_before`.
    """

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    text: str


class Continuation:
    """Continues conversations of one tokenizer by its chat template.

    Glue and messages are rendered behind a stand-in for the turn in a conversation of one question. One rendering of
    the whole conversation then proves that it ends in them, and begins with what was there.

    Args:
        run_wide: Tools and names for the chat template where a conversation has none of its own.

    Raises:
        DataError: The tokenizer's chat template cannot be used.
        ConfigurationError: The run gives the chat template a name that it does not read.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", run_wide: TemplateInputs = NO_INPUTS):
        self._tokenizer = tokenizer
        self._render_text = text_renderer_for(tokenizer, run_wide) if tokenizer.chat_template else None
        self._shown: set[tuple[object, ...]] = set()

    def extend(
        self, turn: SampledTurn, messages: Sequence[Mapping[str, object]], *, keep_rewritten: bool = False
    ) -> Extension:
        """Append messages and the next generation prompt to a sampled turn.

        Args:
            messages: What answers the turn, of roles tool, user, system or developer.
            keep_rewritten: Continue also where the chat template would now render earlier turns in another way, such
                as without their thinking: those stay as they are.

        Raises:
            RecordError: A message is malformed.
            NoExtension: The chat template does not merely append, or where the turn ends cannot be told.
        """
        new = _checked(messages)
        prompted = self._render(turn.before, turn.inputs) if turn.text_before is None else turn.text_before
        shown = self._as_text(turn, new)
        problem: NoExtension | None = None
        for form, stand_in in enumerate(_stand_ins(new)):
            try:
                behind, end = self._behind(stand_in, turn, new)
                self._require_shown(form, stand_in, turn.inputs, new)
                ids = self._behind_end(behind, end, turn)
                own, text = self._whole(stand_in, behind, shown, turn, new)
                if not keep_rewritten:
                    self._require_unchanged(text, prompted, shown, turn)
                if not text.endswith(behind):
                    raise NoExtension("what the chat template puts behind a turn depends on what stands before it")
            except NoExtension as error:
                problem = problem or error
                continue
            return Extension(tuple(ids), (*turn.before, own, *new), text)
        assert problem is not None
        raise problem

    def _render(self, messages: Sequence[Message], inputs: TemplateInputs) -> str:
        if self._render_text is None:
            raise NoExtension("the tokenizer has no chat template; set policy.tokenizer.chat_template")
        try:
            return self._render_text(messages, inputs)
        except RenderError as error:
            raise NoExtension(str(error)) from None

    def _behind(self, stand_in: StandIn, turn: SampledTurn, new: Sequence[Message]) -> tuple[str, int]:
        """Return what stands behind the text of a turn, from its end token on, and that token."""
        found = {self._behind_mark(stand_in, mark, turn.inputs, new) for mark in _MARKS}
        if len(found) > 1:
            raise NoExtension("what the chat template puts behind a turn depends on the turn's text")
        (tail,) = found
        place, end = self._end_in(tail, turn)
        return tail[place:], end

    def _behind_mark(self, stand_in: StandIn, mark: str, inputs: TemplateInputs, new: Sequence[Message]) -> str:
        _, found, tail = self._render([_QUESTION, stand_in(mark), *new], inputs).partition(mark)
        if not found or mark in tail:
            raise NoExtension("the chat template does not show the text of a turn once")
        return tail

    def _require_shown(self, form: int, stand_in: StandIn, inputs: TemplateInputs, new: Sequence[Message]) -> None:
        """Check that the template shows messages of these roles, once for all messages of them."""
        key = form, bool(inputs.tools), *(message["role"] for message in new)
        if key in self._shown:
            return
        marked = [{**message, "content": f"{_MARKS[1]}-{index}-"} for index, message in enumerate(new)]
        tail = self._behind_mark(stand_in, _MARKS[0], inputs, marked)
        for index, message in enumerate(marked):
            if message["content"] not in tail:
                raise NoExtension(
                    f"messages[{index}] is of role {message['role']}, and the chat template leaves it out; set"
                    " policy.tokenizer.chat_template to a template that shows it"
                )
        self._shown.add(key)

    def _whole(
        self, stand_in: StandIn, behind: str, shown: str | None, turn: SampledTurn, new: Sequence[Message]
    ) -> tuple[Message, str]:
        """Return the turn as a message, a text where the same follows it, and the rendering of all messages."""
        if shown is not None and shown.endswith(behind):
            return self._own(turn), shown
        own = stand_in("a")
        return own, self._render([*turn.before, own, *new], turn.inputs)

    def _end_in(self, tail: str, turn: SampledTurn) -> tuple[int, int]:
        """Return the place of the turn's end token behind its text, and the token."""
        ends = {self._text_of(token_id): token_id for token_id in turn.stop_token_ids}
        places = [(tail.index(text), -len(text), text) for text in ends if text and text in tail]
        if not places:
            raise NoExtension(
                "the chat template ends a turn that another follows with no token that ends the model's own, which are "
                + (", ".join(map(repr, ends)) or "none")
            )
        place, _, text = min(places)
        return place, ends[text]

    def _behind_end(self, text: str, end: int, turn: SampledTurn) -> list[int]:
        """Encode what follows the turn's own tokens.

        Args:
            text: From the end token on: with it in front, the rest is tokenized as it is in a conversation.
        """
        sampled = turn.end_token_id
        if sampled is not None and sampled != end and self._is_special(sampled):
            raise NoExtension(
                f"the turn ends with {self._text_of(sampled)!r}, and the chat template ends it with"
                f" {self._text_of(end)!r} once another follows"
            )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids[:1] != [end]:
            raise NoExtension(f"the tokenizer encodes {self._text_of(end)!r} before other text as other tokens")
        return ids[1:] if sampled == end else ids

    def _as_text(self, turn: SampledTurn, new: Sequence[Message]) -> str | None:
        """Render with the sampled text as the turn's content; None: the template refuses calls that are text."""
        try:
            return self._render([*turn.before, self._own(turn), *new], turn.inputs)
        except NoExtension:
            return None

    def _own(self, turn: SampledTurn) -> Message:
        return {"role": "assistant", "content": self._sampled_text(turn)}

    def _require_unchanged(self, text: str, prompted: str, shown: str | None, turn: SampledTurn) -> None:
        """Check that the template still renders the conversation so far, and the sampled turn, as they are."""
        if not text.startswith(prompted):
            raise NoExtension("the chat template renders what stands before the turn in another way once it follows")
        # Blanks may differ: templates trim texts.
        if shown is not None and _without_blanks(self._sampled_text(turn)) not in _without_blanks(
            shown[len(prompted) :]
        ):
            raise NoExtension("the chat template leaves out a part of the turn, such as thinking, once others follow")

    def _is_special(self, token_id: int) -> bool:
        """Return whether a token is a mark, such as one that ends turns, and no part of a text."""
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        return added is not None and added.special

    def _sampled_text(self, turn: SampledTurn) -> str:
        size = len(turn.token_ids) - (turn.end_token_id is not None)
        return str(self._tokenizer.decode(list(turn.token_ids[:size]), skip_special_tokens=False))

    def _text_of(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _checked(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Parse the messages, and reject those that may not follow a sampled turn."""
    parsed = parse_messages(list(messages), "messages")
    for index, message in enumerate(parsed):
        if message["role"] not in ANSWERING_ROLES:
            raise NoExtension(
                f"messages[{index}].role is {message['role']!r}, expected {', '.join(ANSWERING_ROLES)}: the model alone"
                " writes the assistant's turns"
            )
        if not isinstance(message["content"], str):
            raise NoExtension(f"messages[{index}].content has images, expected text")
    return parsed


def _stand_ins(new: Sequence[Message]) -> Iterator[StandIn]:
    """Yield the forms that the sampled turn may have: calls, where results answer it, and a text."""
    results = [message for message in new if message["role"] == "tool"]
    if results:
        yield partial(_calls, results)
    if len(results) > 1:
        yield partial(_calls, results[-1:])  # some templates show one call a turn
    yield lambda mark: {"role": "assistant", "content": mark}


def _calls(results: Sequence[Message], mark: str) -> Message:
    """Return a turn of the calls that results answer, with the mark among the arguments of the last."""
    calls = [
        {
            "id": result.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {
                "name": result.get("name", "tool"),
                "arguments": {"value": mark} if index == len(results) - 1 else {"value": "a"},
            },
        }
        for index, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _without_blanks(text: str) -> str:
    return "".join(text.split())
