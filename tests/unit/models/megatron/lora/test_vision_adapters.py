# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of a vision-language model's decoder beside peft on transformers' model, with images, in each layout."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.lora.peft_folder import factors_on_first_rank, write_adapter
from nemo_rl_moe.models.peft_files import WEIGHTS_FILE
from tests.support.family_reference import trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import PeftModel, factors_of_ranks, lora, plain_policy, set_random
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, logprobs_by_sequence, parallel_job
from tests.support.vision_models import mixed_batch, transformers_inputs, write_vision_model
from tests.unit.models.megatron.tiny_trainers import PACKED, shard_for

MODEL = "qwen3_5_moe"
MICROBATCHES = ((0, 2), (3, 6), (7, 4), (1, 5))
TOLERANCE = 2e-5
"""As for the model without adapters in test_vision_models.py."""


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def logprobs_of(model: Any, name: str) -> torch.Tensor:
    """Return transformers' log-probabilities of every token but the first."""
    batch = mixed_batch(name)
    logits = model(**transformers_inputs(name, batch), use_cache=False).logits[:, :-1].log_softmax(-1)
    found: torch.Tensor = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return found


def differences(name: str, policy: PolicyConfig, root: str) -> dict[str, float] | None:
    """Run on every rank: largest differences from peft on rank 0, and of what peft reads of the written adapter."""
    folder, adapter, batch = Path(root, name), Path(root, "adapter"), mixed_batch(name)
    assert policy.lora is not None
    with parallel_job(policy) as rank:
        if rank == 0 and not folder.exists():
            write_vision_model(name, folder)
        dist.barrier()
        trainer = trainer_of(folder, policy)
        if policy.lora.path is None:
            set_random(trainer.chunks)
        shard = shard_for(trainer, batch, MICROBATCHES)
        fetched = (each.fetched(list, with_shared=trainer.has_tower) for each in shard.microbatches)
        shard = replace(shard, microbatches=tuple(fetched))
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, logprobs_by_sequence(trainer, shard, batch, MICROBATCHES))
        factors, named = factors_of_ranks(trainer.chunks), factors_on_first_rank(trainer.chunks)
        if rank == 0 and policy.lora.path is None:
            write_adapter(adapter, named, policy.lora, trainer.hf_config, str(folder), "fused")
        loss = trainer.train([shard], sft_loss).global_loss
        gradients = factors_of_ranks(trainer.chunks, gradients=True)
    if rank != 0:
        return None
    import peft

    model = PeftModel(model_of(folder), factors, policy.lora.scale)
    theirs = logprobs_of(model.model, name)
    expected = -theirs[batch.token_mask[:, 1:]].mean()
    expected.backward()
    with torch.no_grad():
        written = logprobs_of(peft.PeftModel.from_pretrained(model_of(folder), str(adapter)).eval(), name)
        base = logprobs_of(model_of(folder), name)
    ours = {row: values for of_rank in rows for row, values in of_rank.items()}

    def from_ours(values: Any) -> float:
        return max(float(np.abs(row[1:] - values[at, : len(row) - 1]).max()) for at, row in ours.items())

    return {
        "logprobs": from_ours(theirs.detach().numpy()),
        "loss": abs(loss - float(expected)),
        "gradients": max(
            float(np.abs(gradients[each] - values).max() / max(1.0, np.abs(values).max()))
            for each, values in model.gradients().items()
        ),
        "written": from_ours(written.numpy()),
        "base": from_ours(base.numpy()),
    }


@pytest.mark.parametrize(
    ("name", "world_size", "changes"),
    [
        full(MODEL, 1, {}),
        (MODEL, 2, PACKED | layout(tp=2)),
        full(MODEL, 2, {"activation_checkpointing": "full", **layout(pp=2)}),
        full(MODEL, 2, layout(ep=2)),
        full("qwen3_vl_moe", 2, layout(tp=2)),
        full("qwen3_vl_moe", 2, layout(tp=2, etp=2)),
        full("internvl", 1, {}),
        full("qwen2_5_vl", 1, {}),
        slow("qwen3_5", 2, layout(tp=2)),
    ],
)
def test_as_peft_with_images(name: str, world_size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    experts = "none" if name in ("qwen2_5_vl", "qwen3_5") else "per_expert"
    policy = plain_policy(experts, world_size=world_size, **changes)
    found = run_ranks(differences, world_size, name, policy, str(tmp_path))[0]
    print(f"{name}, {changes}: " + ", ".join(f"{what} {value:.1e}" for what, value in found.items()))
    assert found.pop("base") > 0.05, "the adapter changes the outputs"
    assert max(found.values()) < TOLERANCE
    for folder in (tmp_path / "adapter", as_of_text_model(tmp_path / "adapter")):
        again = plain_policy(experts, **lora(experts, path=str(folder)))
        (read,) = run_ranks(differences, 1, name, again, str(tmp_path))
        assert read is not None
        assert read["written"] < TOLERANCE


def as_of_text_model(adapter: Path) -> Path:
    """Write the adapter with the names of transformers' class for text alone."""
    folder = adapter.with_name("of_text_model")
    shutil.copytree(adapter, folder)
    named = {name.replace(".language_model.", "."): each for name, each in load_file(folder / WEIGHTS_FILE).items()}
    save_file(named, folder / WEIGHTS_FILE)
    return folder
