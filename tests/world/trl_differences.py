# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where spans of published templates differ from those of TRL's training variants, and why ours are right."""

from collections.abc import Mapping
from dataclasses import dataclass

ASSISTANT = "<\uff5cAssistant\uff5c>"


@dataclass(frozen=True)
class Difference:
    """A difference, of which everything but the reason is checked.

    Attributes:
        reason: Why what we train on is right.
        trl_alone: Pieces of the same text that TRL alone trains on.
        ours_alone: Pieces of the same text that we alone train on.
        is_refused: The published template leaves out a part of the conversation: we refuse it.
        is_other_text: TRL's variant renders another text than the published template, or than ours in its place.
    """

    reason: str
    trl_alone: frozenset[str] = frozenset()
    ours_alone: frozenset[str] = frozenset()
    is_refused: bool = False
    is_other_text: bool = False


def _prompted(*pieces: str) -> Difference:
    return Difference(
        "the generation prompt gives it: in rollouts the model never writes it", trl_alone=frozenset(pieces)
    )


LEFT_OUT = Difference("TRL trains on what is left of a conversation of which a part is not shown", is_refused=True)
CLOSED = Difference(
    "the generation prompt closes the think block: a turn that thinks answers no such prompt", is_refused=True
)
TEXT_BEHIND_RESULTS = Difference(
    "the text beside calls is moved behind their results: no generation gives that", is_refused=True
)
HISTORY = Difference(
    "TRL keeps the thinking of earlier turns, or writes empty blocks in them, which at inference are not there",
    is_other_text=True,
)
THINKING_DROPPED = Difference(
    "TRL's variant drops the last turn's thinking behind a prompt that opens it; our corrected template keeps it",
    is_other_text=True,
)
THINKING_IN_CONTENT = Difference(
    "we move thinking from the content to the key that the template reads; TRL trains on <think> within an answer",
    is_other_text=True,
)
R1 = _prompted(ASSISTANT)
NEMOTRON = _prompted("<think></think>")
NEMOTRON_THINKS = _prompted("<think></think>", "<think>")
OPENED = _prompted("<think>")
CLOSED_BY_PROMPT = _prompted("<think>\n\n</think>")
GLIMMER = _prompted("<|start|>assistant")
HARMONY = Difference(
    "the prompt gives the header, and <|return|> alone ends a generation: the template writes <|end|> in its place "
    "once a turn follows, and a model that learned to write it would not stop",
    trl_alone=frozenset({"<|start|>assistant", "<|end|>"}),
)
ENDED_TWICE = Difference(
    "generation stops at the first end token; the template writes a second one at the end of a text",
    trl_alone=frozenset({"<|end|>"}),
)
GEMMA_CALLS = Difference(
    "generation stops at <|tool_response>, which is one of the family's stop tokens",
    ours_alone=frozenset({"<|tool_response>"}),
)

_SHOWS_NO_THINKING = {"reason": LEFT_OUT}
_SHOWS_NO_CALLS = {**_SHOWS_NO_THINKING, "tool": LEFT_OUT, "calls": LEFT_OUT}
_NEMOTRON = {
    **dict.fromkeys(("chat", "tool", "calls"), NEMOTRON),
    **dict.fromkeys(("think", "reason"), NEMOTRON_THINKS),
}
_QWEN3_5 = {**dict.fromkeys(("chat", "think", "reason", "tool"), HISTORY), "calls": OPENED}
_PHI3 = {**_SHOWS_NO_CALLS, "chat": ENDED_TWICE, "think": ENDED_TWICE}
_LISTS_ALONE = dict.fromkeys(("chat", "think", "reason", "calls"), LEFT_OUT)

TRL_DIFFERENCES: Mapping[str, Mapping[str, Difference]] = {
    "cohere": _SHOWS_NO_THINKING,
    "cohere2": _SHOWS_NO_THINKING,
    "deepseek_r1_distill": {**_SHOWS_NO_CALLS, "think": LEFT_OUT, "chat": R1},
    "deepseekv3": {
        "chat": R1,
        "think": THINKING_DROPPED,
        "reason": THINKING_DROPPED,
        **dict.fromkeys(("tool", "calls"), LEFT_OUT),
    },
    "diffusion_gemma": {"think": THINKING_IN_CONTENT, "tool": GEMMA_CALLS, "calls": TEXT_BEHIND_RESULTS},
    "gemma": _SHOWS_NO_THINKING,
    "gemma3": _SHOWS_NO_THINKING,
    "gptoss": {
        **dict.fromkeys(("chat", "reason", "tool"), HARMONY),
        "think": THINKING_IN_CONTENT,
        "calls": LEFT_OUT,
    },
    "idefics3": _LISTS_ALONE,
    "lfm2": _SHOWS_NO_CALLS,
    "lfm2_v2": _SHOWS_NO_THINKING,
    "llama3": _SHOWS_NO_CALLS,
    "muse_glimmer": {
        **dict.fromkeys(("chat", "reason", "tool", "calls"), GLIMMER),
        "think": THINKING_IN_CONTENT,
    },
    **dict.fromkeys(("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), _NEMOTRON),
    "phi3": _PHI3,
    "phi3_5": _PHI3,
    "qwen2_5": _SHOWS_NO_THINKING,
    "qwen2_5_vl": _SHOWS_NO_CALLS,
    "qwen3": dict.fromkeys(("chat", "think", "reason", "tool", "calls"), HISTORY),
    "qwen3_5_nothink": {
        **dict.fromkeys(("chat", "tool"), HISTORY),
        **dict.fromkeys(("think", "reason"), CLOSED),
        "calls": CLOSED_BY_PROMPT,
    },
    "qwen3_5_think": _QWEN3_5,
    "qwen3_6": _QWEN3_5,
    "qwen3_8": {**dict.fromkeys(("chat", "reason", "tool", "calls"), OPENED), "think": THINKING_IN_CONTENT},
    "qwen3_instruct_2507": _SHOWS_NO_THINKING,
    "qwen3_vl": _SHOWS_NO_THINKING,
    "smolvlm": _LISTS_ALONE,
}
"""By the template's name and the kind of conversation; in all other cases both are equal, or neither takes it."""
