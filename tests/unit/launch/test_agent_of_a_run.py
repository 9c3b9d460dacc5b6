# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The agent of a run: what is wrong with it is told before anything starts, and the example's configuration loads."""

from pathlib import Path

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.drivers.kinds import kind_of
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from tests.functional import grpo_runs

ROOT = Path(__file__).resolve().parents[3]
ASSETS = ROOT / "examples/assets"
AGENT = ("env.driver.kind=agent", "env.driver.program=tests.support.agents_of_tests:asks_twice")
SAMPLING = SamplingParameters(10)


def overrides(model: str, *more: str) -> list[str]:
    return [f"policy.model_name={ASSETS / model}", "policy.init=random", *more]


def prepared(model: str, *more: str) -> StartDriver:
    """Prepare the agent of the only environment."""
    config = load_grpo_config("grpo_tiny_moe.yaml", overrides(model, *more), check_paths=False)
    return kind_of(config.env.driver).prepare(DriverSetup(config, load_tokenizer(str(ASSETS / model)), SAMPLING))


@pytest.mark.parametrize("model", ["tiny_qwen3_moe_tools", "tiny_qwen3_moe"])
def test_an_agent_is_prepared_for_models_with_and_without_a_format_of_calls(model: str) -> None:
    assert callable(prepared(model, *AGENT))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("program=tests.support.agents_of_tests:agnet", "program: tests.support.agents_of_tests:agnet: "),
        ("program=tests.support.agents_of_tests:MARK", "program: tests.support.agents_of_tests:MARK is "),
        ("program=psutil:boot_time", "program: psutil:boot_time() cannot be called with one AgentTask: too many"),
        ("program=[no-such-program]", "program: there is no program 'no-such-program'; expected"),
        ("format=hermess", "format: got 'hermess', expected one of hermes"),
    ],
)
def test_agents_that_cannot_be_used_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepared("tiny_qwen3_moe_tools", *AGENT, f"env.driver.{setting}")
    assert str(caught.value).startswith(f"env.driver.{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_the_command_names_the_key_and_leaves_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = grpo_runs.make_prompts(tmp_path, 3)
    paths = [f"data.train.path={data / 'grpo.jsonl'}", "data.validation=null", "grpo.val_period=0"]
    words = overrides(
        "tiny_qwen3_moe_tools", *paths, "env.driver.kind=agent", "env.driver.program=no_such_module:agent"
    )
    assert cli.main(["grpo", "--config", "grpo_tiny_moe.yaml", *words, f"logger.log_dir={tmp_path / 'logs'}"]) == 2
    assert (
        "error: env.driver.program: no_such_module:agent: there is no module no_such_module" in capsys.readouterr().err
    )


def test_the_examples_configuration_loads() -> None:
    config = load_grpo_config(ROOT / "examples/agents/add_with_a_tool.yaml", [], check_paths=False)
    assert config.env.driver.named == "add_with_a_tool:solve"
