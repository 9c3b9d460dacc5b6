# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of 8-bit formats: always off."""

import contextlib
from collections.abc import Iterator


class FP8GlobalStateManager:
    """Off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False."""
        return False


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **kwargs: object) -> Iterator[None]:
    """Nothing, where it is not enabled."""
    if enabled:
        raise NotImplementedError("no 8-bit formats without a GPU")
    yield


fp8_model_init = fp8_autocast
