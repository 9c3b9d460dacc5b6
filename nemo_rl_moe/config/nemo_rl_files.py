# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading of NeMo-RL's configuration files, with the files that they inherit from and the functions that they call."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_moe.config.files import leaves, merge, read_with_defaults, yaml_problem
from nemo_rl_moe.config.nemo_rl_translation import BASES
from nemo_rl_moe.errors import ConfigurationError


def read_theirs(path: Path) -> dict[str, Any]:
    """Read a file merged with the files that it inherits from, with references resolved."""
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    merged = read_with_defaults(path, shipped=False, join=_joined)
    for key, _ in leaves(merged):
        if key.rpartition(".")[2] == "_override_":
            raise ConfigurationError(
                f"{path}: {key}: only supported directly in a top-level section, such as policy._override_: write this"
                " section out in full"
            )
    try:
        with _their_resolvers():
            resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {yaml_problem(error)}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _joined(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged into it. A section with `_override_: true` replaces the section of `base`."""
    whole = {name for name, section in over.items() if isinstance(section, Mapping) and section.get("_override_")}
    stripped = {
        name: {key: value for key, value in section.items() if key != "_override_"} if name in whole else section
        for name, section in over.items()
    }
    return merge({name: section for name, section in base.items() if name not in whole}, stripped)


@contextmanager
def _their_resolvers() -> Iterator[None]:
    """Register `${mul:...}` and the other functions of NeMo-RL's configurations within the context."""
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "max": lambda a, b: max(a, b),
    }
    # OmegaConf 2.4 warns of `register_new_resolver`, the name in 2.3.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in functions.items():
        register(name, function, replace=True)
    try:
        yield
    finally:
        for name in functions:
            OmegaConf.clear_resolver(name)


def algorithm_in(theirs: Mapping[str, Any], path: Path) -> str:
    """Return the algorithm whose section the configuration has."""
    policy = theirs.get("policy")
    engines = [policy.get(name) for name in ("megatron_cfg", "dtensor_cfg")] if isinstance(policy, Mapping) else []
    if not any(isinstance(engine, Mapping) and "enabled" in engine for engine in engines):
        raise ConfigurationError(
            f"{path}: not a configuration of NeMo-RL, which has policy.megatron_cfg.enabled or"
            " policy.dtensor_cfg.enabled; check a configuration of this package with --config"
        )
    found = [name for name in BASES if isinstance(theirs.get(name), Mapping)]
    if len(found) != 1:
        got = f"got {', '.join(found)}" if found else "none of them"
        raise ConfigurationError(f"{path}: expected one section of {', '.join(BASES)}: {got}")
    return found[0]
