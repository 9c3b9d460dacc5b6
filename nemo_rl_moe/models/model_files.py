# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small files of a model's folder, which transformers and serving engines need besides the weights."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WeightsFormat = Literal["hf", "megatron"]
TargetFormat = Literal["hf", "megatron", "adapter"]
NumberFormat = Literal["float32", "bfloat16"]
WEIGHTS_FORMATS: tuple[WeightsFormat, ...] = get_args(WeightsFormat)
TARGET_FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)
NUMBER_FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)
CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
)
PREPROCESSOR_CONFIG_FILE, PROCESSOR_CONFIG_FILE = "preprocessor_config.json", "processor_config.json"
IMAGE_FILES = (PREPROCESSOR_CONFIG_FILE, PROCESSOR_CONFIG_FILE, "video_preprocessor_config.json")
"""Files of a vision-language model's image processor."""
# Files of tokenizers. Code is never copied, see `tokenizer_code`.
_COPIED = (
    GENERATION_CONFIG_FILE,
    "*.model",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template*",
    *IMAGE_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*",
    "vocab*",
)
_CODE = frozenset({".py", ".pyc", ".pyd", ".so"})
_LARGEST_COPIED_BYTES = 100 << 20


def collect_model_files(
    config_json: Mapping[str, Any], hf_config: Any, model_folder: Path, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, bytes]:
    """Return name -> content of the small files for exported weights: configuration, generation configuration,
    tokenizer and image processor."""
    with tempfile.TemporaryDirectory(prefix="model_files_") as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    files |= {name: (model_folder / name).read_bytes() for name in IMAGE_FILES if (model_folder / name).is_file()}
    own = model_folder / GENERATION_CONFIG_FILE
    files[GENERATION_CONFIG_FILE] = own.read_bytes() if own.is_file() else _generation_config(hf_config)
    return files | {CONFIG_FILE: config_file(config_json)}


def copied_model_files(source: Path, config_json: Mapping[str, Any], hf_config: Any) -> dict[str, bytes]:
    """Return name -> content of the same files as `collect_model_files`, copied from another folder."""
    paths = {path.relative_to(source).as_posix(): path for pattern in _COPIED for path in source.glob(pattern)}
    files = {
        name: path.read_bytes()
        for name, path in sorted(paths.items())
        if path.is_file() and path.suffix not in _CODE and path.stat().st_size <= _LARGEST_COPIED_BYTES
    }
    if GENERATION_CONFIG_FILE not in files:
        files[GENERATION_CONFIG_FILE] = _generation_config(hf_config)
    return files | {CONFIG_FILE: config_file(config_json)}


def tokenizer_code(files: Mapping[str, bytes]) -> list[str]:
    """Return the names of code files that a tokenizer needs (`auto_map`). They are never copied or run."""
    try:
        auto_map = json.loads(files[TOKENIZER_CONFIG_FILE])["auto_map"]
        entries = auto_map["AutoTokenizer"] if isinstance(auto_map, dict) else auto_map
    except (KeyError, TypeError, ValueError):
        return []
    names = entries if isinstance(entries, list) else [entries]
    # An entry is a file and its class, such as `tokenization_moonshot.TikTokenTokenizer`.
    return sorted({f"{name.rpartition('.')[0]}.py" for name in names if isinstance(name, str) and "." in name})


def missing_code_line(files: Mapping[str, bytes]) -> str | None:
    """Return the warning about the code that a copied tokenizer needs, or None if it needs no code."""
    code = tokenizer_code(files)
    if not code:
        return None
    return (
        f"the tokenizer needs code of its own ({', '.join(code)}), which is not copied: AutoTokenizer cannot load "
        "the output until you have copied this code into its folder; do so only if you trust it"
    )


def left_out_line(name: str) -> str:
    """Return the message about parameters that are not in an exported folder."""
    return f"{name} is left out of the exported weights: the family has no tensor for it"


def config_file(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `config.json`."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_model_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _generation_config(hf_config: Any) -> bytes:
    """Return the generation configuration that follows from `config.json`."""
    # `save_pretrained` refuses settings that released models have.
    from transformers import GenerationConfig

    made: str = GenerationConfig.from_model_config(hf_config).to_json_string()
    return made.encode()
