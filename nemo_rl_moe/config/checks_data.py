# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the chat template's inputs other than messages."""

from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.config.tool_definitions import definition_problem, reserved_name_problem


def tools_are_definitions(config: Any) -> Iterator[str]:
    """Check that the definitions of the run's tools have the standard form."""
    for index, tool in enumerate(config.data.tools):
        if (problem := definition_problem(tool)) is not None:
            yield f"data.tools[{index}]: {problem}"


def template_names_are_free(config: Any) -> Iterator[str]:
    """Check that `data.chat_template_kwargs` has no variable that the run itself sets."""
    if (problem := reserved_name_problem(config.data.chat_template_kwargs)) is not None:
        yield f"data.chat_template_kwargs: {problem}"


DATA_RULES = (tools_are_definitions, template_names_are_free)
