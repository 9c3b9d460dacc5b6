# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats by name. If vLLM has a parser for a format, the format has the parser's name."""

from nemo_rl_moe.tools.formats.expression_formats import OLMO3
from nemo_rl_moe.tools.formats.harmony import HARMONY
from nemo_rl_moe.tools.formats.json_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTION_CALLS,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
)
from nemo_rl_moe.tools.formats.tagged_formats import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER

TOOL_FORMATS = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "llama3_json": LLAMA3_JSON,
    "function_calls": FUNCTION_CALLS,
    "olmo3": OLMO3,
    "harmony": HARMONY,
}
