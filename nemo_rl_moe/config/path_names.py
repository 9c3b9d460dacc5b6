# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of files and folders that a file system can have."""

import os

LONGEST_PART, LONGEST_PATH = 255, 4095
"""Bytes of a file's name, and of a whole path, on Linux."""


def unusable_path(name: str) -> str | None:
    """Return the problem of a name that no file can have; None where one can."""
    if "\0" in name:
        return "holds a NUL character"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "holds a character that no file name can have"
    if len(encoded) > LONGEST_PATH or any(len(part) > LONGEST_PART for part in encoded.split(b"/")):
        return f"is longer than a file's name can be ({LONGEST_PART} bytes, a whole path {LONGEST_PATH})"
    return None
