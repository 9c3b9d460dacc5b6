# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A tool that computes arithmetic expressions exactly."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MOST_CHARACTERS = 1_000
MOST_DIGITS = 300
"""Maximum number of digits of a numerator or denominator."""
SIGNIFICANT_DIGITS = 12
"""Number of digits of a result that is not an integer."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_EXPECTED = "expected numbers with + - * / // % ** and parentheses, such as (12 + 7) * 3"


class _ExpressionError(ValueError):
    """An expression that has no value. The message is written for the model."""


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (12 + 7) * 3.
    """
    try:
        value = _value_of_text(expression)
    except _ExpressionError as error:
        return f"error: {error}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{SIGNIFICANT_DIGITS}g}"


def _value_of_text(expression: str) -> Fraction:
    if len(expression) > MOST_CHARACTERS:
        raise _ExpressionError(f"the expression has {len(expression):,} characters, at most {MOST_CHARACTERS:,}")
    expression = expression.strip()
    try:
        return _value(ast.parse(expression, mode="eval").body, expression)
    except _ExpressionError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise _ExpressionError(f"cannot read {expression!r}; {_EXPECTED}") from error


def _value(node: ast.expr, expression: str) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _number(node.value, ast.get_source_segment(expression, node) or "")
    if isinstance(node, ast.UnaryOp) and (sign := _UNARY.get(type(node.op))):
        return sign(_value(node.operand, expression))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, expression), _value(node.right, expression)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if compute := _BINARY.get(type(node.op)):
            if right == 0 and not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
                raise _ExpressionError("division by zero")
            return _limited(Fraction(compute(left, right)))
    part = ast.get_source_segment(expression, node)
    raise _ExpressionError(f"cannot compute {part!r}; {_EXPECTED}")


def _number(rounded: int | float, text: str) -> Fraction:
    """Return a number of the expression with its exact decimal value: 0.1 is a tenth."""
    if isinstance(rounded, float) and not (rounded == 0 or 1e-300 < rounded < 1e300):
        raise _ExpressionError(f"the number {text} is out of range")
    if rounded == 0:
        return Fraction(0)  # 1e-999999999 would take all memory
    return _limited(Fraction(text.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _ExpressionError("an exponent must be an integer")
    if base == 0 and exponent < 0:
        raise _ExpressionError("division by zero")
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if abs(exponent) * (digits - 1) > MOST_DIGITS or abs(exponent) > 10 * MOST_DIGITS:
        raise _ExpressionError(f"the result has more than {MOST_DIGITS} digits")
    return _limited(base ** int(exponent))


def _limited(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise _ExpressionError(f"the result has more than {MOST_DIGITS} digits")
    return value
