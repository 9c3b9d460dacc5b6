# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models as transformers makes, writes and computes them, and batches with images for them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, ModelInput, TokenBatch
from nemo_rl_moe.models.images import IS_IMAGE, ModelImage, image_inputs, images_in

VOCABULARY = 64
IMAGE, VIDEO, VISION_START, VISION_END = 60, 59, 61, 62
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
"""Height and width of the pixels of an image token, in every model here."""
MEAN, STD = [0.5, 0.4, 0.3], [0.3, 0.25, 0.2]
_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TOKENS: Mapping[str, int] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_QWEN_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}
_QWEN3: Mapping[str, Any] = {
    **_TOKENS,
    "tie_word_embeddings": False,
    "text_config": {
        **_TEXT,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {**_QWEN_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


_QWEN3_5: Mapping[str, Any] = {
    **_TOKENS,
    "tie_word_embeddings": False,
    "text_config": {
        **_TEXT,
        # Half of each head is rotated, so that each axis has angles of its own.
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rms_norm_eps": 1e-3,
    },
    "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16},
}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        **_TOKENS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
        },
        # Windows of two image tokens, so that one layer sees less than the other.
        "vision_config": {**_QWEN_TOWER, "window_size": 2 * SIDE, "fullatt_block_indexes": [1]},
    },
    # Neither tensor of the experts is square, so that its shape says which way it lies.
    "qwen3_vl_moe": {
        **_QWEN3,
        "text_config": {
            **_QWEN3["text_config"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "router_aux_loss_coef": 0.01,
        },
    },
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": {
        **_QWEN3_5,
        "text_config": {
            **_without(_QWEN3_5["text_config"], "intermediate_size"),
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "router_aux_loss_coef": 0.01,
        },
    },
    # Tiles of four by four image tokens.
    "internvl": {
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
        "downsample_ratio": 0.5,
        "image_seq_length": 16,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_moe",
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [4 * SIDE, 4 * SIDE],
            "patch_size": [PATCH, PATCH],
            "initializer_range": 0.1,
        },
    },
}
"""By `model_type`."""
MODELS = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "internvl")


def tiny_vision_config(model_type: str, **text: Any) -> Any:
    """Return a configuration as transformers has it, with sections.

    Args:
        model_type: One of `MODELS`.
        text: Fields of the decoder.
    """
    from transformers import AutoConfig

    fields = json.loads(json.dumps(_FIELDS[model_type]))
    fields["text_config"] |= text
    return AutoConfig.for_model(model_type, **fields)


def write_vision_model(model_type: str, folder: Path, seed: int = 0, **text: Any) -> None:
    """Write a Hugging Face folder with random weights, of which none is 0 or 1 or too small to show."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = tiny_vision_config(model_type, **text)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "token" in name.split(".")[-1]:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
            elif parameter.std() == 0 or "experts" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    kind = (
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 4 * SIDE, "width": 4 * SIDE}}
        if model_type == "internvl"
        else {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE}
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, "image_mean": MEAN, "image_std": STD}))


def random_image(height: int, width: int, seed: int) -> ModelImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height * SIDE, width * SIDE, 3), dtype=np.uint8)
    return ModelImage(pixels)


Part = int | ModelImage


def vision_batch(rows: Sequence[Sequence[Part]], seed: int = 0, prompt: int = 3) -> TokenBatch:
    """Return the sequences of so many text tokens, or images between marks; the tokens behind the last image are
    trained on.

    Args:
        rows: Of each sequence, numbers of text tokens and images.
        seed: Of the tokens.
        prompt: Tokens that are never trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences, inputs = [], []
    for parts in rows:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(1, VIDEO, (part,), generator=generator).tolist()
            else:
                tokens = part.pixels.shape[0] // SIDE * (part.pixels.shape[1] // SIDE)
                ids += [VISION_START, *[IMAGE] * tokens, VISION_END]
        images = [part for part in parts if isinstance(part, ModelImage)]
        sequences.append(ids)
        inputs.append(image_inputs(images, np.array(ids) == IMAGE))
    lengths = torch.tensor([len(ids) for ids in sequences])
    longest = int(lengths.max())
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        last = max((at for at, token in enumerate(ids) if token == IMAGE), default=0)
        mask[row, max(prompt, last + 1) : len(ids)] = True
    return TokenBatch(
        input_ids=input_ids,
        lengths=lengths,
        token_mask=mask,
        sample_ids=tuple(f"sample {row}" for row in range(len(rows))),
    ).with_inputs(inputs)


def mixed_batch(model_type: str, seed: int = 0) -> TokenBatch:
    """Return the eight sequences: with an image, without, with two of other sizes, with one that is there twice."""
    sizes = ((4, 4),) * 3 if model_type == "internvl" else ((2, 2), (3, 2), (1, 4))
    a, b, c = (random_image(*size, number) for number, size in enumerate(sizes))
    rows: list[list[Part]] = [[2, a, 5], [9], [3, b, 2, c, 4], [1, a, 6], [12], [7], [2, c, 3], [4, a, 1, a, 5]]
    return vision_batch(rows, seed)


def images_of_rows(batch: TokenBatch) -> list[list[ModelImage]]:
    return [images_in(inputs_of_row(batch, row)) for row in range(len(batch))]


def inputs_of_row(batch: TokenBatch, row: int) -> dict[str, ModelInput]:
    one = batch.select([row])
    shared = {name: ModelInput(column.arrays[0], Axis.SHARED) for name, column in one.shared.items()}
    return shared | {
        name: ModelInput((col.values[0] if col.axis is Axis.TOKEN else col.values).numpy(), col.axis, col.fill)
        for name, col in one.columns.items()
    }


def transformers_inputs(model_type: str, batch: TokenBatch) -> dict[str, Tensor]:
    """Return what transformers' model takes of a batch: pixels as its image processors make them, written down
    once more.
    """
    images = [image for row in images_of_rows(batch) for image in row]
    columns = batch.input_ids.shape[1]
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": (torch.arange(columns)[None] < batch.lengths[:, None]).long(),
    }
    if not images:
        return inputs
    scaled = [(image.pixels / 255.0 - np.array(MEAN)) / np.array(STD) for image in images]
    if model_type == "internvl":
        tiles = np.stack([tile.transpose(2, 0, 1) for tile in scaled])
        return inputs | {"pixel_values": torch.tensor(tiles, dtype=torch.float32)}
    values, grids = [], []
    for image in scaled:
        rows, cols = image.shape[0] // PATCH, image.shape[1] // PATCH
        grids.append((1, rows, cols))
        for top in range(0, rows, MERGE):
            for left in range(0, cols, MERGE):
                for row in range(top, top + MERGE):
                    for col in range(left, left + MERGE):
                        patch = image[row * PATCH : (row + 1) * PATCH, col * PATCH : (col + 1) * PATCH]
                        values.append(np.stack([patch.transpose(2, 0, 1)] * 2, 1).reshape(-1))
    return inputs | {
        "pixel_values": torch.tensor(np.array(values), dtype=torch.float32),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": batch.columns[IS_IMAGE].values.long(),
    }
