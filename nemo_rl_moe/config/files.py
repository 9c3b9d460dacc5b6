# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""YAML files merged with the files that they inherit from through `defaults:`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, ScalarToken, YAMLError

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError

DEFAULTS_KEY = "defaults"
BASE_NAME = "base.yaml"
"""The shipped file with the keys that all algorithms share. No run can start from it, because it has no algorithm's
section."""
BASE_OF = {"sft": "sft.yaml", "grpo": "grpo.yaml"}
"""Algorithm -> shipped file with all its keys. The file is no recipe: values that depend on the run are missing."""
KINDS_NAME = "environment_kinds.yaml"
"""The shipped file with the defaults of each kind of `env.driver` and `env.reward`."""
KIND_KEY = "kind"
"""A key that names the kind of its section. The section's other keys depend on the kind."""
SECTIONS_OF_KINDS = ("driver", "reward")
"""Names of the sections with a kind. In other sections, such as `parameters`, `kind` is an ordinary key."""
WHERE_THE_SHIPPED_ARE_LISTED = " (nemo-rl-moe config --help lists the shipped configurations)"
_NO_SECTIONS = "expected sections such as `policy:`, got something else"
_PACKAGED_EXEMPLARS = Path(__file__).resolve().parents[1] / "exemplar_configs"
_REPOSITORY_EXEMPLARS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def exemplars_folder() -> Path:
    """Return the folder of the shipped configurations. A wheel has a copy of the repository's folder."""
    return _PACKAGED_EXEMPLARS if _PACKAGED_EXEMPLARS.is_dir() else _REPOSITORY_EXEMPLARS


def exemplar_names() -> list[str]:
    """Return the file names of the shipped configurations that a run can start from."""
    bases = {BASE_NAME, KINDS_NAME, *BASE_OF.values()}
    return sorted(path.name for path in exemplars_folder().glob("*.yaml") if path.name not in bases)


def exemplar_summaries() -> dict[str, str]:
    """Name of a shipped configuration -> first sentence of the comment at its head."""
    summaries = {}
    for name in (*BASE_OF.values(), *exemplar_names()):
        lines = (exemplars_folder() / name).read_text(encoding="utf-8").splitlines()
        comment = takewhile(lambda line: line.startswith("#"), lines)
        text = " ".join(line.strip("# ") for line in comment if "Copyright" not in line and "SPDX" not in line)
        summaries[name] = text.split(". ")[0].rstrip(".")
    return summaries


def find_config(path: str | Path) -> Path:
    """Return the path of a configuration. `path` is a path, or the name of a shipped configuration."""
    candidates = [Path(path), exemplars_folder() / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if Path(path).is_dir():
        raise ConfigurationError(f"{path}: is a folder, expected a YAML file")
    folder = Path(path).parent
    # Names without folder and ending, which would make any two names alike.
    shipped = {Path(name).stem: name for name in (*BASE_OF.values(), *exemplar_names())}
    beside = {other.stem: str(folder / other.name) for other in folder.glob("*.yaml")}
    stem = Path(path).stem
    suggestion = beside.get(nearest(stem, beside) or "") or shipped.get(nearest(stem, shipped) or "")
    raise ConfigurationError(f"{path}: no such file{did_you_mean(suggestion)}{WHERE_THE_SHIPPED_ARE_LISTED}")


_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
Join = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""A function that merges the second of two trees over the first and returns the result."""


def read_with_defaults(path: Path, *, shipped: bool = True, join: Join | None = None) -> dict[str, Any]:
    """Read a YAML file merged over the files that its `defaults:` names. Interpolations are not resolved.

    `defaults` is a file or a list of files. Later files override earlier ones, and the file itself overrides all. A
    file is searched in the folder of the including file first, then among the shipped configurations.

    Args:
        shipped: Whether to search the shipped configurations. False for files of another framework.
        join: Function that merges a file over the files that it inherits from. None: `merge`.
    """
    return _read_with_defaults(path, (), shipped, join or merge)


def _read_with_defaults(path: Path, including: tuple[Path, ...], shipped: bool, join: Join) -> dict[str, Any]:
    """Read a file. `including` holds the files that include it, outermost first."""
    here = path.resolve()
    if here in including:
        circle = " -> ".join(step.name for step in (*including[including.index(here) :], here))
        raise ConfigurationError(f"{path}: {DEFAULTS_KEY} go in a circle: {circle}")
    content = _read_yaml(path)
    parents = content.pop(DEFAULTS_KEY, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigurationError(f"{path}: {DEFAULTS_KEY}: expected the name of a YAML file or a list of names")
    merged: dict[str, Any] = {}
    for parent in parents:
        found = _find_parent(parent, path, shipped)
        merged = join(merged, _read_with_defaults(found, (*including, here), shipped, join))
    return join(merged, content)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged into it, section by section. A plain value of `over` replaces the value of
    `base`. So does a section of `over` whose `kind` differs from that of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            has_kind = key in SECTIONS_OF_KINDS and KIND_KEY in value
            changes_kind = has_kind and value[KIND_KEY] != below.get(KIND_KEY)
            merged[key] = value if changes_kind else merge(below, value)
        else:
            merged[key] = value
    return merged


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a section, with its full key such as `a.b.c`. An empty section counts as a value."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a full key, or None if it is missing."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def parse_value(text: str) -> Any:
    """Parse one value as YAML and return it. Numbers are read as by OmegaConf (`1e-3` is a number).

    Raises:
        YAMLError: The text is not YAML.
        OmegaConfBaseException: An interpolation in the text is malformed.
    """
    return with_text_keys(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False))["value"]


def with_text_keys(value: Any) -> Any:
    """Return a copy of a value in which every key is a text. YAML reads a key such as `1` as a number."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(entry) for key, entry in value.items()}
    return [with_text_keys(entry) for entry in value] if isinstance(value, list) else value


def yaml_problem(error: Exception) -> str:
    """Return the problem of a YAML text, on one line."""
    if isinstance(error, RecursionError):
        return "brackets or sections are nested too deeply"
    if isinstance(error, UnicodeError):  # bytes of a command line that are not text arrive as lone surrogates
        return "it holds bytes that are not UTF-8"
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):  # raised by int(...)
        return "a number is too long to be read"
    if isinstance(error, MarkedYAMLError):
        return str(error.problem or error.context or "not valid YAML")
    return str(error).splitlines()[0]


