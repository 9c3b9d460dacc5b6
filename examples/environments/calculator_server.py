# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A calculator as a server of the Model Context Protocol, for grpo_tiny_moe_mcp.yaml: python calculator_server.py."""

import ast
import operator
from collections.abc import Callable

try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:  # before release 2
    from mcp.server.fastmcp import FastMCP as Server

MOST_CHARACTERS = 40
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of whole numbers with + - * // and parentheses."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"expected at most {MOST_CHARACTERS} characters")
    return str(value_of(ast.parse(expression, mode="eval").body))


def value_of(node: ast.expr) -> int:
    """Compute a part of an expression.

    Raises:
        ValueError: The part is not supported.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("expected whole numbers with + - * // and parentheses")


if __name__ == "__main__":
    server = Server("calculator")
    server.add_tool(calculator)
    server.run("stdio")
