# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every leaf of a configuration of NeMo-RL is carried over or named: of files of every kind, and by every key name."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_moe.cli import main
from nemo_rl_moe.config.loading import problems_of_translation
from nemo_rl_moe.config.nemo_rl import translate
from nemo_rl_moe.config.nemo_rl_files import read_theirs
from nemo_rl_moe.config.nemo_rl_keys import row_of
from nemo_rl_moe.data.records import parse_record
from tests.nemo_rl_leaves import fates_of, places
from tests.support.quick_list import full
from tests.unit.config.test_nemo_rl import COMMON, GENERATION, GRPO, write
from tests.unit.config.test_nemo_rl_images import IMAGES
from tests.unit.config.test_nemo_rl_roles import DISTILLATION, PPO

NAMES_FILE = Path(__file__).with_name("nemo_rl_key_names.yaml")
THEIRS = "NEMO_RL_CONFIGS"
SFT = """
sft: {max_num_epochs: 1, max_num_steps: 60, val_period: 10, val_batches: 8, val_global_batch_size: 32, \
val_micro_batch_size: 1, val_at_start: true, val_at_end: false, seed: 42}
checkpointing: {metric_name: "val:val_loss", higher_is_better: false}
policy: {tokenizer: {chat_template: default}}
data:
  max_input_seq_length: 512
  add_bos: true
  add_eos: true
  num_workers: 1
  train: {dataset_name: OpenMathInstruct-2, output_key: generated_solution, split: train_1M, \
split_validation_size: 0.05, seed: 42}
  default: {prompt_file: prompts/math.txt, system_prompt_file: null, processor: sft_processor}
logger: {num_val_samples_to_print: 3}
"""
DPO = """
dpo: {max_num_epochs: 1, max_num_steps: 60, val_period: -1, val_batches: 8, val_global_batch_size: 16, \
val_at_start: true, val_at_end: false, seed: 42, reference_policy_kl_penalty: 0.05, preference_loss_weight: 1, \
sft_loss_weight: 0, preference_average_log_probs: false, sft_average_log_probs: false}
checkpointing: {metric_name: "val:val_loss", higher_is_better: false}
data: {train: {dataset_name: HelpSteer3, split: train}, validation: {dataset_name: HelpSteer3, split: validation}}
"""
RM = """
rm: {max_num_epochs: 1, max_num_steps: -1, val_period: 16, val_batches: -1, val_global_batch_size: 32, \
val_micro_batch_size: 1, val_at_start: false, val_at_end: false, seed: 42}
checkpointing: {metric_name: "val:validation-default_loss", higher_is_better: false}
policy: {reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}, activation_checkpointing_enabled: false}
data: {train: {dataset_name: HelpSteer3, split: train}, validation: {dataset_name: HelpSteer3, split: validation}}
"""
TORCH = """
policy:
  megatron_cfg: {enabled: false}
  dtensor_cfg: {enabled: true, _v2: true, cpu_offload: false, sequence_parallel: true, tensor_parallel_size: 2, \
context_parallel_size: 1, expert_parallel_size: 2, activation_checkpointing: true, custom_parallel_plan: null, \
env_vars: {NCCL_DEBUG: INFO}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.98], eps: 1.0e-8, \
foreach: false}}
  scheduler:
  - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}}
  - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000}}
  - {milestones: [20]}
"""
SWITCHES = """
grpo:
  normalize_rewards: false
  use_leave_one_out_baseline: true
  val_start_at: -1
  adv_estimator: {name: reinforce_plus_plus, minus_baseline: false, normalize_rewards: false, \
use_leave_one_out_baseline: true}
  reward_shaping: {enabled: false, max_response_length: 300, overlong_buffer_length: 16, overlong_buffer_penalty: 1}
loss_fn: {use_kl_in_reward: true, reference_policy_kl_type: k2, use_importance_sampling_correction: false, \
truncated_importance_sampling_ratio: 2, truncated_importance_sampling_type: tis, use_cispo: true, \
disable_ppo_ratio: false}
policy:
  is_vlm: true
  logprob_chunk_size: null
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.98]}}
  megatron_cfg:
    sequence_parallel: false
    activation_checkpointing: true
    recompute_granularity: selective
    recompute_modules: [moe, mlp]
    optimizer: {optimizer_cpu_offload: false, optimizer_offload_fraction: 0.5, overlap_cpu_optimizer_d2h_h2d: true}
  generation: {backend: vllm, vllm_kwargs: {}, vllm_cfg: {expert_parallel_size: 8, precision: fp8}, \
colocated: {enabled: true, resources: {gpus_per_node: 2, num_nodes: 1}}}
data: {default: {env_name: math, prompt_file: prompts/cot.txt}}
env: {dapo: {num_workers: 8}, math: {math_verify_impl: hf_math_verify}}
"""
GYM = """
grpo: {adv_estimator: {name: raw_reward, normalize_advantages: true}}
policy: {generation: {backend: sglang, sglang_cfg: {port: 1}, colocated: {enabled: false, \
resources: {gpus_per_node: 2, num_nodes: null}}}}
data: {train: {dataset_name: NemoGymDataset, data_path: no/such.jsonl}, default: {env_name: nemo_gym}}
env: {should_use_nemo_gym: true, nemo_gym: {port_range_low: 1}}
cluster: {num_nodes: 1}
"""
KINDS: dict[str, tuple[str, ...]] = {
    "sft": (COMMON, SFT),
    "sft_torch": (COMMON, SFT, TORCH),
    "dpo": (COMMON, DPO),
    "dpo_torch": (COMMON, DPO, TORCH),
    "rm": (COMMON, RM),
    "rm_torch": (COMMON, RM, TORCH),
    "grpo": (COMMON, GRPO, GENERATION),
    "grpo_torch": (COMMON, GRPO, GENERATION, TORCH),
    "grpo_switches": (COMMON, GRPO, GENERATION, SWITCHES),
    "grpo_plots": (COMMON, GRPO, GENERATION, IMAGES),
    "ppo": (COMMON, GENERATION, PPO),
    "ppo_torch": (COMMON, GENERATION, PPO, TORCH),
    "distillation": (COMMON, GENERATION, DISTILLATION),
    "distillation_torch": (COMMON, GENERATION, DISTILLATION, TORCH),
    "grpo_gym": (COMMON, GRPO, GENERATION, GYM),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_leaf_is_lost_in_silence(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, *KINDS[kind])
    fates = fates_of(read_theirs(path), path)
    assert fates.lost == []
    assert len(fates.carried) > 25
    assert len(fates.named) > 5


def names() -> Iterator[tuple[str, ...]]:
    """Yield the places of all keys that NeMo-RL's files have."""
    return (place for place, _ in places(yaml.safe_load(NAMES_FILE.read_text())))


@pytest.mark.parametrize("kind", ["sft", full("dpo_torch"), full("rm_torch"), "grpo", full("grpo_torch")])
def test_no_key_of_theirs_is_lost_whatever_file_it_stands_in(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, *KINDS[kind])
    theirs = read_theirs(path)
    others = {"sft", "dpo", "rm", "grpo", "ppo", "distillation"} - {kind.partition("_")[0]}
    for value in (7, "text"):
        tree: dict[str, Any] = {}
        for place in names():
            row = row_of(".".join(place))
            # Types of what is carried over are theirs; of all other keys any value does.
            if place[0] not in others and (row is None or row.ours is None):
                _put(tree, place, value)
        lost = fates_of(_under(theirs, tree), path).lost
        assert lost == []


def _put(tree: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    tree[place[-1]] = value


def _under(theirs: Any, tree: Any) -> Any:
    """Return a tree with the values of another one over it."""
    if not isinstance(theirs, Mapping) or not isinstance(tree, Mapping):
        return theirs
    return {**tree, **{name: _under(value, tree[name]) if name in tree else value for name, value in theirs.items()}}


@pytest.mark.parametrize(
    ("written", "ours", "reported"),
    [
        ({"chat_template": "default"}, None, ""),
        ({"chat_template": "Default"}, None, ""),
        ({"chat_template": None}, "not there", "{% for message in messages %}{{ message['content'] }}{% endfor %}"),
        ({"chat_template": "{{ messages }}"}, "not there", "write it into a file, and name that"),
        ({"chat_template": "mine.jinja"}, "mine.jinja", ""),
        ({}, "not there", ""),
    ],
)
def test_chat_templates(tmp_path: Path, written: dict[str, Any], ours: str | None, reported: str) -> None:
    """`default` is the tokenizer's own, and so is no template at all; null passes the contents on."""
    (tmp_path / "mine.jinja").write_text("x")
    path = write(tmp_path, COMMON, GRPO, GENERATION)
    tree = yaml.safe_load(path.read_text())
    tree["policy"]["tokenizer"] |= written
    path.write_text(yaml.safe_dump(tree))
    translation = translate(path)
    assert translation.values.get("policy.tokenizer.chat_template", "not there") == ours
    (lines,) = ([line for line in translation.obstacles if "chat_template" in line],)
    assert [reported in line for line in lines] == ([True] if reported else [])


def test_questions_and_answers_are_read_by_their_keys_in_sft(tmp_path: Path) -> None:
    translation = translate(write(tmp_path, COMMON, SFT))
    assert translation.values["data.prompt_key"] == "problem"
    assert translation.values["data.completion_key"] == "generated_solution"
    assert problems_of_translation(translation) == []


def test_squad_is_read_as_theirs_in_sft(tmp_path: Path) -> None:
    """Its context is a system turn, and the first of its answers is the response."""
    squad = {"dataset_name": "squad", "split": "train"}
    path = write(tmp_path, COMMON, SFT, data__train=squad, data__validation={**squad, "split": "validation"})
    tree = yaml.safe_load(path.read_text())
    tree["data"]["default"] = {"processor": "sft_processor"}
    path.write_text(yaml.safe_dump(tree))
    translation = translate(path)
    assert problems_of_translation(translation) == []
    assert not [line for line in translation.without if "training data are used" in line]
    keys = {name: translation.values[f"data.{name}_key"] for name in ("prompt", "completion", "system")}
    record = {"id": "1", "title": "t", "context": "x is 2.", "question": "x+2=", "answers": {"text": ["4", "four"]}}
    turns = [(turn["role"], turn["content"]) for turn in parse_record(record, "f:1", keys=keys).messages]
    assert turns == [("system", "x is 2."), ("user", "x+2="), ("assistant", "4")]


@pytest.mark.parametrize(
    ("kind", "named", "ours"),
    [
        (
            DPO,
            {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q", "chosen_key": "win", "rejected_key": "lose"},
            {"data.prompt_key": "q", "data.chosen_key": "win", "data.rejected_key": "lose"},
        ),
        (
            SFT,
            {"dataset_name": "openai_format", "chat_key": "chat", "system_key": "sys", "tool_key": "tools"},
            {"data.messages_key": "chat", "data.system_key": "sys"},
        ),
        (SFT, {"dataset_name": "openai_format"}, {}),
    ],
)
def test_keys_of_records_are_carried_over(
    tmp_path: Path, kind: str, named: dict[str, str], ours: dict[str, str]
) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    samples = {**named, "data_path": str(tmp_path / "mine.jsonl")}
    validates: dict[str, Any] = {"dpo__val_period": 10} if kind == DPO else {}
    translation = translate(write(tmp_path, COMMON, kind, data__train=samples, data__validation=samples, **validates))
    assert problems_of_translation(translation) == []
    assert {key: value for key, value in translation.values.items() if key.endswith("_key")} == ours
    assert not [line for line in (*translation.without, *translation.unread) if "_key" in line]


def test_other_keys_of_the_held_out_records_are_reported(tmp_path: Path) -> None:
    samples = {"dataset_name": "BinaryPreferenceDataset", "data_path": "mine.jsonl", "chosen_key": "win"}
    held_out = {**samples, "chosen_key": "best"}
    translation = translate(write(tmp_path, COMMON, DPO, data__train=samples, data__validation=held_out))
    assert translation.values["data.chosen_key"] == "win"
    assert "data.validation.chosen_key: best: the key of the training data is used" in translation.without


def test_ranked_records_and_default_prompts_are_named(tmp_path: Path) -> None:
    ranked = {"dataset_name": "PreferenceDataset", "data_path": "mine.jsonl"}
    (line,) = translate(write(tmp_path, COMMON, DPO, data__train=ranked)).obstacles
    assert "data.chosen_key=completions.0.completion" in line
    prompted = {"dataset_name": "openai_format", "data_path": "mine.jsonl", "system_prompt": "Add."}
    without = translate(write(tmp_path, COMMON, SFT, data__train=prompted)).without
    assert "data.train.system_prompt: Add.: a message of each record, or words in the chat template" in without


def test_questions_of_a_file_are_under_their_own_default_keys(tmp_path: Path) -> None:
    samples = {"dataset_name": "ResponseDataset", "data_path": "mine.jsonl"}
    values = translate(write(tmp_path, COMMON, GRPO, GENERATION, data__train=samples)).values
    assert (values["data.prompt_key"], values["data.answer_key"]) == ("input", "output")


def test_samples_that_sft_cannot_read_end_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, COMMON, SFT, data__train={"dataset_name": "HelpSteer3"})
    assert main(["config", "--from-nemo-rl", str(path)]) == 2
    reported = capsys.readouterr()
    for line in (
        "not carried over: data.default.prompt_file: prompts/math.txt: data.prompt_template is no key of sft",
        "error: " + f"{path}: translated, but needs a correction: data.train.dataset_name: HelpSteer3:"
        " nvidia/HelpSteer3; its records are pairs: name the responses to train on as data.completion_key",
    ):
        assert line in reported.err.splitlines()
    assert "chat_template: null" in reported.out


def test_the_result_is_checked_as_a_run_is_that_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the result names have to be there."""
    monkeypatch.chdir(tmp_path)
    samples = {"dataset_name": "ResponseDataset", "data_path": "mine.jsonl"}
    template = {"name": "some/model", "chat_template": "mine.jinja"}
    path = write(tmp_path, COMMON, GRPO, GENERATION, data__train=samples, policy__tokenizer=template)
    assert main(["config", "--from-nemo-rl", str(path)]) == 2
    reported = capsys.readouterr().err
    for key in ("data.train.path: mine.jsonl", "policy.tokenizer.chat_template: mine.jinja"):
        assert f"translated, but needs a correction: {key} not found in the working folder {tmp_path}" in reported
    for name in ("mine.jsonl", "mine.jinja"):
        (tmp_path / name).write_text("x")
    assert main(["config", "--from-nemo-rl", str(path)]) == 0


@pytest.mark.skipif(THEIRS not in os.environ, reason=f"{THEIRS} names no folder of NeMo-RL's configurations")
def test_no_leaf_of_their_own_files_is_lost() -> None:
    """About a second a file: `NEMO_RL_CONFIGS=RL/examples/configs pytest ...`."""
    from tests.nemo_rl_leaves import main as walk

    assert walk(Path(os.environ[THEIRS])) == 0
