# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings: each is broken once and reported in exactly one line; layouts that work are let through."""

import os
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_config
from tests.unit.config.conftest import Problems, about_keys

M = "policy.megatron_cfg"
TENSOR_2 = (f"{M}.tensor_model_parallel_size=2", f"{M}.sequence_parallel=true")
PIPELINE_2 = f"{M}.pipeline_model_parallel_size=2"


REFUSED = {
    "policy.train_global_batch_size=100": "got 100, expected a multiple of 128 (2 data-parallel ranks x"
    " policy.train_micro_batch_size 64); nearest: 128",
    f"{M}.sequence_parallel=true": f"true needs {M}.tensor_model_parallel_size above 1",
    f"{M}.context_parallel_size=2": "got 2, expected 1 on CPUs (cluster.gpus_per_node 0): only Transformer Engine's"
    " attention lets ranks share a sequence",
    f"{M}.expert_tensor_parallel_size=2": "got 2, expected 1 (1 or the tensor parallel size)",
    f"{M}.virtual_pipeline_model_parallel_size=2": f"2 needs {M}.pipeline_model_parallel_size above 1",
    f"{M}.moe_router_force_hot_rank=1": f"got 1, expected a rank below {M}.expert_model_parallel_size = 1, or null",
    f"{M}.optimizer.min_lr=0.1": "got 0.1, expected at most optimizer.lr = 0.003, or null for a tenth of it",
}
REFUSED_TOGETHER: dict[tuple[str, ...], str] = {
    (f"{M}.env_vars={{RANK: '1', NCCL_DEBUG: INFO}}",): "policy.megatron_cfg.env_vars.RANK: got '1', expected no such"
    " variable: the run sets it itself",
    (
        f"{M}.moe_token_dispatcher_type=flex",
        f"{M}.moe_flex_dispatcher_backend=hybridep",
    ): "policy.megatron_cfg.moe_flex_dispatcher_backend: got 'hybridep', expected 'deepep' or, with Megatron-Core 0.19,"
    " policy.megatron_cfg.moe_hybridep_pad_uneven_dispatch_inputs=true: its buffer is as large as the first batch, and"
    " later batches may be larger",
    (PIPELINE_2, "cluster.cpu_workers_per_node=3"): "cluster: 3 workers (num_nodes 1 x cpu_workers_per_node 3) cannot"
    " be divided by 2 (policy.megatron_cfg: tensor_model_parallel_size 1 x pipeline_model_parallel_size 2 x"
    f" context_parallel_size 1); take a multiple of 2 workers, or lower {PIPELINE_2.partition('=')[0]} to 1",
    (f"{M}.expert_model_parallel_size=4", "cluster.num_nodes=3", "policy.train_global_batch_size=384"): "cluster: 6"
    " workers (num_nodes 3 x cpu_workers_per_node 2) cannot be divided by 4 (policy.megatron_cfg:"
    " expert_model_parallel_size 4 x expert_tensor_parallel_size 1 x pipeline_model_parallel_size 1); take a multiple"
    f" of 4 workers, or lower {M}.expert_model_parallel_size to 2",
    ("policy.train_global_batch_size=101", "policy.dynamic_batching.enabled=true"): "policy.train_global_batch_size:"
    " got 101, expected a multiple of 2 (2 data-parallel ranks); nearest: 100 or 102",
    ("policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=true"): "policy.sequence_packing.enabled"
    " and policy.dynamic_batching.enabled: only one of them can be true",
    ("policy.sequence_packing.enabled=true", f"{M}.layer_spec=local"): "policy.sequence_packing.enabled: true cannot be"
    f" used with {M}.layer_spec local, whose attention takes no packed rows; use auto",
    (
        "policy.sequence_packing={enabled: true, train_mb_tokens: 63, train_mb_patches: null}",
    ): "policy.sequence_packing.train_mb_tokens: got 63, expected at least policy.max_total_sequence_length = 64",
    (f"{M}.tensor_model_parallel_size=2",): f"{M}.sequence_parallel: false cannot be used with"
    f" {M}.tensor_model_parallel_size 2: MoE layers need true",
    ("cluster.gpus_per_node=2", f"{M}.context_parallel_size=2", f"{M}.layer_spec=local"): f"{M}.context_parallel_size:"
    f" got 2, expected 1 with {M}.layer_spec local: only Transformer Engine's attention lets ranks share a sequence",
    (
        *("cluster.gpus_per_node=3", f"{M}.context_parallel_size=3"),
        "policy.sequence_packing={enabled: true, train_mb_tokens: 64, train_mb_patches: null}",
    ): "policy.sequence_packing.train_mb_tokens: got 64, expected at least policy.max_total_sequence_length, padded for"
    f" {M}.context_parallel_size 3, = 66",
    (PIPELINE_2, f"{M}.virtual_pipeline_model_parallel_size=1"): f"{M}.virtual_pipeline_model_parallel_size: got 1,"
    " expected 2 or more, or null",
    (
        PIPELINE_2,
        f"{M}.virtual_pipeline_model_parallel_size=2",
        "policy.train_micro_batch_size=128",
    ): "policy.train_global_batch_size: 128 makes 1 microbatches of 128 on each of 1 data-parallel ranks;"
    f" {M}.virtual_pipeline_model_parallel_size 2 needs a multiple of 2",
    (
        f"{M}.moe_metrics.mode=detailed",
        f"{M}.moe_metrics.detailed_every_steps=10",
    ): f"{M}.moe_metrics.detailed_every_steps: got 10, expected null when {M}.moe_metrics.mode is detailed (on every"
    " step); use mode brief for details on every Nth step",
    (
        f"{M}.moe_router_force_load_balancing=true",
        f"{M}.moe_router_force_biased=-1.0",
    ): f"{M}.moe_router_force_load_balancing and {M}.moe_router_force_biased: only one way of forced routing can be on",
    (f"{M}.track_moe_metrics=false",): f"{M}.moe_per_layer_logging: true needs {M}.track_moe_metrics true",
    (f"{M}.moe_layer_recompute=true", f"{M}.activation_checkpointing=full"): f"{M}.moe_layer_recompute: true"
    f" contradicts {M}.activation_checkpointing full; leave it out and use activation_checkpointing: none, full or moe",
    (f"{M}.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]",): f"{M}.moe_aux_loss_coeff: got one value, but"
    f" {M}.moe_router_load_balancing_type is a list of 2; each type needs its own coefficient",
    (f"{M}.scheduler.lr_decay_iters=20",): f"{M}.scheduler.lr_warmup_iters: got 20, expected less than"
    " scheduler.lr_decay_iters = 20",
}
NO_GRADIENTS = {
    (f"{M}.track_moe_metrics=false", f"{M}.moe_per_layer_logging=false"): f"{M}.track_moe_metrics false",
    (f"{M}.freeze_moe_router=true",): f"{M}.freeze_moe_router true",
    (f"{M}.moe_router_force_load_balancing=true",): "forced routing",
}


