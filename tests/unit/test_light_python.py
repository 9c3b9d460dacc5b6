# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What looks at routes runs on Python 3.10: its syntax, and the names that it takes from the standard library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LATER: dict[str, set[str]] = {
    "asyncio": {"Runner", "TaskGroup", "timeout", "timeout_at"},
    "builtins": {"BaseExceptionGroup", "ExceptionGroup"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "FlagBoundary", "ReprEnum", "StrEnum", "member", "nonmember", "property", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "string": {"get_identifiers"},
    "typing": {
        *("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack", "assert_never"),
        *("assert_type", "clear_overloads", "dataclass_transform", "get_overloads", "override", "reveal_type"),
        *("NoDefault", "ReadOnly", "TypeIs", "TypeAliasType"),
    },
    "warnings": {"deprecated"},
}
"""Names that came with Python 3.11 or later, by module; `tomllib` is a module that did."""
ROOTS = ("cli", "routing", "runs/report", "runs/folder/capture_folder")


def module_file(package: Path, name: str) -> Path | None:
    path = package.parent.joinpath(*name.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


def imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that a file imports anywhere, and the names that it takes from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, [alias.name for alias in node.names]


@pytest.fixture(scope="module")
def light(repository_root: Path) -> dict[Path, ast.Module]:
    """Files of the light package, with all that they import of it: what trains is imported under `train` alone."""
    package = repository_root / "nemo_rl_moe"
    places = [package / root for root in ROOTS]
    left = [
        path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")])
    ]
    found: dict[Path, ast.Module] = {}
    while left:
        path = left.pop()
        if path in found or path.name == "training_cli.py":
            continue
        found[path] = ast.parse(path.read_text(), feature_version=(3, 10))
        for module, names in imported(found[path]):
            if module.split(".")[0] == "nemo_rl_moe":
                files = [module_file(package, name) for name in (module, *(f"{module}.{name}" for name in names))]
                left += [file for file in files if file is not None]
    assert package / "runs/folder/step_tables.py" in found
    assert package / "config" / "files.py" in found
    return found


def problems_of(tree: ast.AST) -> list[str]:
    """Return what Python 3.10 lacks."""
    found = []
    for module, names in imported(tree):
        found += [module] if module == "tomllib" else []
        found += [f"{module}.{name}" for name in names if name in LATER.get(module, ())]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if node.attr in LATER.get(node.value.id, ()) else []
        elif isinstance(node, ast.Name) and node.id in LATER["builtins"]:
            found.append(node.id)
        elif isinstance(node, ast.TryStar):
            found.append("except*")
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            found += ["* in []"] if any(isinstance(part, ast.Starred) for part in node.slice.elts) else []
    return found


def test_the_light_package_has_nothing_later_than_python_3_10(light: dict[Path, ast.Module]) -> None:
    assert len(light) > 60
    assert {str(path): found for path, tree in light.items() if (found := problems_of(tree))} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from enum import StrEnum", "enum.StrEnum"),
        ("import tomllib", "tomllib"),
        ("import datetime\ndatetime.UTC", "datetime.UTC"),
        ("raise ExceptionGroup('', [])", "ExceptionGroup"),
        ("try: pass\nexcept* OSError: pass", "except*"),
    ],
)
def test_what_is_later_is_seen(code: str, found: str) -> None:
    assert found in problems_of(ast.parse(code))
