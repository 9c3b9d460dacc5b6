# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Engine records: one from outside of the package needs no change inside of it, and no name of one decides anything."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_rl_moe
from nemo_rl_moe.config.engine import Engine, EngineSize
from nemo_rl_moe.config.engines import BUILT_IN, find_engine
from nemo_rl_moe.config.loading import dump_resolved, load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import PositiveInt, StrictModel
from nemo_rl_moe.errors import ConfigurationError

PACKAGE = Path(nemo_rl_moe.__file__).parent
MAY_NAME_VLLM = {
    "generation/vllm": "the engine itself",
    "config/engines.py": "the registry's line",
    "config/nemo_rl.py": "translation of NeMo-RL's keys",
    "config/nemo_rl_grpo.py": "translation of NeMo-RL's keys",
    "config/nemo_rl_keys.py": "translation of NeMo-RL's keys",
    "config/nemo_rl_training.py": "translation of NeMo-RL's keys",
    "routing/audit": "dumps that vLLM has written",
    "tools/formats/vllm_parsers.py": "its parsers of calls",
    "tools/detection.py": "names of its parsers",
    "launch/evaluate_command.py": "an example in the help",
    "launch/generate_command.py": "an example in the help",
    "launch/serve_command.py": "an example in the help",
    "runs/folder/folder.py": "packages whose versions a run notes",
}


class ToyConfig(StrictModel):
    """The toy's section."""

    num_toys: PositiveInt
    """Toys."""


def toys_are_few(config: GRPOMasterConfig) -> Iterator[str]:
    """Number of toys, which is at most 3."""
    number = config.policy.generation.section_of(ToyConfig).num_toys
    if number > 3:
        yield f"policy.generation.toy.num_toys: got {number}, expected at most 3"


TOY = Engine(
    name="toy",
    make=lambda setup: "a started toy",
    config_class=ToyConfig,
    rules=(toys_are_few,),
    size=lambda config: EngineSize(1, 1, "float32", 0.5, 2**30),
)
NAMESAKE = Engine(name="vllm", make=lambda setup: None)
BACKEND = f"policy.generation.backend={__name__}:TOY"


def load(*overrides: str) -> GRPOMasterConfig:
    return load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigurationError) as error:
        load(*overrides)
    return error.value.problems


def test_a_record_of_the_users_own_brings_its_section_and_its_rules(tmp_path: Path) -> None:
    config = load(BACKEND, "+policy.generation.toy={num_toys: 2}")
    assert config.policy.generation.engine is TOY
    assert config.policy.generation.section_of(ToyConfig).num_toys == 2
    assert dump_resolved(config)["policy"]["generation"]["toy"] == {"num_toys": 2}
    assert problems(BACKEND, "+policy.generation.toy={num_toys: 4}") == [
        "policy.generation.toy.num_toys: got 4, expected at most 3"
    ]
    key = "policy.generation.toy.num_toys"
    assert problems(BACKEND, "+policy.generation.toy={num_toys: many}") == [
        f"{key}: got 'many' (str), expected a whole number above 0"
    ]
    assert problems(BACKEND) == ["policy.generation.toy: missing; expected a section with the keys num_toys"]


def test_a_function_is_an_engine_without_properties() -> None:
    engine = load("policy.generation.backend=yaml:safe_dump").policy.generation.engine
    assert engine.factory()(3) == "3\n...\n"
    assert not engine.shares_weights
    assert engine.size is None
    assert engine.config_class is None


def test_what_is_no_engine_is_one_line_among_all_problems() -> None:
    key = "policy.generation.backend"
    assert problems(f"{key}=yaml:__name__", "grpo.num_prompts_per_step=0") == [
        f"{key}: yaml:__name__ is 'yaml' (str), expected an Engine or a function of an EngineSetup",
        "grpo.num_prompts_per_step: got 0 (int), expected a whole number above 0",
    ]
    name = f"{__name__}:NAMESAKE"
    assert problems(f"{key}={name}") == [f"{key}: {name}: its name vllm is that of a built-in engine"]


def test_sections_of_the_built_in_engines_are_in_the_schema() -> None:
    generation = load().policy.generation
    assert {name for name, engine in BUILT_IN.items() if engine.config_class} <= set(type(generation).model_fields)
    assert [find_engine(name).name for name in BUILT_IN] == list(BUILT_IN)


@pytest.mark.parametrize("first", ["nemo_rl_moe.generation.vllm.record", "nemo_rl_moe.config.engines"])
def test_records_load_in_any_order_and_without_torch(first: str) -> None:
    code = f"import sys, {first}, nemo_rl_moe.config.loading; assert not {{'torch', 'ray', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_no_code_outside_of_its_folder_asks_for_vllm() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(PACKAGE / place) for place in MAY_NAME_VLLM)
        for line in lines_that_name("vllm", path)
    }
    assert not found


def lines_that_name(name: str, path: Path) -> Iterator[int]:
    """Lines of code with a name in it; docstrings and comments may speak of it."""
    text_of_file = path.read_text(encoding="utf-8")
    if name not in text_of_file:
        return
    tree = ast.parse(text_of_file)
    words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in words:
                parts = [text]
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.ClassDef(name=text) | ast.FunctionDef(name=text):
                parts = [text]
            case ast.Import(names=names):
                parts = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                parts = [module or "", *(alias.name for alias in names)]
            case _:
                continue
        if any(name in part.lower() for part in parts):
            yield node.lineno
