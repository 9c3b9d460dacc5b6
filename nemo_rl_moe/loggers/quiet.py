# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Holds back what packages tell on their own, which would mix with the console's lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*logger_names: str, least: int = logging.ERROR) -> Iterator[None]:
    """Inside, these loggers of Python's `logging` tell nothing below a level."""
    loggers = [logging.getLogger(name) for name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(least)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
