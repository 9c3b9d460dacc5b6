# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversation of a session: its messages, and the tokens of appended messages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_moe.data.continuation import Continuation, Extension, NoExtension, SampledTurn
from nemo_rl_moe.data.messages import Message, parse_messages
from nemo_rl_moe.data.template_inputs import TemplateInputs


@dataclass(frozen=True)
class Answer:
    """Messages after the last turn of the model, with their tokens (`extension`).

    Attributes:
        messages: All messages after the turn, including an earlier answer to it.
        replaced: Tokens of an earlier answer to the same turn, which `extension` replaces. None if there was none.
    """

    messages: tuple[Message, ...]
    extension: Extension
    replaced: Extension | None


class Conversation:
    """First messages, turns of the model, and messages that answer them.

    All tokens after a generation prompt are one turn of the model, including tokens that the environment adds there,
    such as the first words of an answer.

    Args:
        inputs: Tools and names for the chat template.
        num_prompt_messages: Number of first messages. Their text may have control tokens. In later messages, the text
            of a control token is tokenized as plain text.
        stop_token_ids: Tokens that end a turn.
        continuation: Renders messages. None without a chat template.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        inputs: TemplateInputs,
        num_prompt_messages: int,
        stop_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        continuation: Continuation | None,
    ):
        self._stop_token_ids, self._inputs = stop_token_ids, inputs
        self._decode, self._continuation = decode, continuation
        self._num_prompt_messages = num_prompt_messages
        self._earlier: list[Message] = list(messages)
        self._before: tuple[Message, ...] = tuple(messages)
        self._text_before: str | None = None
        self._turn: list[int] = []
        self._is_sampled = False
        self._answer: Answer | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages so far. The content of an assistant message is its full text, calls and thinking included."""
        own: list[Message] = []
        if self._turn:
            size = len(self._turn) - (self._turn[-1] in self._stop_token_ids)
            own = [{"role": "assistant", "content": self._decode(self._turn[:size])}]
        return (*self._earlier, *own, *(self._answer.messages if self._answer is not None else ()))

    def add_to_turn(self, token_ids: Sequence[int], *, is_sampled: bool) -> None:
        """Add tokens to the turn after the last generation prompt."""
        if self._answer is not None:
            self._earlier = list(self.messages)
            self._before, self._text_before = self._answer.extension.messages, self._answer.extension.text
            self._turn, self._is_sampled, self._answer = [], False, None
        self._turn += token_ids
        self._is_sampled = self._is_sampled or is_sampled

    def another(self, messages: Sequence[Mapping[str, object]]) -> tuple["Conversation", Extension]:
        """Return a new conversation that begins with these messages, and its tokens.

        Raises:
            RuntimeError: There is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: A message is malformed.
        """
        continuation = self._require_continuation()
        extension = continuation.begin(parse_messages(list(messages), "messages"), self._inputs)
        begun = Conversation(
            extension.messages, self._inputs, 0, self._stop_token_ids, self._decode, self._continuation
        )
        return begun, extension

    def _require_continuation(self) -> Continuation:
        if self._continuation is None:
            raise RuntimeError("messages need a tokenizer with a chat template; set policy.tokenizer.chat_template")
        return self._continuation

    def answer(self, messages: Sequence[Mapping[str, object]]) -> Answer:
        """Return all messages after the model's last turn, with their tokens: earlier ones, and the new `messages`.

        If the template would change earlier tokens, the entire conversation is rendered anew, for another sequence.

        Raises:
            RuntimeError: The model has not answered yet, or there is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: A message is malformed.
        """
        continuation = self._require_continuation()
        if not self._is_sampled:
            raise RuntimeError("a message was added before a response of the model; await session.generate() first")
        earlier = self._answer
        new = [*(earlier.messages if earlier is not None else ()), *messages]
        turn = SampledTurn(self._before, self._turn, self._stop_token_ids, self._inputs, self._text_before)
        try:
            extension = continuation.extend(turn, new)
        except NoExtension as reason:
            extension = self._begin_anew(continuation, turn, new, str(reason))
        return Answer(extension.messages[-len(new) :], extension, None if earlier is None else earlier.extension)

    def _begin_anew(
        self, continuation: Continuation, turn: SampledTurn, new: Sequence[Mapping[str, object]], reason: str
    ) -> Extension:
        try:
            return continuation.begin_anew(turn, new, self._num_prompt_messages)
        except NoExtension as error:
            if str(error) == reason:
                raise
            raise NoExtension(f"{reason}; the conversation cannot be rendered afresh either: {error}") from None

    def accept(self, answer: Answer) -> None:
        """Add the messages of an answer, after the caller has added their tokens to a sequence."""
        self._answer = answer
