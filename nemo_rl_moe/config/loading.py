# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of a configuration: turns YAML and overrides into a checked configuration."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nemo_rl_moe.config.algorithm import ALGORITHM_KEY, ALGORITHMS, BUILT_IN, Algorithm, algorithm_of, find_algorithm
from nemo_rl_moe.config.checks import combination_problems, path_problems
from nemo_rl_moe.config.engines import find_engine, with_section_of
from nemo_rl_moe.config.files import DEFAULTS_KEY, exemplars_folder, find_config, merge, read_with_defaults
from nemo_rl_moe.config.mixtures import with_mixtures
from nemo_rl_moe.config.nemo_rl_translation import Translation
from nemo_rl_moe.config.overrides import apply_overrides, resolve
from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, MasterConfig, SFTMasterConfig
from nemo_rl_moe.config.shipped_models import with_shipped_models
from nemo_rl_moe.config.user_code import is_custom
from nemo_rl_moe.config.validation import is_path, keys_around, validate
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.masking import MASK, masked, masks_in

ConfigT = TypeVar("ConfigT", bound=MasterConfig)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> SFTMasterConfig:
    """Load the configuration of a supervised fine-tuning run. See `load_config_as`."""
    return load_config_as(SFTMasterConfig, path, overrides, check_paths=check_paths)


def load_grpo_config(path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> GRPOMasterConfig:
    """Load the configuration of a GRPO run. See `load_config_as`."""
    return load_config_as(GRPOMasterConfig, path, overrides, check_paths=check_paths)


def load_dpo_config(path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> DPOMasterConfig:
    """Load the configuration of a DPO run. See `load_config_as`."""
    return load_config_as(DPOMasterConfig, path, overrides, check_paths=check_paths)


def load_any_config(path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> MasterConfig:
    """Load the configuration of any algorithm. See `load_config_as`."""
    algorithm = _algorithm_in(read_with_defaults(find_config(path)))
    if algorithm is None:
        sections = " or ".join(BUILT_IN)
        raise ConfigurationError(f"{path}: has no section of an algorithm, expected {sections}")
    return load_config_as(algorithm.config_class, path, overrides, check_paths=check_paths)


def load_config_as(
    schema: type[ConfigT], path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True
) -> ConfigT:
    """Load and check a configuration.

    Args:
        overrides: `section.key=value` (a key of the schema or of the file), `+section.key=value` (any key) or
            `~section.key` (remove the key). They are applied in the order of the list. Values are YAML.
        check_paths: Whether to check that local data files and model folders exist, relative to the working folder.

    Raises:
        ConfigurationError: The configuration has problems. The error has a line for each.
    """
    merged = read_with_defaults(find_config(path))
    algorithm = _algorithm_in(merged)
    if algorithm is not None and schema is not algorithm.config_class:
        what = "is for the algorithm" if algorithm.reference else "has a section"
        command = "run" if algorithm.reference else algorithm.name
        raise ConfigurationError(
            f"{path}: {what} `{algorithm.name}`: start it with nemo-rl-moe {command} --config {path}"
        )
    merged.pop(ALGORITHM_KEY, None)
    config, problems = check_values(schema, merged, overrides, check_paths=check_paths)
    if problems:
        raise ConfigurationError(problems)
    return config


def check_values(
    schema: type[ConfigT], merged: Mapping[str, Any], overrides: Sequence[str] = (), *, check_paths: bool
) -> tuple[ConfigT, list[str]]:
    """Check values whose interpolations are not resolved yet. Return the valid part of the configuration, and a line
    for each problem."""
    overridden, problems = apply_overrides(merged, overrides, partial(keys_around, schema))
    values, interpolation_problems = resolve(overridden, partial(is_path, schema, overridden))
    problems += filter(None, interpolation_problems.values())
    problems += [
        f"{key}: got {MASK}, which replaced a secret when the configuration was written; expected the secret"
        for key in masks_in(values)
    ]
    values = with_mixtures(with_shipped_models(values))
    schema, engine_problems = _with_section_of_engine(schema, values)
    problems += engine_problems
    config, schema_problems, is_whole = validate(schema, values, interpolation_problems.keys())
    problems += schema_problems
    problems += combination_problems(config, is_whole=is_whole, megatron_version=installed_megatron_version())
    if check_paths:
        problems += path_problems(config, is_whole=is_whole)
    return config, list(dict.fromkeys(problems))


def problems_of_translation(translation: Translation) -> list[str]:
    """Return a line for each problem because of which a translated configuration could not start."""
    values = translation.nested()
    # `find_config` could find a file of the same name in a folder of NeMo-RL.
    merged = merge(read_with_defaults(exemplars_folder() / values.pop(DEFAULTS_KEY)), values)
    schema = ALGORITHMS[translation.algorithm].config_class
    return [*translation.obstacles, *check_values(schema, merged, check_paths=True)[1]]


def _with_section_of_engine(schema: type[ConfigT], values: Mapping[str, Any]) -> tuple[type[ConfigT], list[str]]:
    """Return the schema extended by the section of the configuration's engine, and a line for each problem with that
    engine."""
    generation = values["policy"].get("generation") if isinstance(values.get("policy"), Mapping) else None
    backend = generation.get("backend") if isinstance(generation, Mapping) else None
    if not (isinstance(backend, str) and is_custom(backend)):
        return schema, []
    try:
        return with_section_of(schema, find_engine(backend)), []
    except ConfigurationError as error:
        return schema, error.problems


def _algorithm_in(values: Mapping[str, Any]) -> Algorithm | None:
    """Return the algorithm that the key `algorithm` names, or else the last built-in algorithm with a section."""
    # An algorithm that has the sections of another algorithm too comes after that algorithm.
    named = values.get(ALGORITHM_KEY)
    if named is not None:
        return find_algorithm(str(named))
    return next((ALGORITHMS[name] for name in reversed(BUILT_IN) if name in values), None)


def installed_megatron_version() -> str | None:
    """Return the version of the installed Megatron-Core without importing it, or None."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def dump_resolved(config: MasterConfig) -> dict[str, Any]:
    """Return the configuration as nested plain values, with secrets masked (`masking.py`).

    If there are no secrets, loading the result as YAML gives an equal configuration. Sections of the algorithm come
    first. `moe_*` fields that the user did not set are omitted.
    """
    plain: dict[str, Any] = masked(_dump(config))
    return plain


def dump_with_secrets(config: MasterConfig) -> str:
    """Return a configuration as a text for another process of the same run. `load_dumped` reads the text."""
    return yaml.safe_dump(_dump(config), allow_unicode=True, sort_keys=False)


def load_dumped(text: str) -> MasterConfig:
    """Return the configuration from a text by `dump_with_secrets`. It is not checked again."""
    values = yaml.safe_load(text)
    algorithm = _algorithm_in(values)
    assert algorithm is not None
    values.pop(ALGORITHM_KEY, None)
    return validate(algorithm.config_class, values)[0]


def _dump(config: MasterConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude_unset=True)
    algorithm = algorithm_of(config)
    own = [name for name in type(config).model_fields if name not in MasterConfig.model_fields]
    named = {} if algorithm.reference is None else {ALGORITHM_KEY: algorithm.reference}
    order = dict.fromkeys([algorithm.name, *own, *MasterConfig.model_fields])
    return named | {name: values[name] for name in order}
