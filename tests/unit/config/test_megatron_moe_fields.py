# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The static table of `moe_*` fields against the installed Megatron-Core."""

import dataclasses
from importlib import metadata
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES, MoeTransformerFields, version_problem

SET_ELSEWHERE = {"moe_per_layer_logging", "moe_extended_tp", "moe_grad_scale_func"}
ADDED_TO_OLD_VERSIONS = {"moe_router_force_biased"}


def plain_types(annotation: Any) -> set[str]:
    """Basic types that an annotation takes; fixed words count as text."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return {name for part in get_args(annotation) for name in plain_types(part)}
    if origin is Annotated:
        return plain_types(get_args(annotation)[0])
    if origin is Literal:
        return {type(value).__name__ for value in get_args(annotation)}
    if origin is list:
        return {f"list of {name}" for name in plain_types(get_args(annotation)[0])}
    return {"null" if annotation is NoneType else annotation.__name__}


@pytest.mark.megatron
def test_table_is_the_installed_dataclass() -> None:
    from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core, on a machine without a GPU)

    # isort: split
    from megatron.core.transformer.transformer_config import TransformerConfig

    installed = metadata.version("megatron-core")
    hints = get_type_hints(TransformerConfig)
    theirs = {field.name for field in dataclasses.fields(TransformerConfig) if field.name.startswith("moe_")}
    ours = {name for name in MOE_FIELD_NAMES if version_problem(name, None, installed) is None}
    assert ours - ADDED_TO_OLD_VERSIONS == theirs - SET_ELSEWHERE - ADDED_TO_OLD_VERSIONS
    for name in ours & theirs:
        # A newer version may take null where an older one does not, so ours may be wider by null alone.
        ours_types, their_types = plain_types(MoeTransformerFields.__annotations__[name]), plain_types(hints[name])
        assert ours_types - {"null"} == their_types - {"null"}, name
        assert their_types <= ours_types, name
        assert _words(hints[name]) <= _words(MoeTransformerFields.__annotations__[name]), name


def _words(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for part in get_args(annotation) for word in _words(part)}


@pytest.mark.parametrize(
    ("name", "value", "installed", "problem"),
    [
        ("moe_router_force_biased", 1.0, "0.16.1", None),
        ("moe_paged_stash", True, "0.16.1", "needs megatron-core 0.19 or newer, installed is 0.16.1"),
        ("moe_use_legacy_grouped_gemm", True, "0.16.1", None),
        ("moe_use_legacy_grouped_gemm", True, "0.19.2", "megatron-core has it up to 0.16, installed is 0.19.2"),
        ("moe_router_score_function", "sigmoid", "0.16.1", None),
        (
            "moe_router_score_function",
            "sqrtsoftplus",
            "0.16.1",
            "'sqrtsoftplus' needs megatron-core 0.19 or newer, installed is 0.16.1",
        ),
        ("moe_router_score_function", "sqrtsoftplus", "0.19.2rc1", None),
        (
            "moe_router_load_balancing_type",
            ["aux_loss", "quantile_balancing"],
            "0.16.1",
            "'quantile_balancing' needs megatron-core 0.19 or newer, installed is 0.16.1",
        ),
    ],
)
def test_fields_and_values_of_other_versions(name: str, value: Any, installed: str, problem: str | None) -> None:
    assert version_problem(name, value, installed) == problem
