# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small files beside a model's weights, by which transformers and serving engines know what they load."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
# What the tokenizers of the supported families are made of.
_COPIED = (
    GENERATION_CONFIG_FILE,
    "added_tokens.json",
    "chat_template*",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
_LARGEST_COPIED_BYTES = 100 << 20


def collect_model_files(
    config_json: Mapping[str, Any], hf_config: Any, model_name: str, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, bytes]:
    """Configuration, generation configuration and tokenizer, as they lie beside exported weights.

    Args:
        config_json: Content of `config.json`.
        hf_config: What transformers makes of it.
        model_name: The model, whose own generation configuration is taken where it has one.
        tokenizer: The tokenizer in use.

    Returns:
        File name to content.
    """
    with tempfile.TemporaryDirectory(prefix="model_files_") as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        _generation_config(model_name, hf_config).save_pretrained(folder)
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    return files | {CONFIG_FILE: _as_json(config_json)}


def copied_model_files(source: Path, config_json: Mapping[str, Any], hf_config: Any) -> dict[str, bytes]:
    """The same out of another folder, whose tokenizer is taken as it is.

    Args:
        source: The folder.
        config_json: Content of `config.json`.
        hf_config: What transformers makes of it.

    Returns:
        File name to content.
    """
    paths = {path.name: path for pattern in _COPIED for path in source.glob(pattern)}
    files = {
        name: path.read_bytes()
        for name, path in sorted(paths.items())
        if path.is_file() and path.stat().st_size <= _LARGEST_COPIED_BYTES
    }
    if GENERATION_CONFIG_FILE not in files:
        made: str = _generation_config(str(source), hf_config).to_json_string()
        files[GENERATION_CONFIG_FILE] = made.encode()
    return files | {CONFIG_FILE: _as_json(config_json)}


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def write_model_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes what `collect_model_files` has collected.

    Raises:
        OSError: The disk did not take it.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _generation_config(model_name: str, hf_config: Any) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_name)
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(hf_config)
