# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model's stop tokens, generation prompt, think marks and published sampling parameters, read from its files.

Tokenization, generation and scoring all use this module, so that training and rollouts cannot differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.data.chat_template import template_setup
from nemo_rl_moe.data.template_renderer import TemplateRenderer
from nemo_rl_moe.data.thinking import Thinking, find_thinking
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.models.hf_files import load_config_json, load_model_json
from nemo_rl_moe.models.model_files import CONFIG_FILE, GENERATION_CONFIG_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY, _TEXT_CONFIG = "eos_token_id", "text_config"
_TOKENIZER = "tokenizer"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_INSIDE, _PLAIN, _UNKNOWN = (
    "the chat template writes it inside a turn",
    "it is a token of plain text",
    "the tokenizer has no such token",
)
STOPS_KEY = "policy.generation.stop_token_ids"


@dataclass(frozen=True)
class Published:
    """The decoded `generation_config.json` and `config.json` of a model. A missing file is empty."""

    generation: Mapping[str, Any]
    config: Mapping[str, Any]


NOTHING_PUBLISHED = Published({}, {})


def load_published(model_name: str) -> Published:
    """Load and return both files of a model in a folder or on the hub."""
    generation = load_model_json(model_name, GENERATION_CONFIG_FILE)
    if generation is not None and not isinstance(generation, dict):
        raise ConfigurationError(
            f"policy.model_name: {model_name}: {GENERATION_CONFIG_FILE} is no object, expected one with the model's"
            " settings"
        )
    return Published(generation or {}, load_config_json(model_name))


@dataclass(frozen=True)
class StopToken:
    """A token that ends a response. `sources` are "tokenizer" or the names of files that name the token."""

    token_id: int
    text: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.text!r} {self.token_id} ({', '.join(self.sources)})"


