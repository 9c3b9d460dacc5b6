# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts and engines have the runner's event loop, handle no signals and inspect no stacks of other code."""

import ast
from pathlib import Path

import nemo_rl_moe

PACKAGE = Path(nemo_rl_moe.__file__).parent
FORBIDDEN = {
    "new_event_loop",
    "run_until_complete",
    "run_forever",
    "set_task_factory",
    "_current_frames",
    "currentframe",
    "extract_stack",
    "pthread_kill",
    "setitimer",
}
RUN = {("asyncio", "run"), ("signal", "signal")}
LOOPS = {
    "rollouts/loops.py": "the runner's, in its thread or in its caller's",
    "rollouts/process/serve.py": "of an environment's process",
    "rollouts/agents/server.py": "of the endpoint's thread in that process",
    "rollouts/agents/worker.py": "of a coroutine of the user's in an agent's process",
}


def uses_of(path: Path) -> set[str]:
    """Return the forbidden names that a module calls or reads."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in FORBIDDEN or (owner, node.attr) in RUN:
                found.add(f"{owner}.{node.attr}")
    return found


def test_no_module_has_an_event_loop_a_signal_handler_or_looks_at_stacks() -> None:
    modules = [path for name in ("rollouts", "generation") for path in sorted((PACKAGE / name).rglob("*.py"))]
    assert len(modules) > 50
    uses = {str(path.relative_to(PACKAGE)): uses_of(path) for path in modules}
    assert {name for name, found in uses.items() if found} == set(LOOPS)
    assert not any("signal" in each or "frame" in each or "stack" in each for found in uses.values() for each in found)
