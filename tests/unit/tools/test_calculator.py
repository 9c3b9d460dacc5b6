# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The calculator: exact values, and answers that teach where there is none."""

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4", "14"),
        (" (12 + 7) * 3 ", "57"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("12 / 4", "3"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -2", "0.25"),
        ("2 ** 100", str(2**100)),
        ("1_000 * 1_000", "1000000"),
        ("--5", "5"),
    ],
)
def test_values(expression: str, expected: str) -> None:
    assert calculator(expression) == expected


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent must be an integer"),
        ("9 ** 9 ** 9", "the result has more than 300 digits"),
        ("10 ** 400", "the result has more than 300 digits"),
        ("1 ** 99999999999", "the result has more than 300 digits"),
        ("2 ** 900 * 2 ** 900", "the result has more than 300 digits"),
        ("1e999999999", "the number 1e999999999 is out of range"),
        ("1" * 1_001, "the expression has 1,001 characters, at most 1,000"),
        ("two + 2", "cannot compute 'two'"),
        ("__import__('os').getcwd()", "cannot compute "),
        ("True + 1", "cannot compute 'True'"),
        ("[1, 2]", "cannot compute '[1, 2]'"),
        ("3 *", "cannot read '3 *'"),
        ("", "cannot read ''"),
        ("(" * 900, "cannot read "),
        ("-" * 990 + "1", "cannot read "),
        ("0x10", "cannot read '0x10'"),
        ("3 + 0\x00", "cannot read "),
    ],
)
def test_an_expression_without_a_value_gets_the_reason(expression: str, reason: str) -> None:
    assert calculator(expression).startswith(f"error: {reason}")


OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
Expression = tuple[str, Fraction | None]
"""Text and value; None where it divides by zero."""


def combined(left: Expression, sign: str, right: Expression) -> Expression:
    text = f"({left[0]} {sign} {right[0]})"
    if left[1] is None or right[1] is None or (right[1] == 0 and sign in ("/", "//", "%")):
        return text, None
    return text, Fraction(OPERATORS[sign](left[1], right[1]))


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(lambda number: (str(number), Fraction(number))),
    lambda inner: st.builds(combined, inner, st.sampled_from(sorted(OPERATORS)), inner),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_an_integer_result_is_the_exact_one(expression: Expression) -> None:
    text, exact = expression
    found = calculator(text)
    if exact is None:
        assert found == "error: division by zero"
    elif exact.denominator == 1:
        assert Fraction(found) == exact
    else:
        assert float(found) == pytest.approx(float(exact), rel=1e-11)


@given(st.text(max_size=40))
def test_any_text_gets_an_answer(text: str) -> None:
    assert calculator(text)