@dataclass(frozen=True)
class Speech:
    """Stop tokens and marks of a model.

    Attributes:
        stop_tokens: Tokens that end a response, without repeats. The tokenizer's end token comes first.
        no_stops: Tokens that a file names as stop tokens but that do not end responses, each with the reason.
        turn_end: Text of the stop token at which generation ends the assistant's turn. In some templates it is the mark
            of the next role. Empty if the template ends turns without a stop token.
        call_end: Like `turn_end`, for a turn with tool calls.
        generation_prompt: Text that the template puts before a turn of the model. Empty without a template.
        thinking: Marks around thinking. None: the template has no such marks.
        sampling: Sampling parameters that the model's makers recommend. They are shown, but not applied.
        templates: Names of the tokenizer's chat templates. Empty if it has at most one.
    """

    stop_tokens: tuple[StopToken, ...]
    no_stops: tuple[tuple[StopToken, str], ...]
    turn_end: str
    call_end: str
    generation_prompt: str
    thinking: Thinking | None
    sampling: Mapping[str, float]
    templates: tuple[str, ...]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.stop_tokens)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return tuple(token.text for token in self.stop_tokens)

    def end_of_response(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token to append to a response that was not sampled, in a tuple. Empty without stop tokens.

        Args:
            stop_token_ids: The run's stop tokens. The token of `turn_end` is returned if it is among them, else the
                first one.
        """
        own = [token.token_id for token in self.stop_tokens if token.text == self.turn_end]
        return tuple([token_id for token_id in own if token_id in stop_token_ids] or stop_token_ids[:1])[:1]

    def warnings(self) -> list[str]:
        """Return a warning if a model that is trained on the template's turns cannot learn to stop."""
        if self.generation_prompt and not self.turn_end and self.stop_tokens:
            return [
                "the chat template ends the assistant's turns with none of the stop tokens"
                f" {', '.join(map(repr, self.stop_texts))}: a model trained on them never learns to stop; set"
                f" policy.tokenizer.chat_template to one that does, and for rollouts {STOPS_KEY}"
            ]
        return []

    def lines(self) -> Iterator[str]:
        """Yield the lines of a description for the user."""
        yield f"stop tokens: {', '.join(map(str, self.stop_tokens)) or 'none'}"
        for token, reason in self.no_stops:
            yield f"no stop token: {token}: {reason} ({STOPS_KEY} sets the stop tokens)"
        if self.turn_end:
            calls = f", of calls with {self.call_end!r}" if self.call_end not in ("", self.turn_end) else ""
            opened = f"; generation prompt {self.generation_prompt!r}" if self.generation_prompt else ""
            yield f"the assistant's turns end with {self.turn_end!r}{calls}{opened}"
        if self.thinking is not None:
            yield f"thinking: {self.thinking}"
        if self.templates:
            with_tools = ", tool_use with tools" if "tool_use" in self.templates else ""
            yield f"chat templates: {', '.join(self.templates)}; used: default{with_tools}"
        if self.sampling:
            values = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
            yield f"the model's own sampling, not applied: {values}"


def describe_speech(
    tokenizer: "PreTrainedTokenizerBase",
    published: Published = NOTHING_PUBLISHED,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Speech:
    """Return a model's stop tokens and marks.

    Stop tokens are those of the tokenizer, of `generation_config.json`, and of `config.json` or its `text_config`.
    Tokens that the template also writes inside a turn are dropped.

    Args:
        published: The model's files.
        kwargs: The run's variables for the chat template, such as `enable_thinking`.
    """
    known, no_stops = _named(tokenizer, published)
    plain, with_calls = _probes(tokenizer, [token.text for token in known], kwargs)
    ends = [probe.end_of_turn(with_calls=calls) for probe, calls in ((plain, False), (with_calls, True)) if probe]
    inside = with_calls.stops_inside_turns() if with_calls else frozenset()
    stops = [token for token in known if token.text in ends or token.text not in inside]
    no_stops += [(token, _INSIDE) for token in known if token not in stops]
    opening = plain.opening if plain else ""
    names = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ()
    return Speech(
        tuple(stops),
        tuple(no_stops),
        ends[0] if ends else "".join(token.text for token in stops[:1]),
        ends[1] if ends else "",
        opening,
        find_thinking(*plain.around_thinking(), opening, plain.template) if plain else None,
        _numbers(published.generation, _SAMPLING),
        tuple(names),
    )


def _named(
    tokenizer: "PreTrainedTokenizerBase", published: Published
) -> tuple[list[StopToken], list[tuple[StopToken, str]]]:
    """Return the stop tokens that tokenizer and files name, and the named tokens that cannot be stop tokens, each with
    the reason."""
    own = tokenizer.eos_token_id
    sources: dict[int, list[str]] = {} if own is None else {own: [_TOKENIZER]}
    text_config = published.config.get(_TEXT_CONFIG)
    config = {**(text_config if isinstance(text_config, dict) else {}), **published.config}
    for file, found in ((GENERATION_CONFIG_FILE, published.generation), (CONFIG_FILE, config)):
        for token_id in _ids(found.get(_KEY), file):
            sources.setdefault(token_id, []).append(file)
    added = tokenizer.added_tokens_decoder
    stops, no_stops = [], []
    for token_id, names in sources.items():
        if token_id in added:
            text = str(added[token_id].content)
        else:
            text = "" if token_id >= len(tokenizer) else str(tokenizer.convert_ids_to_tokens(token_id))
        token = StopToken(token_id, text, tuple(names))
        if token_id == own or token_id in added:
            stops.append(token)
        else:
            # A leftover, such as a default of a configuration class. As a stop token it would end responses within a
            # word.
            no_stops.append((token, _PLAIN if text else _UNKNOWN))
    return stops, no_stops


def _ids(value: object, file: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in ids):
        raise ConfigurationError(
            f"policy.model_name: {file}: {_KEY}: got {str(value)[:100]!r}, expected a token id, or a list of them"
        )
    return list(dict.fromkeys(ids))


def _probes(
    tokenizer: "PreTrainedTokenizerBase", stop_texts: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[TemplateRenderer | None, TemplateRenderer | None]:
    """Return the renderers of the chat templates for conversations without and with tools. Both are None without a
    usable template."""
    if not tokenizer.chat_template:
        return None, None
    try:
        setups = [
            template_setup(tokenizer, with_tools=with_tools, stop_texts=stop_texts) for with_tools in (False, True)
        ]
        plain, with_calls = (TemplateRenderer(replace(each, names={**each.names, **kwargs})) for each in setups)
        return plain, with_calls
    except DataError:  # the problem is reported when the template is used
        return None, None


def _numbers(values: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    return {
        name: float(value)
        for name in names
        if isinstance(value := values.get(name), int | float) and not isinstance(value, bool)
    }
