# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with saving."""

from nemo_rl_moe.errors import EXIT_RUN_FAILED, CheckpointError


class CheckpointSaveError(CheckpointError):
    """The last checkpoint of a run could not be saved. Exit code 1."""

    exit_code = EXIT_RUN_FAILED
