# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Built-in tools, by their names in a configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_rl_moe.tools.calculator import calculator
from nemo_rl_moe.tools.local_search import search
from nemo_rl_moe.tools.python_interpreter import problem_with_isolation, python


@dataclass(frozen=True)
class ReadyTool:
    """A built-in tool. `problem` maps the values of the tool's keyword-only parameters to the reason why the tool
    cannot run, or to an empty text."""

    function: Callable[..., object]
    problem: Callable[[Mapping[str, object]], str] = lambda _: ""


READY_TOOLS = {
    "calculator": ReadyTool(calculator),
    "python": ReadyTool(python, problem_with_isolation),
    "search": ReadyTool(search),
}
