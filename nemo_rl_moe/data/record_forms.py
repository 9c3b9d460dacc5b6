# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of published forms of records to this package's form: messages, prompt and completion, or prompt, chosen
and rejected.

If several keys of a record may be meant, a `RecordError` names the settings that choose one of them. "Our" keys are
this package's keys.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.data.record_values import RecordError, is_list, kind_of, value_at

CONVERSATIONS = "conversations"
SYSTEM, SYSTEM_PROMPT = "system", "system_prompt"
WHOLE = ("messages", CONVERSATIONS)
PROMPTS = ("prompt", "instruction", "question", "query", "input")
COMPLETIONS = ("completion", "output", "response", "answer")
PAIRS = (
    ("chosen", "rejected"),
    ("response_chosen", "response_rejected"),
    ("chosen_response", "rejected_response"),
    ("response", "rejected_response"),
)
"""Keys of the better and the worse response."""
COMPARED = (("response1", "response2"), ("response_1", "response_2"))
"""Keys of two responses that a number compares (HelpSteer). If the number is below 0, the first response is better, if
it is above 0, the second."""
COMPARISONS = ("overall_preference", "preference_strength")
CONTEXT, HISTORY, REJECTED_MESSAGES = "context", "history", "rejected_messages"
SAMPLE_KEYS = (*WHOLE, *PROMPTS, *COMPLETIONS)
RESPONSE_KEYS = tuple(dict.fromkeys((*(name for pair in (*PAIRS, *COMPARED) for name in pair), REJECTED_MESSAGES)))
PAIR_KEYS = (*RESPONSE_KEYS, *COMPARISONS, *PROMPTS, CONTEXT, *WHOLE)
MORE_KEYS = (SYSTEM, SYSTEM_PROMPT, HISTORY, CONTEXT)

# Conversations that are one text, as in hh-rlhf.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_FIRST_SPEAKER, _ANSWER = re.compile(r"\s*Human:"), "\n\nAssistant:"
_ROLES = {"Human": "user", "Assistant": "assistant"}

Keys = Mapping[str, str]
"""Key of this package -> key that the configuration names for it, such as `{"prompt": "question"}` for
`data.prompt_key: question`."""
NO_KEYS: Keys = {}


@dataclass(frozen=True)
class OwnForm:
    """A record with this package's keys. `names` maps these to the data's keys, for error messages."""

    record: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """Return the record's keys as they are in the data, for error messages."""
        return [key for key in self.record if key not in self.names]

    def name(self, own: str) -> str:
        """Return the data's key for this package's key `own`."""
        return self.names.get(own, own)


@dataclass
class FormOfLines:
    """The keys of prompt and responses in the first line of a data set. All other lines must have the same keys.

    Without this rule, another usual key would replace a missing key. If a line lacks `completion`, for example, its
    `answer` would be the response, although `answer` often means something else there.
    """

    _first: dict[str, tuple[str, str]] = field(default_factory=dict)

    def require_same(self, names: Mapping[str, str], place: str) -> None:
        """Store the keys of the first line, and raise `RecordError` if a later line has other keys.

        Args:
            names: Setting that may name a key -> the key in this line, such as `{"data.prompt_key": "question"}`.
            place: Sample id of the line.
        """
        for setting, name in names.items():
            first, first_place = self._first.setdefault(setting, (name, place))
            if name != first:
                raise RecordError(
                    f"the line has {name} where {first_place} has {first}: expected the same keys in all lines; or set"
                    f" {setting}"
                )


def own_sample(record: Mapping[str, Any], keys: Keys) -> OwnForm:
    """Convert a conversation's record to this package's keys. A record of an unknown form is not changed."""
    if "messages" in keys:
        whole = _named_value(record, "messages", keys)
        others = {name: None for name in SAMPLE_KEYS if name in record}
        return OwnForm({**record, **others, "messages": turns_of(whole)}, {"messages": keys["messages"]})
    if not set(keys) - {SYSTEM} and any(record.get(name) is not None for name in WHOLE):
        return OwnForm(record)
    names = {"prompt": _name_of(record, "prompt", PROMPTS, keys)}
    names["completion"] = _name_of(record, "completion", COMPLETIONS, keys)
    return _with_values(record, {own: name for own, name in names.items() if name is not None}, keys)


