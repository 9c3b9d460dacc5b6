# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parsing of conversations: messages, ShareGPT's conversations, or prompt and completion, with errors about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.data.image_records import ImageReference, parse_images, place_images, require_image_key, take_images
from nemo_rl_moe.data.messages import SYSTEM_ROLES, Message, parse_messages, parse_turns
from nemo_rl_moe.data.record_forms import (
    NO_KEYS,
    WHOLE,
    FormOfLines,
    Keys,
    OwnForm,
    is_text_of_turns,
    own_sample,
    turns_before,
    turns_of_prompt,
)
from nemo_rl_moe.data.record_values import RecordError, kind_of, names_in
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs, parse_template_inputs
from nemo_rl_moe.data.training_marks import MARKS, take_training_marks

OTHER_KEYS = "to use other keys, set data.messages_key, or data.prompt_key and data.completion_key"
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class Example:
    """One conversation.

    Attributes:
        messages: Messages with `role`, `content` (a text, or parts of type text and image), and further keys.
        first_trained_message: Index of the first message to train on. Earlier assistant turns are context.
        plain: Prompt and completion if both are strings, else None.
        marked_context: Indices of assistant turns that the record marks as context.
    """

    sample_id: str
    messages: tuple[Message, ...]
    first_trained_message: int = 0
    plain: tuple[str, str] | None = None
    inputs: TemplateInputs = NO_INPUTS
    images: tuple[ImageReference, ...] = ()
    marked_context: frozenset[int] = frozenset()

    @property
    def trained_messages(self) -> frozenset[int]:
        """Indices of the assistant turns to train on."""
        return frozenset(
            index
            for index in range(self.first_trained_message, len(self.messages))
            if self.messages[index]["role"] == "assistant" and index not in self.marked_context
        )


@dataclass(frozen=True)
class BadLine:
    """A line of the data that cannot be used, with the reason."""

    sample_id: str
    reason: str

    def __str__(self) -> str:
        more = "..." if len(self.reason) > _LONGEST_REASON else ""
        return f"{self.sample_id}: {self.reason[:_LONGEST_REASON]}{more}"


def parse_record(
    record: object,
    sample_id: str,
    image_key: str | None = None,
    keys: Keys = NO_KEYS,
    form: FormOfLines | None = None,
) -> Example:
    """Parse one decoded record of a conversation.

    If a record has both `messages` and `conversations` (ShareGPT), `messages` is read. Next to either, `completion` is
    an error, because it is ambiguous, and `prompt` is ignored, because published data sets have it. A text under
    `system` or `system_prompt` becomes the system turn, if messages have none. Other usual keys of prompt and
    completion are accepted too (`record_forms.py`). `tools` and `chat_template_kwargs` are passed to the chat template.
    Other keys are ignored.

    Args:
        image_key: Key of images next to the messages. None: such images are not read.
        form: Keys of prompt and completion in the earlier lines. This line must have the same keys.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"the line is {kind_of(record)}, expected an object with messages, or prompt and completion")
    formed = own_sample(record, keys)
    record = formed.record
    for name in WHOLE:
        if record.get(name) is not None:
            _require_one_form(record, name)
            messages = parse_messages(record[name], formed.name(name))
            _require_assistant(messages, formed.name(name))
            messages = behind(turns_before(formed, keys), messages)
            shown, images = with_images(messages, record, image_key, sample_id)
            unmarked, context = take_training_marks(shown, formed.name(name))
            return trained_example(
                Example(
                    sample_id,
                    tuple(unmarked),
                    inputs=parse_template_inputs(record),
                    images=images,
                    marked_context=context,
                )
            )
    example = _prompt_and_completion(formed, sample_id, image_key, keys)
    if form is not None:
        form.require_same({f"data.{own}_key": formed.name(own) for own in ("prompt", "completion")}, sample_id)
    return example


def with_images(
    messages: Sequence[Message], record: Mapping[str, Any], image_key: str | None, sample_id: str
) -> tuple[list[Message], tuple[ImageReference, ...]]:
    """Insert a record's images into its messages, and return these messages and all images."""
    beside = [] if image_key is None else parse_images(record.get(image_key), image_key)
    shown, images = take_images(place_images(messages, beside, image_key))
    if not images:
        require_image_key(messages, record, image_key, sample_id)
    return shown, images


def behind(before: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Return `messages` preceded by the turns `before`. If the messages have a system turn, it replaces the system turn
    of `before`."""
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [*before, *messages]
    return [messages[0], *(turn for turn in before if turn["role"] not in SYSTEM_ROLES), *messages[1:]]


def _prompt_and_completion(formed: OwnForm, sample_id: str, image_key: str | None, keys: Keys) -> Example:
    record, names = formed.record, {own: formed.name(own) for own in ("prompt", "completion")}
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None and completion is None:
        found = names_in(formed.keys())
        raise RecordError(f"the line has neither messages nor prompt and completion; its keys: {found}; {OTHER_KEYS}")
    for own, value, other in (("prompt", prompt, "completion"), ("completion", completion, "prompt")):
        if value is None:
            raise RecordError(
                f"the line has {names[other]} but no {names[own]}; its keys: {names_in(formed.keys())};"
                f" to use another key, set data.{own}_key"
            )
    before = turns_before(formed, keys)
    context = behind(before, parse_turns(turns_of_prompt(prompt, names["prompt"]), names["prompt"], "user"))
    said = completion.strip() if is_text_of_turns(prompt) and isinstance(completion, str) else completion
    answer = parse_turns(said, names["completion"], "assistant")
    _require_assistant(answer, names["completion"])
    plain = None
    if isinstance(prompt, str) and isinstance(completion, str) and not before:
        plain = prompt, completion
    shown, images = with_images([*context, *answer], record, image_key, sample_id)
    unmarked, marked = take_training_marks(shown, " and ".join(names.values()))
    return trained_example(
        Example(sample_id, tuple(unmarked), len(context), plain, parse_template_inputs(record), images, marked)
    )


def trained_example(example: Example) -> Example:
    """Return the example, or raise `RecordError` if all its assistant turns are marked as context."""
    if not example.trained_messages:
        raise RecordError(f"every turn of the assistant is marked as context ({', '.join(MARKS)}): nothing to train on")
    return example


def _require_one_form(record: Mapping[str, Any], name: str) -> None:
    if record.get("completion") is not None:
        other = "prompt and completion" if record.get("prompt") is not None else "completion"
        raise RecordError(f"the line has both {name} and {other}, expected one of the two")


def _require_assistant(messages: Sequence[Message], name: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise RecordError(f"{name} has no assistant turn: there is nothing to train on")
