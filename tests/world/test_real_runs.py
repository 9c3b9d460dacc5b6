# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of a released model with experts: a separate engine, replayed, each refit checked; a resume; its page's task."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.real_model import MOE
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import sft_runs
from tests.support.loggers import MetricHistory, read_jsonl
from tests.world.real_runs import CLI, train

pytestmark = [
    pytest.mark.skipif(not MOE.is_dir(), reason=f"{MOE} is not there: make real-model writes it"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> MetricHistory:
    """Two steps whose rollouts the trainer's workers generate."""
    return train(tmp_path_factory.mktemp("own"))


def without_times(history: MetricHistory) -> MetricHistory:
    return {key: values for key, values in history.items() if not key.startswith("timing/")}


def test_a_separate_engine_gives_the_same_run_and_its_refits_are_checked(
    own_engine: MetricHistory, tmp_path: Path
) -> None:
    role = f"+cluster.roles.{GENERATION_ROLE}={{}}"
    history = train(tmp_path, role, policy__generation__backend="megatron_separate")
    assert {value for _, value in own_engine["train/grad_norm"]} != {0.0}
    assert [value for _, value in own_engine["train/token_mult_prob_error"]] == pytest.approx([1.0, 1.0], abs=1e-4)
    shared = without_times(own_engine)
    assert {key: history[key] for key in shared} == shared
    assert history["train/refit/weights_compared"] == [(1, 1.0), (2, 1.0)]


def test_a_resumed_run_goes_on_to_the_bit(own_engine: MetricHistory, tmp_path: Path) -> None:
    """The run is as it was behind its first step: the later checkpoint and the final weights are removed."""
    folder = tmp_path / "checkpoints"
    kept = {
        "checkpointing__checkpoint_dir": folder,
        "checkpointing__save_period": 1,
        "checkpointing__save_optimizer": True,
        "checkpointing__keep_top_k": None,
    }
    whole = without_times(train(tmp_path, **kept))
    for name in ("step_2", "final"):
        shutil.rmtree(folder / name)
    history = without_times(train(tmp_path, **kept))
    shutil.rmtree(folder)  # gigabytes
    assert history == whole
    shared = without_times(own_engine)
    assert {key: history[key] for key in shared} == shared


def test_the_page_teaches_opposites(tmp_path: Path) -> None:
    page = sft_runs.REPOSITORY_ROOT / "docs/real-model.md"
    files = re.findall(r"^```\w+\n# (\w+\.(?:py|yaml))\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in files:
        (tmp_path / name).write_text(text)
    settings = [f"policy.model_name={MOE}", "grpo.max_num_steps=4", "checkpointing.checkpoint_dir=null"]
    for words in (["prompts.py"], [*CLI, "grpo", "--config", "opposites.yaml", *settings, "logger.log_dir=logs"]):
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=sft_runs.environment(), check=True)
    history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    (_, before), *_, (_, after) = history["val/accuracy"]
    assert before < 0.3
    assert after > before + 0.2
