# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""SGLang: responses of `/generate`, saved as JSON.

Layout of SGLang 0.5.16, according to its pull requests, and to `slime/utils/types.py` (0.3.1) and
`miles/rollout/sglang_rollout.py`, which read it: `meta_info.routed_experts` is base64 of int32 without a shape. It has
one row less than there are tokens, and slots for dense layers. The first `routed_experts_start_len` rows are omitted.
The prompt's ids are in `input_token_logprobs` (`return_logprob`, `logprob_start_len=0`), or in `input_ids` if they were
saved too.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import array, expert_rows, sequence
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence


def claims(content: Any) -> bool:
    """Return True for responses with `meta_info`."""
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and isinstance(first.get("meta_info"), dict)


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    for number, response in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}: response {number}"
        if not claims(response):
            raise DataError(f"{place}: meta_info: missing, expected an object")
        meta = response["meta_info"]
        sampled = [entry[:2] for entry in meta.get("output_token_logprobs") or ()]
        tokens = response.get("output_ids") or [token for _, token in sampled]
        prompt = response.get("input_ids") or [entry[1] for entry in meta.get("input_token_logprobs") or ()]
        num_prompt, num_sampled = (
            int(meta.get("prompt_tokens", len(prompt))),
            int(meta.get("completion_tokens", len(tokens))),
        )
        length = num_prompt + num_sampled
        has_all_ids = len(prompt) == num_prompt and len(tokens) == num_sampled
        yield sequence(
            str(number),
            place,
            length,
            num_prompt,
            token_ids=[*prompt, *tokens] if has_all_ids else None,
            rollout_experts=_routes(meta, length, model, f"{place}: meta_info.routed_experts"),
            rollout_logprobs=[logprob for logprob, _ in sampled] or None,
        )


def _routes(meta: Mapping[str, Any], length: int, model: RouterShape | None, place: str) -> np.ndarray | None:
    value, first = meta.get("routed_experts"), int(meta.get("routed_experts_start_len") or 0)
    if value is None:
        return None
    if isinstance(value, str):
        if model is None:
            raise DataError(f"{place}: has no shape; add --model DIR, whose config.json has it")
        try:
            numbers = np.frombuffer(base64.b64decode(value, validate=True), dtype=np.int32)
        except ValueError as error:
            raise DataError(f"{place}: not base64 of int32: {error}") from error
        rows, topk = max(length - 1 - first, 0), model.topk
        layers = next((n for n in (model.num_layers, len(model.moe_layers)) if numbers.size == rows * n * topk), None)
        if layers is None:
            raise DataError(
                f"{place}: got {numbers.size} numbers, expected {rows} rows of {model.num_layers} layers (or"
                f" {len(model.moe_layers)} layers with experts) and {topk} experts each"
            )
        value = numbers.reshape(rows, layers, topk)
    return expert_rows(array(value, place), length, place, first=first)
