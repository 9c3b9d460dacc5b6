# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM: responses of its server, or `RequestOutput`s, saved as JSON, one per file or one per line.

Layouts by vLLM's documentation and pull requests: up to 0.20, `routed_experts` of a completion covers the full
sequence, with slots for dense layers. 0.21 (`training/routed_experts_replay`) has `prompt_routed_experts` of the
response and `routed_experts` of each completion. Later releases (`training/routed_experts`) again cover the full
sequence, as base64 of a `.npy` file. By the code of 0.32 (`vllm/entrypoints/openai/completion/serving.py`,
`vllm/v1/engine/output_processor.py`) there is a row for each token but the last, and but the first ones that
`routed_experts_prompt_start` of the request omits. A response has token ids if the request has `return_token_ids`.
"""

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.layout import array, expert_rows, sequence
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence


def claims(content: Any) -> bool:
    """Return True for responses with choices or outputs."""
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and isinstance(first.get("choices", first.get("outputs")), list)


def read(content: Any, where: str, model: RouterShape | None) -> Iterator[CapturedSequence]:
    for number, response in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}: response {number}"
        if not claims(response):
            raise DataError(f"{place}: choices: missing, expected completions")
        for index, choice in enumerate(response.get("choices", response.get("outputs"))):
            yield _completion(response, choice, f"{number}-{index}", f"{place}: choice {index}")


def _completion(response: Mapping[str, Any], choice: Mapping[str, Any], name: str, place: str) -> CapturedSequence:
    tokens = choice.get("token_ids")
    prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    if tokens is None or prompt is None:
        missing = "token_ids" if tokens is None else "prompt_token_ids"
        raise DataError(f"{place}: {missing}: missing, expected numbers; ask for return_token_ids")
    length = len(prompt) + len(tokens)
    routes = _routes(choice.get("routed_experts"), f"{place}: routed_experts")
    if routes is not None and response.get("prompt_routed_experts") is not None:
        of_prompt = _routes(response["prompt_routed_experts"], f"{place}: prompt_routed_experts")
        if of_prompt is None or of_prompt.shape[1:] != routes.shape[1:]:
            raise DataError(f"{place}: prompt_routed_experts: expected as many layers and experts as in routed_experts")
        if len(of_prompt) != len(prompt):
            raise DataError(f"{place}: prompt_routed_experts: got {len(of_prompt)} rows, expected {len(prompt)}")
        routes = np.concatenate([of_prompt, routes])
    elif routes is not None and routes.ndim == 3:  # the last row is that of the last token that the engine was fed
        routes = expert_rows(routes, length, f"{place}: routed_experts", first=max(length - 1 - len(routes), 0))
    return sequence(
        name,
        place,
        length,
        len(prompt),
        token_ids=[*prompt, *tokens],
        rollout_experts=routes,
        rollout_logprobs=_logprobs(choice.get("logprobs"), tokens, place),
    )


def _routes(value: Any, place: str) -> np.ndarray | None:
    if not isinstance(value, str):
        return None if value is None else array(value, place)
    try:
        found: np.ndarray = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{place}: not base64 of a .npy file: {error}") from error
    return found


def _logprobs(value: Any, tokens: list[int], place: str) -> list[float] | None:
    """Return the log-probability of each token, from any of the forms in which vLLM returns them."""
    if isinstance(value, dict):
        value = value.get("token_logprobs") or value.get("content")
    if not value:
        return None
    try:
        return [float(_of_token(entry, token)) for entry, token in zip(value, tokens, strict=True)]
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{place}: logprobs: expected one for each of {len(tokens)} tokens: {error}") from error


def _of_token(entry: Any, token: int) -> Any:
    if not isinstance(entry, dict):
        return entry
    found = entry if "logprob" in entry else entry[str(token)]
    return found["logprob"] if isinstance(found, dict) else found
