# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of what the chat template gets beside the messages of a run's data."""

from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.config.schema_run import TemplateInputsConfig
from nemo_rl_moe.config.tool_definitions import definition_problem, reserved_name_problem


def tools_are_definitions(config: Any) -> Iterator[str]:
    """Definitions of the run's tools: each in the standard form."""
    for index, tool in enumerate(config.data.tools if _has_inputs(config) else ()):
        if (problem := definition_problem(tool)) is not None:
            yield f"data.tools[{index}]: {problem}"


def template_names_are_free(config: Any) -> Iterator[str]:
    """Further names for the chat template: none that the run itself sets."""
    if not _has_inputs(config):
        return
    if (problem := reserved_name_problem(config.data.chat_template_kwargs)) is not None:
        yield f"data.chat_template_kwargs: {problem}"


def _has_inputs(config: Any) -> bool:
    """True unless an algorithm of the user's own has a section `data` of its own."""
    return isinstance(config.data, TemplateInputsConfig)


DATA_RULES = (tools_are_definitions, template_names_are_free)
