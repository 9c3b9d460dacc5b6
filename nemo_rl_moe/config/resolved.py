# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration as plain values, for a run's folder, the loggers and the eye."""

from typing import Any

from nemo_rl_moe.config.schema import MasterConfig


def dump_resolved(config: MasterConfig) -> dict[str, Any]:
    """The whole configuration as nested plain values; written as YAML, it loads to an equal configuration.

    The algorithm's own section comes first. `moe_*` fields that the user did not set are left out.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    own = [name for name in type(config).model_fields if name not in MasterConfig.model_fields]
    return {name: values[name] for name in [*own, *MasterConfig.model_fields]}