@pytest.mark.parametrize(("overrides", "reason"), NO_GRADIENTS.items())
def test_gradients_need_a_router_that_learns(problems_of: Problems, overrides: tuple[str, ...], reason: str) -> None:
    every = f"{M}.router_gradients.every_n_steps"
    assert problems_of(f"{every}=5", *overrides) == [f"{every}: got 5, expected null with {reason}"]


@pytest.mark.parametrize(
    ("overrides", "line"), [*(((override,), line) for override, line in about_keys(REFUSED)), *REFUSED_TOGETHER.items()]
)
def test_broken_rule_gives_its_one_line(problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    problems = [problem for problem in problems_of(*overrides) if not _follows_from_context_parallel(problem, line)]
    assert problems == [line]


def _follows_from_context_parallel(problem: str, line: str) -> bool:
    return "context_parallel_size: got" in line and problem.startswith("cluster: 1 workers")


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [
        (2, (f"{M}.expert_model_parallel_size=2",)),
        (2, (PIPELINE_2,)),
        (2, (PIPELINE_2, f"{M}.virtual_pipeline_model_parallel_size=2")),
        (2, (PIPELINE_2, f"{M}.virtual_pipeline_model_parallel_size=2", "policy.dynamic_batching.enabled=true")),
        (4, (PIPELINE_2, f"{M}.expert_model_parallel_size=2")),
        (2, TENSOR_2),
        (2, (*TENSOR_2, f"{M}.expert_model_parallel_size=2")),
        (2, (*TENSOR_2, f"{M}.expert_tensor_parallel_size=2")),
        (4, (*TENSOR_2, PIPELINE_2, f"{M}.expert_model_parallel_size=2")),
        (1, ("policy.train_global_batch_size=64",)),
        (2, ("policy.sequence_packing.enabled=true",)),
        (2, ("policy.dynamic_batching.enabled=true", "policy.train_global_batch_size=6")),
        (2, (f"{M}.moe_layer_recompute=true", f"{M}.activation_checkpointing=moe")),
        (2, (f"{M}.router_gradients={{every_n_steps: 5, num_microbatches: null}}",)),
        (2, (f"{M}.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]", f"{M}.moe_aux_loss_coeff=[0.01, 0.001]")),
        (
            2,
            (
                "data.validation=null",
                "checkpointing.metric_name=null",
                "sft.val_period=0",
                "sft.val_at_start=false",
                "sft.val_at_end=false",
            ),
        ),
    ],
)
def test_working_layout_is_let_through(workers: int, overrides: tuple[str, ...]) -> None:
    load_config("sft_tiny_moe.yaml", [f"cluster.cpu_workers_per_node={workers}", *overrides], check_paths=False)


