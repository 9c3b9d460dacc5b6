# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The callback in trainers of transformers and TRL, on a tiny random Qwen3-MoE: `make test-trl`."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from nemo_rl_moe.routing.hooks.trainer import RoutingCallback
from tests.conftest import REPOSITORY_ROOT
from tests.support.chat_templates import make_byte_tokenizer

pytestmark = pytest.mark.trl
LAYERS, TOPK = 3, 2
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
    "learning_rate": 1e-3,
}


@cache
def tokenizer() -> Any:
    return make_byte_tokenizer(pad_token="<s>")


def make_model() -> Qwen3MoeForCausalLM:
    set_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer()),
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=TOPK,
            max_position_embeddings=256,
            pad_token_id=tokenizer().pad_token_id,
            eos_token_id=tokenizer().eos_token_id,
        )
    )
    # Routers and attention that distinguish tokens, as those of a trained model do.
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


TEXTS = [f"{'ab' * (number % 5)} {number} and {number + 1} are {2 * number + 1}" for number in range(24)]


def plain_trainer(folder: Path, **changes: Any) -> Trainer:
    rows = [tokenizer()(text)["input_ids"] for text in TEXTS]
    longest = max(map(len, rows))
    columns = {
        "input_ids": [row + [tokenizer().pad_token_id] * (longest - len(row)) for row in rows],
        "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
        "labels": [row + [-100] * (longest - len(row)) for row in rows],
    }
    arguments = COMMON | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": "none"}
    args = TrainingArguments(output_dir=str(folder), **(arguments | changes))
    return Trainer(make_model(), args=args, train_dataset=Dataset.from_dict(columns))


def sft_trainer(folder: Path) -> Any:
    args = SFTConfig(output_dir=str(folder), per_device_train_batch_size=4, report_to="none", **COMMON)
    data = Dataset.from_dict({"text": TEXTS})
    return SFTTrainer(make_model(), args=args, train_dataset=data, processing_class=tokenizer())


def dpo_trainer(folder: Path) -> Any:
    args = DPOConfig(output_dir=str(folder), per_device_train_batch_size=4, report_to="none", **COMMON)
    data = Dataset.from_dict({"prompt": TEXTS, "chosen": TEXTS[::-1], "rejected": ["no"] * len(TEXTS)})
    return DPOTrainer(make_model(), make_model(), args=args, train_dataset=data, processing_class=tokenizer())


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [completion.count("a") / 10 + len(set(completion)) / 50 for completion in completions]


def grpo_trainer(folder: Path, **changes: Any) -> Any:
    arguments = COMMON | {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "report_to": "none",
    }
    args = GRPOConfig(output_dir=str(folder), **(arguments | changes))
    data = Dataset.from_dict({"prompt": TEXTS})
    return GRPOTrainer(make_model(), args=args, train_dataset=data, processing_class=tokenizer(), reward_funcs=reward)


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_load_balance_of_each_step_reaches_the_logs_and_changes_no_bit(tmp_path: Path, checkpointing: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain = plain_trainer(tmp_path / "plain", gradient_checkpointing=checkpointing)
    plain.train()
    events = tmp_path / "events"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(events))
        watched = plain_trainer(tmp_path / "run", gradient_checkpointing=checkpointing, report_to="tensorboard")
        callback = RoutingCallback()
        callback.attach(watched)
        watched.train()
    for (name, one), other in zip(plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    found = steps_of(watched)
    assert [entry["step"] for entry in found] == [1, 2, 3]
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in steps_of(plain)]
    assert all(entry["moe/cv_mean"] > 0 for entry in found)
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    accumulator = EventAccumulator(str(folder)).Reload()
    logged = [event.value for event in accumulator.Scalars("train/moe/cv_mean")]
    assert logged == pytest.approx([entry["moe/cv_mean"] for entry in found])
    # The hooks are off the model again.
    hooks = [hook for module in watched.model.modules() for hook in module._forward_hooks.values()]
    assert not any(type(hook).__module__.startswith("nemo_rl_moe") for hook in hooks)


def test_counts_are_those_of_all_tokens_of_a_step(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, max_steps=1)
    layers: list[list[torch.Tensor]] = [[] for _ in trainer.model.model.layers]
    for layer, of_layer in zip(trainer.model.model.layers, layers, strict=True):
        layer.mlp.gate.register_forward_hook(lambda *call, kept=of_layer: kept.append(call[2][2].clone()))
    masks: list[torch.Tensor] = []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    callback = RoutingCallback()
    callback.attach(trainer)
    trainer.train()
    cvs = []
    for counted in layers:
        experts = torch.cat([of_pass[mask.reshape(-1).bool()] for of_pass, mask in zip(counted, masks, strict=True)])
        loads = torch.bincount(experts.flatten(), minlength=8).double()
        cvs.append(float(loads.std() / loads.mean()))
    (entry,) = steps_of(trainer)
    assert len(masks) == 2
    assert any((mask == 0).any() for mask in masks)
    assert entry["moe/cv_max"] == pytest.approx(max(cvs), rel=1e-6)
    assert entry["moe/cv_mean"] == pytest.approx(sum(cvs) / len(cvs), rel=1e-6)


