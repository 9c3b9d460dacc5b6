# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of generation engines, and the sections that they add to the schema of a configuration.

A configuration names the record of an engine outside of this package by `policy.generation.backend: my_module:ENGINE`.
This module imports no torch.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model

from nemo_rl_moe.config.engine import Engine
from nemo_rl_moe.config.schema_base import CustomCode, StrictModel
from nemo_rl_moe.config.user_code import described, import_attribute
from nemo_rl_moe.errors import ConfigurationError

Schema = TypeVar("Schema", bound=BaseModel)

BACKEND_KEY = "policy.generation.backend"
_RECORDS = {
    "megatron": "nemo_rl_moe.generation.record:ENGINE",
    "megatron_separate": "nemo_rl_moe.generation.megatron_separate.record:ENGINE",
    "vllm": "nemo_rl_moe.generation.vllm.record:ENGINE",
}
"""Name -> reference to its record, for the engines of this package. Add further engines here."""
BUILT_IN: dict[str, Engine] = {name: import_attribute(name, reference) for name, reference in _RECORDS.items()}


def find_engine(backend: str) -> Engine:
    """Return the record of the built-in engine `backend`, or import the record that `package.module:ENGINE` names.

    For an engine without further properties, the name may also be that of a function that takes an `EngineSetup`.
    Modules are also searched in the working folder.
    """
    if backend in BUILT_IN:
        return BUILT_IN[backend]
    found = import_attribute(BACKEND_KEY, backend, form="package.module:ENGINE")
    if not isinstance(found, Engine):
        if not callable(found):
            raise ConfigurationError(
                f"{BACKEND_KEY}: {backend} is {described(found)}, expected an Engine or a function of an EngineSetup"
            )
        return Engine(backend, found)
    if found.name in BUILT_IN:
        raise ConfigurationError(f"{BACKEND_KEY}: {backend}: its name {found.name} is that of a built-in engine")
    return found


def with_section_of(schema: type[Schema], engine: Engine) -> type[Schema]:
    """Return the schema of a configuration, extended by the section of an engine from outside of this package."""
    if engine.config_class is None or engine.name in BUILT_IN:
        return schema
    policy = schema.model_fields["policy"].annotation
    assert policy is not None
    generation = policy.model_fields["generation"].annotation
    added = _extended(generation, engine.name, engine.config_class)
    return _extended(schema, "policy", _extended(policy, "generation", added))


def _extended(model: Any, name: str, kind: Any) -> Any:
    known = model.model_fields.get(name)
    words = known.description if known is not None else kind.__doc__
    fields: dict[str, Any] = {name: (kind, Field(description=words))}
    return create_model(model.__name__, __base__=model, __module__=model.__module__, **fields)


if TYPE_CHECKING:
    EngineName = str
    EngineSections = StrictModel
else:
    EngineName = Literal[tuple(BUILT_IN)] | CustomCode
    EngineSections = create_model(
        "EngineSections",
        __base__=StrictModel,
        __module__=__name__,
        __doc__="Sections of the built-in engines, by their names.",
        **{
            name: (engine.config_class, Field(description=engine.config_class.__doc__))
            for name, engine in BUILT_IN.items()
            if engine.config_class is not None
        },
    )
