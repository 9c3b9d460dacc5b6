# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors in one line, for messages and for the log of samples."""

LONGEST = 300


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its text; for errors of others, whose text may itself be broken."""
    name = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return name
    return f"{name}: {lines[0]}"[:LONGEST] if lines else name
