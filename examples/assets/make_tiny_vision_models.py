# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes two model folders for the task of coloured shapes: InternVL and Qwen3-VL, both with experts, without weights.

    python examples/assets/make_tiny_vision_models.py [FOLDER]

The files depend only on this script, and are committed in examples/assets/tiny_internvl_moe and tiny_qwen3_vl_moe. Both
models take images of 32 x 32 pixels as 16 image tokens. The vocabulary has the words of the task's questions and
answers, and no token for "unknown": text with any other word is an error.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Punctuation, Sequence, WhitespaceSplit

PAD, END = "<pad>", "<eos>"
WORDS = (
    *map(str, range(10)),
    *("red", "green", "blue", "yellow", "purple", "orange", "left", "right"),
    *("how", "many", "shapes", "colour", "of", "the", "largest", "shape", "which", "side", "has", "more", "dots", "?"),
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
INTERNVL_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
VOCABULARY_SIZE = 64

CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}\n"
    "{%- elif message.content is string -%}\n"
    "{{- message.content -}}\n"
    "{%- else -%}\n"
    "{%- for part in message.content -%}\n"
    "{%- if part.type == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part.text -}}{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
)
"""Concatenates turns, since a question ends in a question mark. IMAGE is replaced by each model's image tokens."""

DECODER: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "eos_token_id": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    # Models of this size learn far more slowly with the usual 0.02.
    "initializer_range": 0.06,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.01,
    "use_cache": True,
    "vocab_size": VOCABULARY_SIZE,
}
_TOWER: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.06}


def vocabulary(special: tuple[str, ...]) -> dict[str, int]:
    """Return the ids of all tokens, padding and the end token first."""
    return {token: index for index, token in enumerate((PAD, END, *special, *WORDS))}


def internvl_config() -> dict[str, Any]:
    """Return a configuration with a Qwen3-MoE decoder, tiles of one size and one-dimensional positions."""
    ids = vocabulary(INTERNVL_TOKENS)
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "dtype": "float32",
        "image_seq_length": 16,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {
            **DECODER,
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **_TOWER,
            "image_size": [32, 32],
            "model_type": "internvl_vision",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "patch_size": [4, 4],
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def qwen3_vl_config() -> dict[str, Any]:
    """Return a configuration with three-dimensional positions, which adds the output of the tower's first block after
    the decoder's first layer.
    """
    ids = vocabulary(QWEN_TOKENS)
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "dtype": "float32",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **DECODER,
            "model_type": "qwen3_vl_moe_text",
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [8, 4, 4],
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
        "tie_word_embeddings": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            **_TOWER,
            "deepstack_visual_indexes": [0],
            "depth": 2,
            "model_type": "qwen3_vl_moe_vision",
            "num_heads": 4,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3, "rescale_factor": 1 / 255}
INTERNVL_PROCESSOR = {
    **_COLOURS,
    "crop_to_patches": False,
    "image_processor_type": "GotOcr2ImageProcessor",
    "max_patches": 1,
    "min_patches": 1,
    "processor_class": "InternVLProcessor",
    "size": {"height": 32, "width": 32},
}
QWEN_PROCESSOR = {
    **_COLOURS,
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "patch_size": 4,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 64 * 64, "shortest_edge": 16 * 16},
    "temporal_patch_size": 2,
}


def build_tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """Make a tokenizer with a token for each word, and special tokens, which it finds first."""
    tokenizer = Tokenizer(WordLevel(vocabulary(special)))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Punctuation()])
    tokenizer.add_special_tokens([PAD, END, *special])
    return tokenizer


def write_model_folder(
    folder: Path,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    special: tuple[str, ...],
    shown: str,
    names: Mapping[str, str],
) -> None:
    """Write one folder, which may exist.

    Args:
        config: Content of `config.json`.
        processor: Content of `preprocessor_config.json`.
        special: Tokens for images.
        shown: Text for an image in the chat template.
        names: Names of special tokens for the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        **({"extra_special_tokens": dict(names)} if names else {}),
        "model_max_length": DECODER["max_position_embeddings"],
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", processor),
        ("tokenizer_config.json", tokenizer),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("IMAGE", shown), encoding="utf-8")
    (folder / "tokenizer.json").write_text(build_tokenizer(special).to_str(pretty=True) + "\n", encoding="utf-8")


def write_model_folders(folder: Path) -> None:
    """Write both folders."""
    ends = {
        "context_image_token": "<IMG_CONTEXT>",
        "end_image_token": "</img>",
        "start_image_token": "<img>",
        "video_token": "<video>",
    }
    write_model_folder(
        folder / "tiny_internvl_moe", internvl_config(), INTERNVL_PROCESSOR, INTERNVL_TOKENS, "<IMG_CONTEXT>", ends
    )
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    write_model_folder(folder / "tiny_qwen3_vl_moe", qwen3_vl_config(), QWEN_PROCESSOR, QWEN_TOKENS, shown, {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent, help="default: this file's")
    write_model_folders(parser.parse_args().folder)
