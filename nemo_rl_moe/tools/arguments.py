# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of tools, and checks of the arguments that a model gives."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.errors import one_line


class ArgumentError(ValueError):
    """A tool cannot be called with the model's arguments. The message is written for the model."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool.

    Attributes:
        kind: Name of the parameter's JSON type, such as `integer`.
        type: Validator of the parameter's annotation. It also converts a value if nothing is lost, such as "3" to 3.
        default: Default value as JSON. None if the parameter is required.
        runs_user_code: Whether `type` may run code of the user, such as a validator of a Pydantic model. It is used in
            the processes of tools alone.
    """

    name: str
    kind: str
    type: "TypeAdapter[Any]"
    default: str | None
    runs_user_code: bool = False

    @property
    def usage(self) -> str:
        """Name, type and default, such as `num_results: integer = 3`."""
        return f"{self.name}: {self.kind}" + ("" if self.default is None else f" = {self.default}")


def checked_arguments(
    arguments: Mapping[str, object], parameters: Sequence[Parameter], usage: str, *, with_user_code: bool = False
) -> dict[str, Any]:
    """Check named arguments, and return them converted to the types of the parameters.

    Args:
        usage: Signature of the tool, for error messages.
        with_user_code: Whether arguments whose types run code of the user are converted, too.

    Raises:
        ArgumentError: An argument is missing, unknown or of another type.
    """
    names = [parameter.name for parameter in parameters]
    for name in arguments:
        if name not in names:
            raise ArgumentError(
                f"there is no argument {shortened(name)!r}{did_you_mean(nearest(name, names))}; expected {usage}"
            )
    checked = {}
    for parameter in parameters:
        if parameter.name in arguments:
            value = arguments[parameter.name]
            is_left = parameter.runs_user_code and not with_user_code
            checked[parameter.name] = value if is_left else _converted(value, parameter, usage)
        elif parameter.default is None:
            raise ArgumentError(f"the argument {parameter.name} is missing; expected {usage}")
    return checked


_ANY = "any value"


def kind_in_words(schema: object) -> str:
    """Return the type of a JSON schema in words, such as `array of integer or null`.

    Schemas come from untrusted servers. A schema that is no object, such as the valid schema `true`, gives `any value`.
    """
    if not isinstance(schema, Mapping):
        return _ANY
    if isinstance(schema.get("enum"), list):
        text = " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    elif isinstance(schema.get("anyOf"), list):
        text = " or ".join(kind_in_words(each) for each in schema["anyOf"])
    else:
        kinds = schema.get("type", _ANY)
        text = " or ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
        if kinds == "array" and schema.get("items"):
            text += f" of {kind_in_words(schema['items'])}"
    return f"{text} or null" if schema.get("nullable") else text


def _converted(value: object, parameter: Parameter, usage: str) -> Any:
    try:
        return parameter.type.validate_python(value)
    except Exception as error:
        got = shortened(json.dumps(value, ensure_ascii=False, default=str))
        problem = f"{got}, expected {parameter.kind}"
        if parameter.runs_user_code:  # the kind does not show fields and rules
            problem = f"{got}: {_first_problem(error)}"
        raise ArgumentError(f"the argument {parameter.name} is {problem}; expected {usage}") from error


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return one_line(error)
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])
