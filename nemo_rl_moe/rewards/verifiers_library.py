# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of environments of the verifiers library, and of their data."""

import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import error_in_user_code
from nemo_rl_moe.errors import ConfigurationError

_KEY = "env.driver.id"
_INSTALL = "pip install 'nemo-rl-moe[verifiers]'"
_OWN_LEVEL = "VF_LOG_LEVEL"
"""Environment variable by which a user sets the library's log level."""


def load_verifiers(driver: VerifiersConfig) -> Any:
    """Load and return an environment of the library. Environments are cached by name and arguments."""
    return _loaded(driver.id, json.dumps(driver.arguments, sort_keys=True, default=str))


@lru_cache(maxsize=4)
def _loaded(name: str, text: str) -> Any:
    arguments = json.loads(text)
    library = _library()
    module = module_of(name)
    search_working_folder()
    try:
        with _signals_kept(), _quiet():
            environment = library.load_environment(name, **arguments)
    except Exception as error:  # the library wraps errors of the environment's code
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and cause.name == module:
            raise ConfigurationError(unknown(name, "load_environment")) from error
        if isinstance(cause, AttributeError) and "load_environment" in str(cause):
            raise ConfigurationError(
                f"{_KEY}: got {name!r}: the module {module} has no function load_environment"
            ) from error
        named = ", ".join(arguments) or "no arguments"
        raise ConfigurationError(
            f"env.driver.arguments: {name} cannot be made with {named}: {error_in_user_code(cause)}"
        ) from error
    if environment.requires_group_rollouts:
        raise ConfigurationError(
            f"{_KEY}: got {name!r}, whose rubric scores the responses to a prompt together, expected an environment"
            " that scores each by itself"
        )
    return environment


def verifiers_rows(driver: VerifiersConfig, *, trains: bool, num_items: int | None, seed: int) -> list[Any]:
    """Return rows of the environment's data. Each row has `prompt`.

    Args:
        trains: Whether to return the rows to train on. If not, the rows to evaluate with are returned.
        num_items: Maximum number of rows. None: all.
        seed: Seed of the order of the rows.
    """
    environment = load_verifiers(driver)
    get = environment.get_dataset if trains else environment.get_eval_dataset
    try:
        with _quiet():
            return list(get(-1 if num_items is None else num_items, seed=seed))
    except Exception as error:
        raise ConfigurationError(
            f"{_KEY}: {driver.id} gives no data to {'train on' if trains else 'validate with'}:"
            f" {error_in_user_code(error)}"
        ) from error


def _library() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigurationError(f"env.driver.kind: verifiers cannot be imported ({error}); {_INSTALL}") from error
    try:
        with _signals_kept():
            _ = verifiers.load_environment  # imports most of the library
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"env.driver.kind: verifiers {importlib.metadata.version('verifiers')} has no load_environment ({error}),"
            f" expected a release from 0.2 up to below 0.4; {_INSTALL}; for later releases, set"
            " env.driver.kind=verifiers_v1"
        ) from error
    if _OWN_LEVEL not in os.environ:
        logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # this package reports and counts failed rollouts
    return verifiers


def unknown(name: str, mark: str) -> str:
    """Return the error line about an environment that does not exist, with the names of existing ones.

    Args:
        mark: Word by which modules with environments in the working folder are recognised.
    """
    local = {path.stem for path in Path.cwd().glob("*.py") if mark in path.read_text(errors="replace")}
    known = sorted(_installed() | local)
    return (
        f"{_KEY}: got {name!r}, but there is no module {module_of(name)}, neither installed nor in the working folder;"
        f" there are: {', '.join(known) or 'none'}{did_you_mean(nearest(name, known))}"
    )


def _installed() -> set[str]:
    """Return the names of installed packages that require the library."""
    return {
        distribution.metadata["Name"]
        for distribution in importlib.metadata.distributions()
        if any(each.lower().startswith("verifiers") for each in distribution.requires or ())
        and not distribution.metadata["Name"].startswith(("nemo-rl-moe", "verifiers", "prime"))
    }


def module_of(name: str) -> str:
    """Return the name of the Python module of an environment, from the environment's name."""
    return name.replace("-", "_").split("/")[-1]


def search_working_folder() -> None:
    """Add the working folder to the module path. If pip has installed the command, the path does not contain it."""
    working_folder = str(Path.cwd())
    if working_folder not in sys.path and "" not in sys.path:
        sys.path.append(working_folder)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the run's signal handlers at the end of this context: the library's environments replace them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's logs in this context, since they only repeat raised errors."""
    logger = logging.getLogger("verifiers")
    level = logger.level
    if _OWN_LEVEL not in os.environ:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
