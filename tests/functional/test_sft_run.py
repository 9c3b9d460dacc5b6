# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of supervised fine-tuning as a user starts it, and everything that it leaves behind."""

import json
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow.dataset
import pytest
import torch

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.loggers.expert_load_plots import HEATMAP_KEY, HeatmapGeometry, cell_colors
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_records
from tests.functional import sft_runs
from tests.support.loggers import (
    MetricHistory,
    read_jsonl,
    read_mlflow,
    read_mlflow_plots,
    read_tensorboard,
    read_tensorboard_plots,
    read_wandb_offline,
    read_wandb_offline_plots,
)

NUM_STEPS = 40
NUM_TRAIN = 3000
# Neither the batch nor the number of ranks divides it, so the last batch holds fillers.
NUM_VALIDATION = 101
DENSE_LAYER = 1
MOE_LAYERS = (0, 2, 3)
FLOAT32_EPSILON = 2.0**-23


@dataclass(frozen=True)
class FinishedRun:
    """A run, what it was given and what it printed.

    Attributes:
        folder: Where data and logs are.
        overrides: What the command line changed.
        output: Standard output.
        errors: Standard error.
        exit_code: As the shell sees it.
    """

    folder: Path
    overrides: list[str]
    output: str
    errors: str
    exit_code: int

    @property
    def run_folder(self) -> Path:
        """The numbered folder."""
        return self.folder / "logs" / "exp_001"

    def history(self) -> MetricHistory:
        """Every metric as `metrics.jsonl` holds it."""
        return read_jsonl(self.run_folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("sft")
    overrides = sft_runs.settings(
        folder,
        sft_runs.make_additions(folder / "data", NUM_TRAIN, NUM_VALIDATION),
        sft_runs.make_model_folder(folder / "model", mlp_only_layers=[DENSE_LAYER]),
        sft__max_num_steps=NUM_STEPS,
        sft__val_period=25,
        checkpointing__save_period=25,
        policy__train_global_batch_size=64,
        policy__train_micro_batch_size=16,
        policy__megatron_cfg__scheduler__lr_warmup_iters=10,
        policy__megatron_cfg__moe_z_loss_coeff=1e-3,
        logger__expert_load_plots__every_steps=20,
    )
    # Started where the user may not want files: whatever is not asked for would show up here.
    (folder / "work").mkdir()
    done = sft_runs.run_command(sft_runs.sft_command(overrides), folder / "work", exit_code=None)
    return FinishedRun(folder, overrides, done.stdout, done.stderr, done.returncode)


def values_of(history: MetricHistory, key: str) -> list[float]:
    return [value for _, value in history[key]]


def test_ends_well_and_says_where_to_look(run: FinishedRun) -> None:
    assert run.exit_code == 0, run.output + run.errors
    assert run.errors == ""
    assert list((run.folder / "work").iterdir()) == []
    summary = run.output[run.output.index(f"{NUM_STEPS} steps done.") :]
    assert re.search(r"validation loss: \d\.\d{4} -> \d\.\d{4}", summary)
    assert re.search(r"validation accuracy: \d\.\d{4} -> \d\.\d{4}", summary)
    named = [Path(path) for path in re.findall(r"(?:\s|sqlite:///)(/\S+)", summary)]
    expected = {
        run.run_folder,  # of `nemo-rl-moe report`
        run.run_folder / "metrics.jsonl",
        run.run_folder / "expert_load.parquet",
        run.folder / "logs",
        run.run_folder / "wandb",
        run.folder / "mlflow.db",
        run.run_folder / "checkpoints" / "final",
    }
    assert set(named) == expected
    assert [path for path in named if not path.exists()] == []


def test_console_shows_each_step_once(run: FinishedRun) -> None:
    steps = re.findall(rf"^step (\d+)/{NUM_STEPS}  loss ", run.output, flags=re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, NUM_STEPS + 1))
    validations = re.findall(r"^step (\d+)  validation: loss ", run.output, flags=re.MULTILINE)
    assert [int(step) for step in validations] == [0, 25, NUM_STEPS]
    assert "  moe_aux_loss_coeff: 0.01" in run.output
    assert "moe_layer_freq: [1, 0, 1, 1]" in run.output


def test_four_loggers_hold_the_same_metrics(run: FinishedRun) -> None:
    history = run.history()
    assert len(history) > 30
    assert values_of(history, "train/lr")[:10] == pytest.approx([3e-4 * step for step in range(1, 11)])
    mlflow = read_mlflow(f"sqlite:///{run.folder / 'mlflow.db'}", "nemo-rl-moe", "sft_tiny_moe")
    assert mlflow == history
    assert read_wandb_offline(run.run_folder / "wandb") == history
    tensorboard = read_tensorboard(run.run_folder / "tensorboard")
    assert tensorboard.keys() == history.keys()
    for key, points in history.items():
        assert [step for step, _ in tensorboard[key]] == [step for step, _ in points]
        assert values_of(tensorboard, key) == pytest.approx(values_of(history, key), rel=FLOAT32_EPSILON), key


