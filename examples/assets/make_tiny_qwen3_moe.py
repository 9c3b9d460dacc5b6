# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the demo's model folder: a configuration of 1.8 million parameters and a tokenizer of 45 tokens, no weights.

    python examples/assets/make_tiny_qwen3_moe.py [FOLDER]

The files depend only on this script, and are committed in examples/assets/tiny_qwen3_moe. Next to it, it writes
tiny_qwen3_moe_tools, the same model with a token for each byte and a chat template with tools, and
tiny_qwen3_moe_calculator for `make demo-tools`, in which the constant parts of a calculator call are single tokens.

There is a token for each character of sums, their working and lower-case words, and `<think>`, `</think>`, padding and
the end token. Without a token for "unknown", text with any other character is an error instead of silently changed. The
chat template joins the turns without role tokens, so that the prompt `228+378=` and its answer read as one sum.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, digits

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split

PAD, END = "<pad>", "<eos>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
VOCABULARY = (PAD, END, OPEN_THINK, CLOSE_THINK, *digits, *"+-=;", *ascii_lowercase, " ")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}\n"
    "{%- else -%}\n"
    "{{- message.content -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
)

TOOLS_SUFFIX = "_tools"
TOOLS_PAD, TOOLS_START, TOOLS_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOLS_VOCABULARY = (TOOLS_PAD, TOOLS_START, TOOLS_END, *sorted(ByteLevel.alphabet()))

# Qwen3's format: definitions in the system turn, calls and results in tags.
TOOLS_CHAT_TEMPLATE = (
    "{%- if tools -%}\n"
    "{{- '<|im_start|>system\\n<tools>' -}}\n"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}\n"
    "{{- '\\n</tools><|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- generation -%}\n"
    "{{- message.content -}}\n"
    "{%- for call in message.tool_calls or [] -%}\n"
    "{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}\n"
    "{{- '</tool_call>' -}}\n"
    "{%- endfor -%}\n"
    "{{- '<|im_end|>' -}}\n"
    "{%- endgeneration -%}\n"
    "{{- '\\n' -}}\n"
    "{%- elif message.role == 'tool' -%}\n"
    "{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' -}}\n"
    "{%- else -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)

CALCULATOR_SUFFIX = "_calculator"
# Calls have Qwen3's format, but the JSON around the expression is two tokens, so that a model of this size need not
# learn to spell it.
CALCULATOR_TOKENS = (
    "<tools>calculator</tools>",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "',
    '"}}</tool_call>',
    "<tool_response>",
    "</tool_response>",
)
CALCULATOR_VOCABULARY = (PAD, END, *CALCULATOR_TOKENS, *sorted(ByteLevel.alphabet()))
CALCULATOR_CHAT_TEMPLATE = (
    "{%- if tools -%}\n"
    "{{- '<tools>' + (tools | map(attribute='function.name') | join(' ')) + '</tools>' -}}\n"
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{%- generation -%}\n"
    "{{- message.content -}}\n"
    "{%- for call in message.tool_calls or [] -%}\n"
    "{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}\n"
    "{{- '</tool_call>' -}}\n"
    "{%- endfor -%}\n"
    "{{- eos_token -}}\n"
    "{%- endgeneration -%}\n"
    "{%- elif message.role == 'tool' -%}\n"
    "{{- '<tool_response>' + message.content + '</tool_response>' -}}\n"
    "{%- else -%}\n"
    "{{- message.content -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
)

MODEL_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "eos_token_id": VOCABULARY.index(END),
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    # A model of this size learns far more slowly with the usual 0.02.
    "initializer_range": 0.06,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": VOCABULARY.index(PAD),
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": len(VOCABULARY),
}

TOKENIZER_CONFIG = {
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    "pad_token": PAD,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


TOOLS_MODEL_CONFIG = {
    **MODEL_CONFIG,
    "eos_token_id": TOOLS_VOCABULARY.index(TOOLS_END),
    "max_position_embeddings": 4096,
    "pad_token_id": TOOLS_VOCABULARY.index(TOOLS_PAD),
    "vocab_size": len(TOOLS_VOCABULARY),
}
TOOLS_TOKENIZER_CONFIG = {
    **TOKENIZER_CONFIG,
    "eos_token": TOOLS_END,
    "model_max_length": TOOLS_MODEL_CONFIG["max_position_embeddings"],
    "pad_token": TOOLS_PAD,
}
CALCULATOR_MODEL_CONFIG = {**MODEL_CONFIG, "vocab_size": len(CALCULATOR_VOCABULARY)}


def build_tools_tokenizer() -> Tokenizer:
    """Make a tokenizer with a token for each byte, and for each tag of a turn."""
    tokenizer = _tokenizer_of_bytes(TOOLS_VOCABULARY)
    tokenizer.add_special_tokens([TOOLS_PAD, TOOLS_START, TOOLS_END])
    return tokenizer


def build_calculator_tokenizer() -> Tokenizer:
    """Make a tokenizer with a token for each byte, and for each constant part of calls and results."""
    tokenizer = _tokenizer_of_bytes(CALCULATOR_VOCABULARY)
    tokenizer.add_special_tokens([PAD, END])
    tokenizer.add_tokens(list(CALCULATOR_TOKENS))  # not special, since calls are parsed from decoded responses
    return tokenizer


def _tokenizer_of_bytes(vocabulary: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def build_tokenizer() -> Tokenizer:
    """Make a tokenizer with a token for each character, and four longer ones, which it finds first."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([PAD, END])
    # Not special, so that responses decoded without special tokens keep them: the answer follows `</think>`.
    tokenizer.add_tokens([OPEN_THINK, CLOSE_THINK])
    return tokenizer


def write_model_folder(folder: Path) -> None:
    """Write the four files of each model. The folders may exist."""
    calculator = folder.with_name(f"{folder.name}{CALCULATOR_SUFFIX}")
    tools = folder.with_name(f"{folder.name}{TOOLS_SUFFIX}")
    _write(folder, MODEL_CONFIG, TOKENIZER_CONFIG, CHAT_TEMPLATE, build_tokenizer())
    _write(tools, TOOLS_MODEL_CONFIG, TOOLS_TOKENIZER_CONFIG, TOOLS_CHAT_TEMPLATE, build_tools_tokenizer())
    _write(
        calculator, CALCULATOR_MODEL_CONFIG, TOKENIZER_CONFIG, CALCULATOR_CHAT_TEMPLATE, build_calculator_tokenizer()
    )


def _write(folder: Path, config: object, tokenizer_config: object, chat_template: str, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(_as_json(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(_as_json(tokenizer_config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "tiny_qwen3_moe"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: next to this file")
    write_model_folder(parser.parse_args().folder)
