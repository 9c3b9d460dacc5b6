# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Run-wide inputs of the chat template, in the configuration of each algorithm."""

import pytest

from nemo_rl_moe.config.loading import load_any_config
from tests.unit.config.conftest import refused

TOOL = "{type: function, function: {name: add, parameters: {type: object}}}"
FORM = 'expected the definition of a tool: {"type": "function", "function": {"name": ..., "parameters": ...}}'


@pytest.mark.parametrize("config", ["sft_tiny_moe.yaml", "dpo_tiny_moe.yaml", "rm_tiny_moe.yaml", "grpo_tiny_moe.yaml"])
def test_tools_and_names_are_taken_as_they_are(config: str) -> None:
    overrides = [f"data.tools=[{TOOL}]", "+data.chat_template_kwargs.enable_thinking=false"]
    data = load_any_config(config, overrides, check_paths=False).data  # type: ignore[attr-defined]
    assert data.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert data.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("config", ["sft_tiny_moe.yaml", "dpo_tiny_moe.yaml", "rm_tiny_moe.yaml", "grpo_tiny_moe.yaml"])
@pytest.mark.parametrize(
    ("override", "line"),
    [
        (f"data.tools=[{TOOL}, {{name: add}}]", f"data.tools[1]: {FORM}"),
        ("data.tools=[{function: {name: 3}}]", f"data.tools[0]: {FORM}"),
        ("data.tools=[add]", "data.tools: got ['add'] (list), expected a list of sections"),
        ("data.tools=null", "data.tools: got null, expected a list of sections"),
        (
            "+data.chat_template_kwargs.messages=[]",
            "data.chat_template_kwargs: the run itself sets messages; expected other names, such as enable_thinking",
        ),
        ("data.chat_template_kwargs=3", "data.chat_template_kwargs: got 3 (int), expected a section"),
    ],
)
def test_what_is_wrong_is_reported(config: str, override: str, line: str) -> None:
    assert refused(load_any_config, config, [override], check_paths=False) == [line]
