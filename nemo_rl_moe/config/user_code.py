# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objects of the user's modules, named in a configuration as `package.module:attribute`."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError, UserCodeError, UserError, one_line, without_addresses

_PACKAGE = str(Path(__file__).parents[1])


def import_attribute(key: str, reference: str, form: str = "package.module:function") -> Any:
    """Import and return the object that `package.module:Class.member` names. The working folder is searched last."""
    module_name, separator, attribute = reference.partition(":")
    if not (separator and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigurationError(f"{key}: got {reference!r}, expected {form}{did_you_mean(with_colon(reference))}")
    found: Any = _import(key, module_name, reference)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [other for other in dir(found) if not other.startswith("_")]
            name = str(getattr(found, "__name__", None) or type(found).__name__)
            name += _hides_a_file(found)
            raise ConfigurationError(f"{key}: {reference}: {name} has no {part}{did_you_mean(nearest(part, known))}")
        found = getattr(found, part)
    if module_name.partition(".")[0] in sys.stdlib_module_names and not _is_a_file_of_the_user(module_name):
        raise ConfigurationError(f"{key}: {reference} is of Python's own library, expected {form} of your own code")
    return found


def _is_a_file_of_the_user(module_name: str) -> bool:
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and Path(file).is_relative_to(Path.cwd())


def is_custom(name: str) -> bool:
    """Return whether a name in a configuration refers to custom code, `package.module:name`."""
    return ":" in name


def with_colon(name: str) -> str | None:
    """Return `module:function` for the text `module.function`, or None for other texts."""
    module, dot, attribute = name.rpartition(".")
    return f"{module}:{attribute}" if dot and all(part.isidentifier() for part in name.split(".")) else None


def import_function(
    key: str, reference: str, takes: str, *, number: int = 1, names: Iterable[str] = ()
) -> Callable[..., Any]:
    """Import and return a function or class that can be called with `number` positional arguments and the keyword
    arguments `names`.

    `takes` describes these arguments in error messages, such as `one ScoringItem`.
    """
    found = import_attribute(key, reference)
    if not callable(found):
        raise ConfigurationError(f"{key}: {reference} is {described(found)}, expected a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigurationError(
            f"{key}: {reference} is a coroutine or generator function, expected a plain function that returns its"
            " result"
        )
    return _with_signature(key, reference, found, takes, number, names)


def import_function_of_task(key: str, reference: str) -> Callable[..., Any]:
    """Import and return a function of one `AgentTask`. It may be a coroutine function."""
    found = import_attribute(key, reference)
    if not callable(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigurationError(f"{key}: {reference} is {described(found)}, expected a function of one AgentTask")
    return _with_signature(key, reference, found, "one AgentTask", 1, ())


def _with_signature(
    key: str, reference: str, function: Callable[..., Any], takes: str, number: int, names: Iterable[str]
) -> Callable[..., Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return function
    try:
        signature.bind(*[None] * number, **dict.fromkeys(names))
    except TypeError as error:
        called = without_addresses(f"{reference}{signature}")
        raise ConfigurationError(f"{key}: {called} cannot be called with {takes}: {error}") from None
    return function


def described(value: Any) -> str:
    """Return a value and its type for an error message."""
    text = without_addresses(repr(value))
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"


@contextmanager
def named_in_errors(key: str, reference: str) -> Iterator[None]:
    """In this context, errors of the user's code become `UserCodeError`, whose text begins with the key and the
    reference to the code."""
    try:
        yield
    except (UserError, UserCodeError):  # such errors describe the problem already
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise UserCodeError(f"{key}: {reference} raised {error_in_user_code(error)}", trace) from error


def error_in_user_code(error: BaseException) -> str:
    """Return type and first line of an error in the user's code, with the user's file and line that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_passed_through(frame.filename)]
    of_user = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{one_line(error)} ({Path(of_user[-1].filename).name}:{of_user[-1].lineno})" if of_user else one_line(error)


def _is_passed_through(file: str) -> bool:
    return file.startswith(("<frozen", _PACKAGE)) or file == importlib.__file__


def _hides_a_file(module: Any) -> str:
    """Return a remark if the imported module hides a file of the same name in the working folder, else an empty
    text."""
    file = Path(getattr(module, "__file__", None) or "")
    own = Path.cwd() / file.name
    return f" ({file}, which comes before {own.name} of the working folder)" if own.is_file() and own != file else ""


def _import(key: str, module_name: str, reference: str) -> Any:
    # Programs that pip installs do not search the working folder, where the user's file is likely to be.
    working_folder = str(Path.cwd())
    if working_folder not in sys.path and "" not in sys.path:
        sys.path.append(working_folder)
    try:
        return import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything, or exit
        problem = f"{module_name} cannot be imported: {error_in_user_code(error)}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            neighbours = [path.stem for path in Path(working_folder).glob("*.py")]
            problem = (
                f"there is no module {missing}, neither installed nor in the working folder {working_folder}"
                f"{did_you_mean(nearest(missing, neighbours))}"
            )
        raise ConfigurationError(f"{key}: {reference}: {problem}") from error