def test_gpus_count_before_cpu_workers() -> None:
    cluster = load_config("sft_qwen3_30b_a3b.yaml", ["cluster.num_nodes=2"], check_paths=False).cluster
    assert cluster.world_size == 16
    assert cluster.model_copy(update={"gpus_per_node": 0, "cpu_workers_per_node": 3}).world_size == 6


@pytest.fixture
def demo_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds all that the tiny exemplar names."""
    for name in (
        "data/addition/train.jsonl",
        "data/addition/validation.jsonl",
        "examples/assets/tiny_qwen3_moe/config.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_that_are_there_are_found(demo_folder: Path) -> None:
    before = sorted(demo_folder.rglob("*"))
    load_config("sft_tiny_moe.yaml", ["data.train.path=some/dataset"])
    assert sorted(demo_folder.rglob("*")) == before


def test_files_that_are_not_there(demo_folder: Path, problems_of: Problems) -> None:
    (demo_folder / "examples/assets/tiny_qwen3_moe/config.json").unlink()
    assert problems_of(
        "data.train.path=data/addition/trian.jsonl", "policy.tokenizer.chat_template=a.jinja", check_paths=True
    ) == [
        "policy.model_name: the folder examples/assets/tiny_qwen3_moe holds no config.json",
        f"policy.tokenizer.chat_template: a.jinja not found in the working folder {demo_folder}",
        f"data.train.path: data/addition/trian.jsonl not found in the working folder {demo_folder};"
        " did you mean data/addition/train.jsonl?",
    ]


def test_an_adapter_that_is_not_there(demo_folder: Path, problems_of: Problems) -> None:
    (demo_folder / "run/step_20").mkdir(parents=True)
    fields = (
        "rank: 8, alpha: 16.0, use_rslora: false, targets: [all-linear], dropout: 0.0, experts: none, init: kaiming"
    )
    assert problems_of(f"policy.lora={{{fields}, path: run/step_30}}", check_paths=True) == [
        f"policy.lora.path: run/step_30 not found in the working folder {demo_folder}; did you mean run/step_20?;"
        " expected a folder in peft's form, `final` or a checkpoint"
    ]


def test_a_pipe_is_no_data_file(demo_folder: Path, problems_of: Problems) -> None:
    os.mkfifo(demo_folder / "pipe.jsonl")  # it can be read once, or hangs
    assert problems_of("data.train.path=pipe.jsonl", check_paths=True) == [
        "data.train.path: pipe.jsonl is no plain file"
    ]


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "a/b/c"])
def test_model_folder_is_distinguished_from_a_hub_name(demo_folder: Path, problems_of: Problems, name: str) -> None:
    (problem,) = problems_of(f"policy.model_name={name}", check_paths=True)
    assert problem.startswith(f"policy.model_name: {Path(name)} not found")
    load_config("sft_tiny_moe.yaml", ["policy.model_name=Qwen/Qwen3-30B-A3B"])


def test_paths_are_checked_beside_schema_problems(demo_folder: Path, problems_of: Problems) -> None:
    (demo_folder / "data/addition/train.jsonl").unlink()
    problems = problems_of("sft.seed=x", check_paths=True)
    assert [problem.split(":")[0] for problem in problems] == ["sft.seed", "data.train.path"]
