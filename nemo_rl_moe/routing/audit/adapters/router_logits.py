# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: router logits of a forward pass (`output_router_logits=True`), by layer.

Layout: a `torch.save` or safetensors file with `input_ids` and, for padded sequences, `attention_mask`
`[sequences, tokens]`, and the model's `router_logits`: a tuple of `[sequences x tokens, experts]` per layer with
experts, as in transformers 5.19 (`modeling_outputs.py`). In safetensors they are `router_logits.0`, `.1`, ... Optional
are `logprobs` `[sequences, tokens]` of each token given the previous ones. The experts are the `topk` largest logits,
and margins are differences of their softmax. They count as routes of training.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import array, padded_column, padded_sequences, real_tokens
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_PREFIX = "router_logits."


def claims(content: Any) -> bool:
    """Return True for router logits with token ids."""
    return isinstance(content, dict) and "input_ids" in content and bool(_logits(content))


def _logits(content: Mapping[str, Any]) -> list[Any]:
    if isinstance(content.get("router_logits"), list | tuple):
        return list(content["router_logits"])
    names = [name for name in content if isinstance(name, str) and name.startswith(_PREFIX)]
    return [content[name] for name in sorted(names, key=lambda name: (len(name), name))]


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    if model is None:
        raise DataError(f"{where}: router_logits: lacks the number of experts per token; add --model DIR (config.json)")
    if not model.plain_topk:
        raise DataError(
            f"{where}: router_logits: do not suffice, since routers of {model.family} need not choose the experts with"
            " the largest logits"
        )
    tokens = array(content["input_ids"], f"{where}: input_ids")
    real = real_tokens(content.get("attention_mask", np.ones_like(tokens)), f"{where}: attention_mask")
    layers = [array(logits, f"{where}: router_logits") for logits in _logits(content)]
    expected = (tokens.size, model.num_experts)
    if real.shape != tokens.shape or any(logits.size != expected[0] * expected[1] for logits in layers):
        shapes = [list(logits.shape) for logits in layers[:4]]
        raise DataError(f"{where}: router_logits: got {shapes}, expected {list(expected)} of each layer with experts")
    stacked = torch.from_numpy(np.stack([logits.astype(np.float32).reshape(*tokens.shape, -1) for logits in layers], 2))
    best = stacked.softmax(-1).topk(min(model.topk + 1, model.num_experts), dim=-1)
    columns = {
        "token_ids": tokens,
        "training_experts": best.indices[..., : model.topk].numpy(),
        "training_logprobs": padded_column(content, "logprobs", (tokens.shape[0], tokens.shape[1]), where),
    }
    if model.topk < model.num_experts:
        columns["margins"] = (best.values[..., model.topk - 1] - best.values[..., model.topk]).numpy()
    yield from padded_sequences(where, real, columns)