def own_pair(record: Mapping[str, Any], keys: Keys) -> OwnForm:
    """Convert a record with two responses to this package's keys. A record of an unknown form is not changed."""
    names = _names_of_responses(record, keys)
    if names is None:
        return _chosen_messages(record)
    formed = _with_values(record, names, keys)
    responses = {own: turns_of(formed.record[own]) for own in ("chosen", "rejected")}
    shows_prompt = all(is_list(response) and len(response) > 1 for response in responses.values())
    if "prompt" not in keys and (record.get("prompt") is not None or shows_prompt):
        return OwnForm({**formed.record, **responses}, names)
    prompt = _name_of(record, "prompt", PROMPTS, keys) or (CONTEXT if record.get(CONTEXT) is not None else None)
    whole = next((name for name in WHOLE if record.get(name) is not None), None)
    if prompt is None and whole is None:
        return OwnForm({**formed.record, **responses}, names)
    formed = _with_values({**record, "prompt": record.get(str(whole))}, {**names, "prompt": prompt or str(whole)}, keys)
    return OwnForm({**formed.record, **responses}, formed.names)


def turns_of(value: Any) -> Any:
    """Convert one message, or a conversation as one text as in hh-rlhf, to a list of messages. Other values are
    returned unchanged."""
    if isinstance(value, Mapping):
        return [value]
    if not is_text_of_turns(value):
        return value
    _, *parts = _SPEAKER.split("\n\n" + value.lstrip())
    speakers, texts = parts[::2], parts[1::2]
    return [{"role": _ROLES[who], "content": text.strip()} for who, text in zip(speakers, texts, strict=True)]


def is_text_of_turns(value: Any) -> bool:
    """Return whether a value is a conversation as one text, as in hh-rlhf. The last response may be missing."""
    return isinstance(value, str) and _FIRST_SPEAKER.match(value) is not None and _ANSWER in value


def turns_of_prompt(value: Any, name: str) -> Any:
    """Convert a prompt that is a conversation as one text, as in hh-rlhf, to messages. Other values are returned
    unchanged."""
    if not is_text_of_turns(value):
        return value
    *turns, last = turns_of(value)
    if last["role"] != "assistant":
        return [*turns, last]
    if last["content"]:
        raise RecordError(
            f"{name} ends in text of the assistant, and a response follows: {name} must end in {_ANSWER.strip()!r}"
        )
    return turns


def turns_before(formed: OwnForm, keys: Keys) -> list[dict[str, Any]]:
    """Return the messages that precede a record's prompt or messages: its system turn, and the turns of `history`."""
    system = _system_of(formed.record, keys)
    found = [] if system is None else [{"role": "system", "content": system}]
    history = formed.record.get(HISTORY)
    if not history or HISTORY in (*formed.names.values(), *keys.values()):
        return found
    pairs = history if is_list(history) else ()
    are_pairs = pairs and all(is_list(each) and [type(text) for text in each] == [str, str] for each in pairs)
    if are_pairs and all(formed.record.get(name) is None for name in WHOLE):
        speakers = ("user", "assistant")
        return [
            *found,
            *({"role": role, "content": text} for pair in pairs for role, text in zip(speakers, pair, strict=True)),
        ]
    if are_pairs:
        raise RecordError(
            f"the line has both {HISTORY} and messages, expected one of the two; write all turns in messages"
        )
    if "prompt" not in keys and formed.record.get("prompt") is not None:
        raise RecordError(
            f"{HISTORY} is {kind_of(history)}, expected a list of pairs of question and answer; write the turns as"
            f" messages, or set data.prompt_key={formed.name('prompt')} to ignore {HISTORY}"
        )
    return found


def _system_of(record: Mapping[str, Any], keys: Keys) -> str | None:
    if SYSTEM in keys:
        found = {keys[SYSTEM]: value_at(record, keys[SYSTEM], "data.system_key")}
    else:
        found = {name: record.get(name) for name in (SYSTEM, SYSTEM_PROMPT) if name not in keys.values()}
    texts = {name: text for name, text in found.items() if text}
    if len(set(map(str, texts.values()))) > 1:
        raise RecordError(
            f"the line has {' and '.join(texts)}, each of which may be the system turn: set data.system_key to one of"
            " them"
        )
    for name, text in texts.items():
        if not isinstance(text, str):
            raise RecordError(f"{name} is {kind_of(text)}, expected a string; to use another key, set data.system_key")
        return text
    return None


def _named_value(record: Mapping[str, Any], own: str, keys: Keys) -> Any:
    value = value_at(record, keys[own], f"data.{own}_key")
    if value is None:
        raise RecordError(f"{keys[own]} is null (data.{own}_key={keys[own]}), expected a value in each line")
    return value


