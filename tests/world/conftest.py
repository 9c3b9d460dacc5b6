# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Published files in `.world/`, for the tests of this folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.published_packages import PACKAGES

Published = Callable[[str], Path]
_REQUIRED = os.environ.get("NEMO_RL_MOE_WORLD", "").split()
"""Packages whose absence is a failure; continuous integration sets it."""


@pytest.fixture(scope="session")
def published() -> Published:
    """Returns the folder of a package by its name; skips a test whose package has not been downloaded."""
    by_key = {package.key: package for package in PACKAGES}

    def folder(key: str) -> Path:
        package = by_key[key]
        if not package.is_there():
            message = f".world/{key} is not there: make world downloads it ({package.megabytes} MB)"
            if key in _REQUIRED:
                pytest.fail(message)
            pytest.skip(message)
        return package.folder

    return folder