def test_three_loggers_hold_plots_of_the_load(run: FinishedRun) -> None:
    load = read_run(run.run_folder).expert_load
    assert load is not None
    images = [
        read_tensorboard_plots(run.run_folder / "tensorboard"),
        read_wandb_offline_plots(run.run_folder / "wandb"),
        read_mlflow_plots(f"sqlite:///{run.folder / 'mlflow.db'}", "nemo-rl-moe"),
    ]
    geometry = HeatmapGeometry(*load.counts.shape[1:])
    for found in images:
        assert [step for step, _ in found[HEATMAP_KEY]] == [1, 20, 40]
        for step, content in found[HEATMAP_KEY]:
            image = PIL.Image.open(BytesIO(content)).convert("RGB")
            wanted = cell_colors(load.counts[load.steps.tolist().index(step)])
            for row, expert in np.ndindex(*wanted.shape[:2]):
                x, y = geometry.center(row, expert)
                # Above the number in the middle.
                assert image.getpixel((x, y - 15)) == pytest.approx(255 * wanted[row, expert], abs=1)


def test_a_healthy_run_has_no_alert(run: FinishedRun) -> None:
    assert "warning: step " not in run.output
    (file,) = wandb_files(run.run_folder / "wandb")
    assert list(wandb_records(file, "alert")) == []


def test_each_training_step_has_each_metric(run: FinishedRun) -> None:
    history = run.history()
    every_step = list(range(1, NUM_STEPS + 1))
    outliers = [key for key in history if key.startswith("train/moe_expert_utilization/")]
    assert outliers, "the most and the least loaded experts of each step"
    for key in history.keys() - set(outliers):
        expected = every_step
        if key.startswith(("val/", "timing/validation/")):
            expected = [0, 25, NUM_STEPS]
        elif key.startswith("timing/checkpoint/"):
            expected = [25, NUM_STEPS]
        assert [step for step, _ in history[key]] == expected, key
    assert set(values_of(history, "train/num_microbatches")) == {2.0}
    assert set(values_of(history, "train/skipped_updates")) == {0.0}


def test_router_losses_of_the_moe_layers(run: FinishedRun) -> None:
    history = run.history()
    assert all(0.95 < value < 2 for value in values_of(history, "train/moe/load_balancing_loss"))
    assert values_of(history, "train/moe/load_balancing_loss")[-1] == pytest.approx(1.0, abs=0.1)
    for name in ("load_balancing_loss", "z_loss"):
        by_layer = {key for key in history if key.startswith(f"train/moe/{name}_layer_")}
        assert by_layer == {f"train/moe/{name}_layer_{layer}" for layer in MOE_LAYERS}
        # The mean over the layers that have a router, not over all of them.
        layers = torch.tensor([values_of(history, key) for key in by_layer], dtype=torch.float64)
        assert values_of(history, f"train/moe/{name}") == pytest.approx(layers.mean(dim=0).tolist(), rel=1e-6)
    assert [key for key in history if "moe/moe" in key] == []
    assert not any(f"layer_{DENSE_LAYER}" in key for key in history)


def test_expert_load_of_every_step(run: FinishedRun) -> None:
    rows = pyarrow.dataset.dataset(run.run_folder / "expert_load.parquet").to_table().to_pylist()
    history = run.history()
    tokens: dict[tuple[int, int], int] = {}
    for row in rows:
        place = (row["step"], row["layer"])
        tokens[place] = tokens.get(place, 0) + row["count"]
    # Each real token goes to two experts of each MoE layer; padding goes to none.
    expected = {(step, layer): 2 * int(num) for step, num in history["train/num_tokens"] for layer in MOE_LAYERS}
    assert tokens == expected


def test_learns(run: FinishedRun) -> None:
    losses, accuracies = values_of(run.history(), "val/loss"), values_of(run.history(), "val/accuracy")
    assert losses[0] == pytest.approx(torch.tensor(45.0).log().item(), abs=0.5), "untrained: as good as guessing"
    assert losses[-1] < 0.35 * losses[0]
    assert accuracies[0] < 0.1
    assert accuracies[-1] > 0.5


def test_run_folder_says_what_ran(run: FinishedRun) -> None:
    config = load_config(sft_runs.EXEMPLAR, run.overrides)
    assert load_config(run.run_folder / "config.yaml") == config
    versions = read_json(run.run_folder / "versions.json")
    assert versions["packages"]["megatron-core"] in ("0.16.1", "0.19.2")
    assert versions["packages"]["torch"].startswith("2.")
    assert read_json(run.run_folder / "git.json")["available"] is False, "the run was started outside a checkout"
    moe = read_json(run.run_folder / "effective_moe_configuration.json")
    expected = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 1e-3,
        "moe_layer_freq": [1, 0, 1, 1],
    }
    assert {name: moe[name] for name in expected} == expected


def test_final_weights_are_the_trained_model(run: FinishedRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = run.run_folder / "checkpoints" / "final"
    model, loading = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(loading.values()), "no weight is missing, left over or of another shape"
    tokenizer = AutoTokenizer.from_pretrained(final)
    total_loss, matches, num_tokens = 0.0, 0, 0
    for line in (run.folder / "data" / "validation.jsonl").read_text().splitlines():
        sample = json.loads(line)
        prompt, response = (tokenizer.encode(sample[part], add_special_tokens=False) for part in sample)
        ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model.eval()(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        targets = ids[0, len(prompt) :]
        total_loss -= logprobs.gather(1, targets[:, None]).sum().item()
        matches += int((logprobs.argmax(dim=-1) == targets).sum())
        num_tokens += len(targets)
    history = run.history()
    assert total_loss / num_tokens == pytest.approx(values_of(history, "val/loss")[-1], abs=1e-4)
    assert matches / num_tokens == pytest.approx(values_of(history, "val/accuracy")[-1], abs=2 / num_tokens)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