@pytest.mark.parametrize("make", [sft_trainer, dpo_trainer])
def test_trl_logs_the_load_balance(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    trainer = make(tmp_path)
    callback = RoutingCallback()
    callback.attach(trainer)
    trainer.train()
    assert [entry["moe/dead_expert_frac_mean"] >= 0 for entry in steps_of(trainer)] == [True] * 3
    assert not any("routing/" in key for entry in steps_of(trainer) for key in entry)
    assert callback.findings == []


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True, "num_iterations": 2}], ids=["plain", "twice"])
def test_generation_and_training_of_grpo_agree(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = grpo_trainer(tmp_path, **changes)
    callback = RoutingCallback()
    callback.attach(trainer)
    trainer.train()
    found = steps_of(trainer)
    assert len(found) == 3
    for entry in found:
        assert entry["moe/routing/rows_usable_share"] == 1
        # Eight sequences, of each at least one token that the engine fed, in each layer.
        assert entry["moe/routing/rows_expected"] >= 8 * LAYERS
    # Before the first update weights are the same; in float32 near ties alone differ.
    assert found[0]["moe/routing/live_agreement"] > 0.99
    assert found[0]["rollout_moe/cv_mean"] > 0
    assert not any("moe_expert_utilization" in key for key in found[0])  # ten keys that change from step to step
    assert callback.findings == []


@contextmanager
def two_routers_swapped(model: Qwen3MoeForCausalLM) -> Iterator[None]:
    """Generation with the first two layers' routers in each other's place: a transfer of weights gone wrong."""
    first, second = (model.model.layers[layer].mlp.gate.weight for layer in (0, 1))

    def swap() -> None:
        with torch.no_grad():
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    generate = model.generate

    def generate_swapped(*args: Any, **kwargs: Any) -> Any:
        swap()
        try:
            return generate(*args, **kwargs)
        finally:
            swap()

    model.generate = generate_swapped
    yield
    del model.generate


def test_a_generation_with_other_weights_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = grpo_trainer(tmp_path, max_steps=2)
    callback = RoutingCallback()
    callback.attach(trainer)
    with two_routers_swapped(trainer.model):
        trainer.train()
    assert steps_of(trainer)[0]["moe/routing/live_agreement"] < 0.6
    assert callback.findings
    reported = [record.message for record in caplog.records if record.name == "nemo_rl_moe.routing.hooks.trainer"]
    assert len(reported) == len(callback.findings)
    assert all(text.startswith("routing, step 1") for text in reported)


def train_one_of_two(folder: Path, *, swapped_in: int | None) -> None:
    """Runs in either process of a job, of which one may generate with other weights: what its callback said."""
    from torch import distributed as dist

    trainer = grpo_trainer(folder / "run", max_steps=2, ddp_backend="gloo")
    callback = RoutingCallback()
    callback.attach(trainer)
    with two_routers_swapped(trainer.model) if dist.get_rank() == swapped_in else nullcontext():
        trainer.train()
    (entry, _) = steps_of(trainer)
    said = {"metrics": {key: value for key, value in entry.items() if "moe/" in key}}
    said["texts"] = [finding.text for finding in callback.findings]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.mark.parametrize("swapped_in", [None, 1])
def test_two_processes_say_the_same_of_both(tmp_path: Path, swapped_in: int | None) -> None:
    code = (
        "from pathlib import Path; from tests.functional.test_trainer_hooks import train_one_of_two; "
        f"train_one_of_two(Path({str(tmp_path)!r}), swapped_in={swapped_in})"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=REPOSITORY_ROOT,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    # Eight sequences of either process.
    assert first["metrics"]["moe/routing/rows_expected"] >= 16 * LAYERS
    if swapped_in is None:
        assert first["texts"] == []
        assert first["metrics"]["moe/routing/live_agreement"] > 0.99
    else:
        assert any(text.startswith("the writer rank-1 has routes that are not its tokens'") for text in first["texts"])


def test_the_lines_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY_ROOT / "docs" / "hooks.md").read_text()
    shown = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "RoutingCallback" in block]
    assert len(shown) == 2
    names: dict[str, Any] = {
        "tokenizer": tokenizer(),
        "reward": reward,
        "settings": COMMON | {"report_to": "none", "per_device_train_batch_size": 8},
    }
    for block, column in zip(shown, ("text", "prompt"), strict=True):
        names["model"] = make_model()  # a trainer of TRL leaves its own forward on a model
        names["dataset"] = Dataset.from_dict({column: TEXTS})
        exec(block, names)
        assert all("moe/cv_mean" in entry for entry in steps_of(names["trainer"]))
