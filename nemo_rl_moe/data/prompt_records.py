# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parsing of prompt data: question and answer, with errors about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from string import ascii_uppercase
from typing import Any

from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig
from nemo_rl_moe.data.image_records import ImageReference, without_content
from nemo_rl_moe.data.messages import Message, content_text, parse_turns, text_of, with_text_around
from nemo_rl_moe.data.record_values import RecordError, columns_of, is_list, kind_of, require_encodable, value_at
from nemo_rl_moe.data.records import with_images
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs, parse_template_inputs

ANSWERED = ("user", "tool")
"""Roles that the last turn of a prompt may have."""
_WHOLE_FLOATS = 2**53
CHOICES = "choices"
"""Key of the list of a question's choices, as in MMLU."""
ROW = "row"
"""Key of a record made from an environment library's own data. It holds the library's item, with its number as
`example_id`."""


@dataclass(frozen=True)
class PromptRecord:
    """A prompt before tokenization.

    Attributes:
        is_text: Whether the prompt was a text instead of messages.
        record: The decoded record with `question` and `answer` added, without encoded images.
    """

    sample_id: str
    messages: tuple[Message, ...]
    is_text: bool
    record: Mapping[str, Any]
    inputs: TemplateInputs = NO_INPUTS
    images: tuple[ImageReference, ...] = ()

    @property
    def text(self) -> str:
        """Text of the messages, without the chat template's additions."""
        return text_of(self.messages)


def apply_template(messages: Sequence[Message], template: str | None) -> tuple[Message, ...]:
    """Return messages with the last user turn's text inserted at the template's `{prompt}`, if there is a template."""
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if template is None or not asked:
        return tuple(messages)
    last = messages[asked[-1]]
    before, found, behind = template.partition("{prompt}")
    # A template may have `{prompt}` several times, but images are inserted once.
    behind = behind.replace("{prompt}", content_text(last["content"]))
    wrapped = {**last, "content": with_text_around(last["content"], before, behind) if found else template}
    return (*messages[: asked[-1]], wrapped, *messages[asked[-1] + 1 :])


def prompt_parser(data: PromptDataConfig, env: EnvironmentConfig | None) -> Callable[[object, str], PromptRecord]:
    """Return a function that parses and checks records.

    Reward functions get the data's record with `answer` from `data.answer_key` and, if it is missing, `question` (the
    prompt's text). If rewards need an answer, a number becomes a text, a list with one member becomes the member, and
    an index in `choices` becomes a letter. `reasoning_gym` also needs `metadata`. A custom function gets the answer
    unchanged, or None if it is missing. Images are given as paths. Without `env`, responses are not scored, and no
    answer is needed.
    """

    needs_answer = env is not None and env.needs_answers
    is_of_task = env is not None and isinstance(env.reward, ReasoningGymConfig)

    def parse(record: object, sample_id: str) -> PromptRecord:
        if not isinstance(record, Mapping):
            raise RecordError(f"the line is {kind_of(record)}, expected an object with {data.prompt_key}")
        prompt = value_at(record, data.prompt_key, "data.prompt_key")
        messages = parse_turns(prompt, data.prompt_key, "user")
        if (role := messages[-1]["role"]) not in ANSWERED:
            raise RecordError(
                f"{data.prompt_key} ends in a turn of role {role!r}, "
                f"expected {' or '.join(ANSWERED)}: a model answers it"
            )
        messages, images = with_images(messages, record, data.image_key, sample_id)
        question = text_of(messages)
        reported = without_content(record) if images else record
        complete = {
            "question": question,
            **reported,
            "answer": _answer(record, data.answer_key, needs_answer=needs_answer),
        }
        if is_of_task and not isinstance(record.get("metadata"), Mapping):
            raise RecordError(
                f"metadata is {kind_of(record['metadata'])}, expected an object"
                if "metadata" in record
                else "the line has no metadata, which the reasoning_gym task needs to score an answer"
            )
        asked = apply_template(messages, data.prompt_template)
        return PromptRecord(sample_id, asked, isinstance(prompt, str), complete, parse_template_inputs(record), images)

    return parse


def prompt_columns(
    data: PromptDataConfig, env: EnvironmentConfig | None
) -> Callable[[str, Sequence[str]], Sequence[str]]:
    """Return a function that chooses the columns of a table to read, given the table's path and column names.

    The function chooses all columns, because all belong to the record. It raises `DataError` if the column of
    `data.prompt_key` or, if answers are needed, of `data.answer_key` is missing.
    """
    keys = {"data.prompt_key": data.prompt_key}
    if env is not None and env.needs_answers:
        keys["data.answer_key"] = data.answer_key

    def choose(path: str, names: Sequence[str]) -> Sequence[str]:
        columns_of(path, names, keys)
        return names

    return choose


def _answer(record: Mapping[str, Any], key: str, *, needs_answer: bool) -> Any:
    if not needs_answer:
        try:
            return value_at(record, key, "data.answer_key")
        except RecordError:
            return None
    answer = value_at(record, key, "data.answer_key")
    if is_list(answer) and len(answer) == 1:
        (answer,) = answer
    if isinstance(answer, int | float) and not isinstance(answer, bool) and isfinite(answer):
        return _chosen_letter(record, answer) or _written_out(answer)
    if not isinstance(answer, str):
        raise RecordError(f"{key} is {kind_of(answer)}, expected a string or a number; write it as a string")
    if not answer.strip():
        raise RecordError(f"{key} is empty: there is nothing to compare a response with")
    require_encodable(answer, key)
    return answer


def _chosen_letter(record: Mapping[str, Any], answer: float) -> str | None:
    """Return the letter of a choice if the answer is an index in the list `choices`, as in MMLU, else None."""
    choices, index = record.get(CHOICES), answer if isinstance(answer, int) else -1
    if not is_list(choices) or not all(isinstance(choice, str) for choice in choices):
        return None
    return ascii_uppercase[index] if 0 <= index < min(len(choices), len(ascii_uppercase)) else None


def _written_out(number: float) -> str:
    """Return a JSON number written with digits only, because math rewards cannot read 1e-07."""
    # Columns with missing values contain integers as 72.0.
    is_whole = float(number).is_integer() and abs(number) < _WHOLE_FLOATS
    return str(int(number)) if is_whole else format(Decimal(str(number)), "f")
