# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A published chat template with a tokenizer, as a run has them, and what becomes of conversations of each kind."""

import json
import re
from typing import Any

import numpy as np

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.continuation import Continuation, SampledTurn
from nemo_rl_moe.data.corrected_templates import correct_template
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import BadLine, parse_record
from nemo_rl_moe.data.speech import Published, describe_speech
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.data.turn_ends import UNTRAINED_END
from nemo_rl_moe.data.turn_glue import NoExtension, Rewritten
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.tools.detection import format_of, require_definitions
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.world.conversations import CALL, CONVERSATIONS, TOOL, record, result, user

LONG = 100_000
RIGHT, ANEW, REFUSED, WRONG = "yes", "anew", "no", "WRONG"
_WORDS = re.compile(r"(?:ANS|PRE|ARG|THK)[0-9ab]")
_OTHERS = re.compile(r"(?:SYS|USR|RES)\d")


def runs(mask: Any) -> list[tuple[int, int]]:
    """Return the first place and the one behind the last of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


class Spoken:
    """A tokenizer with its chat template.

    Args:
        named: Ids of the end tokens that the model's files name.
        kwargs: Names for the chat template, as a run sets them.
    """

    def __init__(self, tokenizer: Any, named: list[int], kwargs: dict[str, bool]):
        self.tokenizer = tokenizer
        self.corrected = correct_template(tokenizer, "auto")
        self.speech = describe_speech(tokenizer, Published({"eos_token_id": named}, {}), kwargs)
        self.run_wide = TemplateInputs(kwargs=kwargs)

    def inputs(self, *, with_tools: bool) -> TemplateInputs:
        return TemplateInputs((TOOL,) if with_tools else (), self.run_wide.kwargs)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenize(self, line: dict[str, Any]) -> TokenizedExample | BadLine:
        """Tokenize a record of SFT."""
        tokenize = batch_tokenizer(self.tokenizer, LONG, self.run_wide, speech=self.speech)
        (found,) = tokenize([parse_record(json.loads(json.dumps(line)), "f:1")])
        return found

    def trained(self, found: TokenizedExample) -> list[str]:
        """Return the text of each run of trained tokens."""
        return [self.tokenizer.decode(found.input_ids[first:end]) for first, end in runs(found.token_mask)]

    def mask(self, kind: str) -> tuple[str, str]:
        """Return what becomes of a conversation in SFT, and the reason.

        It is right if all of the assistant's words are trained on, except thinking that the template drops, no words of
        others are, and each turn ends with a stop token or is not the last.
        """
        found = self.tokenize(record(kind))
        if isinstance(found, BadLine):
            return REFUSED, found.reason
        inside = "\n".join(self.trained(found))
        outside = self.tokenizer.decode(found.input_ids[~found.token_mask])
        words = set(_WORDS.findall(json.dumps(CONVERSATIONS[kind])))
        lost = sorted(word for word in words if word not in inside and not word.startswith("THK"))
        problems = [f"{word} is not trained on" for word in lost if not found.notes]
        problems += [f"{word} is not in the mask" for word in sorted(words) if word in outside]
        problems += [f"{word} is trained on" for word in sorted(set(_OTHERS.findall(inside)))]
        ends = self.trained(found)[-1].rstrip().endswith(self.speech.stop_texts)
        if self.speech.turn_end and not ends and UNTRAINED_END not in found.notes:
            problems.append("the last turn has no end")
        return (WRONG, "; ".join(problems)) if problems else (RIGHT, "; ".join(found.notes))

    def followed(self, sampled: str, *, by_result: bool) -> tuple[str, str]:
        """Return how a conversation continues behind a sampled turn: the tokens are kept, or a sequence begins anew.

        Args:
            by_result: A tool's result follows a call, else a user's message follows an answer.
        """
        continuation = Continuation(self.tokenizer)
        inputs = self.inputs(with_tools=by_result)
        new = result(1, "RES1") if by_result else user("USR2")
        try:
            begun = continuation.begin([user("USR1")], inputs)
            turn = SampledTurn(begun.messages, self.ids(sampled), self.speech.stop_token_ids, inputs, begun.text)
            try:
                found = continuation.extend(turn, [new])
            except Rewritten as rewritten:
                anew = continuation.begin_anew(turn, [new], 1)
                words = ("USR1", *_WORDS.findall(sampled.rpartition("</think>")[2]), str(new["content"]))
                lost = [word for word in words if word not in anew.text]
                return (WRONG, f"{lost} are lost") if lost else (ANEW, str(rewritten))
        except (NoExtension, RecordError) as problem:
            return REFUSED, str(problem)
        text = self.tokenizer.decode([*begun.token_ids, *turn.token_ids, *found.token_ids])
        return (RIGHT, text) if str(new["content"]) in text else (WRONG, text)

    def tool_format(self) -> tuple[str, str]:
        """Return the name of the format of calls, or `no` with the reason."""
        try:
            require_definitions(self.tokenizer, self.run_wide)
            found = format_of(self.tokenizer, None, self.run_wide)
        except (ConfigurationError, DataError) as error:
            return REFUSED, str(error)
        return next(name for name, known in TOOL_FORMATS.items() if known is found), ""


def call_turn(spoken: Spoken) -> str | None:
    """Return a turn with one call as the model would write it behind its prompt; None: it cannot be trained on."""
    found = spoken.tokenize(record(CALL))
    return None if isinstance(found, BadLine) else spoken.trained(found)[0]
