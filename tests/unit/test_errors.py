# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors as texts."""

from nemo_rl_moe.errors import UserError


def test_the_text_of_an_error_has_no_control_characters() -> None:
    error = UserError(["a\x1b]0;x\x07", "b"])
    assert str(error) == "a\\x1b]0;x\\x07\nb"
    assert error.problems == ["a\x1b]0;x\x07", "b"]