def _find_parent(name: str, including: Path, shipped: bool) -> Path:
    folders = [including.parent, exemplars_folder()] if shipped else [including.parent]
    for candidate in (folder / name for folder in folders):
        # A file never includes itself: the user's `sft.yaml` may inherit from the shipped `sft.yaml`.
        if candidate.is_file() and candidate.resolve() != including.resolve():
            return candidate
    if (including.parent / name).resolve() == including.resolve():
        raise ConfigurationError(f"{including}: {DEFAULTS_KEY} go in a circle: {including.name} -> {including.name}")
    beside = [path.name for path in including.parent.glob("*.yaml")]
    if not shipped:
        hint = did_you_mean(nearest(name, beside))
        raise ConfigurationError(f"{including}: {DEFAULTS_KEY}: {name}: no such file in {including.parent}{hint}")
    suggestion = nearest(Path(name).name, [*beside, BASE_NAME, *BASE_OF.values(), *exemplar_names()])
    raise ConfigurationError(
        f"{including}: {DEFAULTS_KEY}: {name}: no such file, neither in {including.parent} nor among the shipped"
        f" configurations{did_you_mean(suggestion)}"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(f"{path}: cannot be read: {reason}") from error
    content: dict[str, Any] = with_text_keys(_parsed(path, text))
    return content  # a copy, which the caller may change


# Parsing takes most of the time of loading, and all configurations of a process inherit the same few files.
@lru_cache(maxsize=16)
def _parsed(path: Path, text: str) -> dict[Any, Any]:
    """Parse a file's text. Callers must not change the result."""
    if found := traps(text):
        raise ConfigurationError([f"{path}, line {line}: {problem}" for line, problem in found])
    try:
        content = OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = _flow_hint(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
        raise ConfigurationError(f"{path}{where}: not valid YAML: {yaml_problem(error)}{hint}") from error
    except OSError as error:  # OmegaConf's error for a file with a single number
        raise ConfigurationError(f"{path}: {_NO_SECTIONS}") from error
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {error.full_key}: not valid: {yaml_problem(error)}") from error
    except (YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{path}: not valid: {yaml_problem(error)}") from error
    if not isinstance(content, dict) or (len(content) == 1 and text.strip() in content):
        raise ConfigurationError(f"{path}: {_NO_SECTIONS}")
    return content


def _flow_hint(line: Sequence[str]) -> str:
    """Return a hint to put interpolations in quotes if the line has one, else an empty text. Without quotes, YAML
    misreads an interpolation inside of `{...}` or `[...]`."""
    return '; inside of {...} and [...], put "${...}" in quotes' if line and "${" in line[0] else ""


def traps(text: str) -> list[tuple[int, str]]:
    """Find numbers that YAML 1.1 reads in base 60 (`1:30` is 90) or in base 8 (`017` is 15).

    Returns:
        The line of each number, counted from 1, and its problem.
    """
    found: list[tuple[int, str]] = []
    with suppress(YAMLError):  # the parser reports it
        found.extend(
            (token.start_mark.line + 1, problem)
            for token in yaml.scan(text, Loader=yaml.SafeLoader)
            if isinstance(token, ScalarToken) and token.plain and (problem := _number_problem(token.value))
        )
    return found


def _number_problem(word: str) -> str | None:
    if not (_BASE_60.fullmatch(word) or _BASE_8.fullmatch(word)):
        return None
    read = yaml.safe_load(word)
    if isinstance(read, str) or (":" not in word and read == int(word.replace("_", ""))):
        return None  # not a number in YAML, or the same number in base 10
    base = 60 if ":" in word else 8
    return f"YAML reads {word} as {read}, a number to the base of {base}; put a text in quotes, or write {read}"
