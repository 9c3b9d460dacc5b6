# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The tools of a run stand in its first prompts, and what is wrong with them is told before anything starts."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe import cli
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.drivers.kinds import kind_of
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, data_with_tools, described_tools
from nemo_rl_moe.launch.prompts import read_prompts
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.functional import grpo_runs

ASSETS = Path(__file__).resolve().parents[3] / "examples/assets"
TOOLS = ("env.driver.kind=tools", "env.driver.tools=[calculator,tests.support.tool_functions:look_up]")
CALCULATOR = ["env.driver.kind=tools", "env.driver.tools=[calculator]"]
SETTINGS = "env.driver.parameters={look_up: {dictionary: words.txt}}"


def overrides(data: Path, model: str = "tiny_qwen3_moe_tools", *more: str) -> list[str]:
    return [
        f"policy.model_name={ASSETS / model}",
        "policy.init=random",
        "policy.max_total_sequence_length=4000",
        f"data.train.path={data / 'grpo.jsonl'}",
        f"data.validation.path={data / 'validation_prompts.jsonl'}",
        *more,
    ]


def test_t08_definitions_stand_in_every_prompt(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path, 3)
    tokenizer = load_tokenizer(str(ASSETS / "tiny_qwen3_moe_tools"))
    texts = {}
    for tools in ([], [*TOOLS, SETTINGS]):
        config = load_grpo_config("grpo_tiny_moe.yaml", overrides(data, "tiny_qwen3_moe_tools", *tools))
        console = ConsoleLogger(total_steps=0, live="never")
        prompts = read_prompts(config, config.data.train, tokenizer, console, image_rule=None)
        texts[bool(tools)] = [tokenizer.decode(prompt.token_ids) for prompt in prompts]
        assert bool(data_with_tools(config).tools) == bool(tools)
    assert len(texts[True]) == 3
    for text, without in zip(texts[True], texts[False], strict=True):
        for shown in ('"name": "calculator"', '"name": "look_up"', "What to look for, in any case."):
            assert shown in text
            assert shown not in without
        assert "dictionary" not in text, "what the run sets is hidden from the model"
        assert text.endswith(without)


def prepared(config: GRPOMasterConfig, tokenizer: PreTrainedTokenizerBase) -> StartDriver:
    """Prepare the driver of the only environment."""
    sampling = SamplingParameters(10, stop_token_ids=(tokenizer.eos_token_id,))
    return kind_of(config.env.driver).prepare(DriverSetup(config, tokenizer, sampling))


def test_tools_are_described_and_their_format_is_found(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path, 3)
    tokenizer = load_tokenizer(str(ASSETS / "tiny_qwen3_moe_tools"))
    config = load_grpo_config("grpo_tiny_moe.yaml", overrides(data, "tiny_qwen3_moe_tools", *TOOLS, SETTINGS))
    assert callable(prepared(config, tokenizer))
    assert isinstance(config.env.driver, ToolsConfig)
    assert list(described_tools(config.env.driver)) == ["calculator", "look_up"]
    setup = DriverSetup(config, tokenizer, SamplingParameters(10, stop_token_ids=(tokenizer.eos_token_id,)))
    assert setup.tool_format(config.env.driver.format) is TOOL_FORMATS["hermes"]


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("tiny_qwen3_moe", CALCULATOR, "env.driver: the chat template cannot render a tool call and its result"),
        (
            "tiny_qwen3_moe_tools",
            ["env.driver.kind=tools", "env.driver.tools=[calculater]"],
            "env.driver.tools: got 'calculater', expected package.module:",
        ),
        ("tiny_qwen3_moe_tools", [*TOOLS], "env.driver.parameters.look_up.dictionary: is missing"),
        (
            "tiny_qwen3_moe_tools",
            [*CALCULATOR, "env.driver.format=hermess"],
            "env.driver.format: got 'hermess', expected one of hermes",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tmp_path: Path, model: str, more: list[str], message: str) -> None:
    config = load_grpo_config(
        "grpo_tiny_moe.yaml", overrides(grpo_runs.make_prompts(tmp_path, 3), model, *more), check_paths=False
    )
    tokenizer = load_tokenizer(str(ASSETS / model))
    with pytest.raises(ConfigurationError) as caught:
        prepared(config, tokenizer)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_template_without_definitions_is_refused_before_the_data_are_read(tmp_path: Path) -> None:
    config = load_grpo_config(
        "grpo_tiny_moe.yaml",
        overrides(
            grpo_runs.make_prompts(tmp_path, 3),
            "tiny_qwen3_moe_tools",
            "env.driver.kind=tools",
            "env.driver.tools=[calculator]",
        ),
    )
    tokenizer = load_tokenizer(str(ASSETS / "tiny_qwen3_moe_tools"))
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    with pytest.raises(
        ConfigurationError, match=r"^env\.driver: the chat template shows no definitions of tools; set "
    ):
        prepared(config, tokenizer)


def test_the_command_names_the_key_and_leaves_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = overrides(
        grpo_runs.make_prompts(tmp_path, 3),
        "tiny_qwen3_moe_tools",
        "env.driver.kind=tools",
        "env.driver.tools=[calculater]",
    )
    assert cli.main(["data", "--config", "grpo_tiny_moe.yaml", *words]) == 2
    assert capsys.readouterr().err.startswith(
        "error: env.driver.tools: got 'calculater', expected package.module:function"
    )
