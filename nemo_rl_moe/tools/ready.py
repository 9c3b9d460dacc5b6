# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of the package, by their names in a configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_rl_moe.tools.calculator import calculator
from nemo_rl_moe.tools.local_search import search
from nemo_rl_moe.tools.python_interpreter import problem_with_isolation, python


@dataclass(frozen=True)
class ReadyTool:
    """A tool of the package. With the values of its keyword-only parameters, `problem` returns why it cannot run."""

    function: Callable[..., object]
    problem: Callable[[Mapping[str, object]], str] = lambda _: ""


READY_TOOLS = {
    "calculator": ReadyTool(calculator),
    "python": ReadyTool(python, problem_with_isolation),
    "search": ReadyTool(search),
}
