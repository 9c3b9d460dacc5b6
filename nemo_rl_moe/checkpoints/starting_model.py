# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run must not delete the model that it starts from."""

import re
from pathlib import Path

from nemo_rl_moe.checkpoints.store import CHECKPOINT_NAME, FINAL_WEIGHTS_FOLDER
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import ConfigurationError

_AT_RISK = re.compile(rf"{CHECKPOINT_NAME}|{re.escape(FINAL_WEIGHTS_FOLDER)}")


def refuse_model_among_checkpoints(config: MasterConfig, checkpoint_dir: Path) -> None:
    """Raises where the model's folder is one that a run which saves to a folder may remove or replace.

    Those are its checkpoints, of which only the best and those of this training are kept, and the final weights. Other
    things in the folder are never touched.

    Args:
        config: A checked configuration.
        checkpoint_dir: Where the run saves to.

    Raises:
        ConfigurationError: It is one; names both keys and the way out.
    """
    model = Path(config.policy.model_name)
    # Both as it is named and where a link leads: the one or the other may be removed.
    for path, folder in (
        (model.absolute(), checkpoint_dir.absolute()),
        (model.resolve(), checkpoint_dir.resolve()),
    ):
        inside = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
        if inside and _AT_RISK.fullmatch(inside[0]) and path.is_dir():
            raise ConfigurationError(
                f"policy.model_name: {config.policy.model_name} is in checkpointing.checkpoint_dir ({checkpoint_dir}), "
                f"where this run removes or replaces {inside[0]} as it saves; set another "
                "checkpointing.checkpoint_dir, or copy the model to another place"
            )
