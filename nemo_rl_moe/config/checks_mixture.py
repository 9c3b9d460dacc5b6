# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for several environments in one run. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest

KEY, DATA_KEY = "env.mixture", "data.environments"


def environments_have_their_data(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that `data.environments` has the same names as the environments of the mixture."""
    mixture, sets = config.env.mixture, config.data.environments
    if not sets:
        return
    if not mixture:
        yield f"{DATA_KEY}: got {', '.join(sets)}, expected {{}} with {KEY} {{}}: the run has one environment"
        return
    for name in sets:
        if name not in mixture:
            yield (
                f"{DATA_KEY}.{name}: no environment of {KEY}, which names {', '.join(mixture)}"
                f"{did_you_mean(nearest(name, mixture))}"
            )
    for name in mixture:
        if name not in sets:
            yield (
                f"{DATA_KEY}.{name}: missing; expected a section such as {{train: {{path: prompts.jsonl}}}}, as there"
                f" is one for {', '.join(sets)}"
            )


def environments_share_validation(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that `data.validation` agrees with the held-out prompts of the environments."""
    sets = config.data.environments
    validated = [name for name, each in sets.items() if each.validation is not None]
    if config.data.validation is None:
        for name in validated:
            yield (
                f"{DATA_KEY}.{name}.validation: got a section, expected null with data.validation null: there is no"
                " validation"
            )
    elif sets and not validated:
        yield f"data.validation: got a section, expected null, as no environment of {DATA_KEY} has held-out prompts"


def shared_prompts_are_read(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the prompts for several environments are records. Only a record can name its environment."""
    if not config.env.mixture or config.data.environments:
        return
    for name, source in (("train", config.data.train), ("validation", config.data.validation)):
        if source is not None and (source.path is None or source.path.endswith(".txt")):
            shown = "null" if source.path is None else source.path
            yield (
                f"data.{name}.path: got {shown}, expected data whose records name an environment of {KEY}"
                f" (data.environment_key: {config.data.environment_key}); or set separate data for each environment in"
                f" {DATA_KEY}"
            )


MIXTURE_RULES = (
    environments_have_their_data,
    environments_share_validation,
    shared_prompts_are_read,
)