def _name_of(record: Mapping[str, Any], own: str, usual: Sequence[str], keys: Keys) -> str | None:
    """Return the data's key for this package's key `own`: the key in the configuration, `own` itself, or the only usual
    key in the record. None if the record has none."""
    if own in keys:
        return keys[own]
    found = [name for name in usual if record.get(name) is not None]
    if own in found:
        return own
    if "instruction" in found and "input" in found:
        found.remove("input")  # in Alpaca's form, `input` belongs to the instruction
    if len(found) > 1:
        raise RecordError(
            f"the line has {' and '.join(found)}, each of which may be the {own}: set data.{own}_key to one of them"
        )
    return found[0] if found else None


def _with_values(record: Mapping[str, Any], names: Mapping[str, str], keys: Keys) -> OwnForm:
    """Return the record with the values of the data's keys in `names` under this package's keys."""
    values = {own: _named_value(record, own, keys) if own in keys else record.get(name) for own, name in names.items()}
    other = {own: name for own, name in names.items() if name != own}
    if not other and not keys:
        return OwnForm(record)
    if "prompt" in other:
        values["prompt"] = _whole_prompt(record, values["prompt"], names["prompt"], keys)
    return OwnForm({**record, **{name: None for name in WHOLE if name in record}, **values}, other)


def _whole_prompt(record: Mapping[str, Any], prompt: Any, name: str, keys: Keys) -> Any:
    """Return a prompt with further text of the record: `input` (Alpaca) or `context` (Dolly) after an instruction, or
    `context` before another prompt."""
    if name not in PROMPTS:
        return prompt
    beside = ("input", CONTEXT) if name == "instruction" else (CONTEXT,)
    for more in (more for more in beside if record.get(more) and more not in keys.values()):
        if not isinstance(prompt, str) or not isinstance(record[more], str):
            kinds = f"{name} is {kind_of(prompt)} and {more} {kind_of(record[more])}"
            raise RecordError(f"{kinds}, expected two strings")
        texts = [prompt, record[more]] if name == "instruction" else [record[more], "", prompt]
        prompt = "\n".join(texts)
    return prompt


def _names_of_responses(record: Mapping[str, Any], keys: Keys) -> dict[str, str] | None:
    """Return the data's keys for `chosen` and `rejected`, or None if the record has no known pair of responses."""
    if "chosen" in keys or "rejected" in keys:
        return {own: keys.get(own, own) for own in ("chosen", "rejected")}
    complete = [pair for pair in (*PAIRS, *COMPARED) if all(record.get(name) is not None for name in pair)]
    if not complete:
        return None
    if len(complete) > 1 and complete[0] != PAIRS[0]:
        found = " and ".join(", ".join(pair) for pair in complete)
        raise RecordError(f"the line has {found}: set data.chosen_key and data.rejected_key to one pair of them")
    chosen, rejected = complete[0]
    if complete[0] in COMPARED and _is_second_better(record, complete[0]):
        chosen, rejected = rejected, chosen
    return {"chosen": chosen, "rejected": rejected}


def _is_second_better(record: Mapping[str, Any], pair: tuple[str, str]) -> bool:
    found = [name for name in COMPARISONS if record.get(name) is not None]
    if len(found) != 1:
        raise RecordError(
            f"the line has {' and '.join((*pair, *found))}, expected one of {', '.join(COMPARISONS)} to"
            " compare the responses; or set data.chosen_key and data.rejected_key"
        )
    preference = record[found[0]]
    if not isinstance(preference, int | float) or isinstance(preference, bool):
        raise RecordError(f"{found[0]} is {kind_of(preference)}, expected a number: below 0 if {pair[0]} is better")
    if not preference:
        raise RecordError(f"{found[0]} is 0: neither response is better")
    return preference > 0


def _chosen_messages(record: Mapping[str, Any]) -> OwnForm:
    """Convert a record whose messages end with the better response and that has the worse response under another key
    (ms-swift)."""
    chosen = record.get("messages")
    if not is_list(chosen) or not chosen:
        return OwnForm(record)
    if (whole := record.get(REJECTED_MESSAGES)) is not None:
        return OwnForm(
            {**record, "chosen": chosen, "rejected": whole}, {"chosen": "messages", "rejected": REJECTED_MESSAGES}
        )
    if (rejected := record.get("rejected_response")) is None:
        return OwnForm(record)
    names = dict.fromkeys(("prompt", "chosen"), "messages")
    values = {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": turns_of(rejected)}
    return OwnForm({**record, **values}, {**names, "rejected": "rejected_response"})
