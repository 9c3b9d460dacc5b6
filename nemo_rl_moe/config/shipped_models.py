# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Models without weights that ship with this package, so that shipped configurations run and plans work anywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).resolve().parents[1] / "exemplar_models"
_IN_REPOSITORY = Path(__file__).resolve().parents[2] / "examples" / "assets"
SHIPPED_MODELS = ("tiny_qwen3_moe", "tiny_qwen3_moe_tools", "tiny_qwen3_moe_calculator")
MODEL_CONFIGS = "model_configs"
"""Folder with `config.json` of public models, for `nemo-rl-moe plan`."""


def with_shipped_models(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which names of shipped models are replaced by paths, unless the working folder has such a
    folder.

    A shipped model is named as in the repository, `examples/assets/tiny_qwen3_moe`, or without `examples/assets/`.
    """
    return {key: _resolved(key, value) for key, value in values.items()}


def _resolved(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        found = with_shipped_models(value)
        return {**found, "name": _path_of(found["name"])} if key == "tokenizer" and "name" in found else found
    return _path_of(value) if key == "model_name" else value


def _path_of(name: Any) -> Any:
    model = name.rstrip("/").removeprefix("examples/assets/") if isinstance(name, str) else ""
    shipped = _PACKAGED if _PACKAGED.is_dir() else _IN_REPOSITORY
    if model not in SHIPPED_MODELS:
        folder, _, public = model.partition("/")
        known = {path.parent.name for path in (shipped / MODEL_CONFIGS).glob("*/config.json")}
        if folder != MODEL_CONFIGS or public not in known:
            return name
    return name if Path(name).exists() else str(shipped / model)
