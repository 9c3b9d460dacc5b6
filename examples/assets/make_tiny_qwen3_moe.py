# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the demo's model folder: a configuration of 1.8 million parameters and a tokenizer of 45 tokens, no weights.

    python examples/assets/make_tiny_qwen3_moe.py [FOLDER]

What it writes depends on nothing but this file, and stands in examples/assets/tiny_qwen3_moe.

Tokens: one for each character that sums, their working and lower-case words need, `<think>` and `</think>`, padding and
the end token. There is none for "unknown": text with any other character is an error and not silently something else.
The chat template joins the turns without role tokens, so that the prompt `228+378=` and its answer read as one sum.
"""

import argparse
import json
from pathlib import Path
from string import ascii_lowercase, digits

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

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
    # Larger than the usual 0.02, with which a model of this size learns far more slowly.
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


def build_tokenizer() -> Tokenizer:
    """One token a character; the four longer ones are found before a text is cut into characters."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([PAD, END])
    # Not special: a response that is decoded without special tokens must keep them, its answer stands after `</think>`.
    tokenizer.add_tokens([OPEN_THINK, CLOSE_THINK])
    return tokenizer


def write_model_folder(folder: Path) -> None:
    """Writes the four files; the folder may exist."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(_as_json(MODEL_CONFIG), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(_as_json(TOKENIZER_CONFIG), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "tiny_qwen3_moe"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: beside this file")
    write_model_folder(parser.parse_args().folder)
