# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters in peft's folders: written by one side and computed with by the other. What the ranks of a job run."""

from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from tests.support.family_outputs import outputs_of_trainer, trainer_of
from tests.support.family_reference import read_model, token_ids, write_reference
from tests.support.lora_models import RANK, Array, set_random
from tests.support.tiny_model import forget_recorded_losses, parallel_job


def we_write_and_peft_reads(name: str, policy: PolicyConfig, root: str, form: Any) -> tuple[Array, Array]:
    """Run on one rank: the logits here, and those of peft on transformers' model with what was written."""
    from peft import PeftModel

    folder, adapter = Path(root, "model"), Path(root, "adapter")
    write_reference(name, folder)
    ours = _logits_of_ours(folder, policy, adapter, form, random=True)
    base = read_model(folder)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        return ours, model(token_ids(base.config.vocab_size)).logits.numpy()


def _logits_of_ours(folder: Path, policy: PolicyConfig, written: Path, form: Any, *, random: bool) -> Array:
    from nemo_rl_moe.models.megatron.lora.peft_folder import factors_on_first_rank, write_adapter

    with parallel_job(policy) as rank:
        forget_recorded_losses()
        trainer = trainer_of(folder, policy)
        if random:
            set_random(trainer.chunks)
        outputs = outputs_of_trainer(trainer)
        factors = factors_on_first_rank(trainer.chunks)
        if rank == 0:
            assert policy.lora is not None
            write_adapter(written, factors, policy.lora, trainer.hf_config, str(folder), form)
    return torch.zeros(0).numpy() if outputs is None else outputs.logits


def logits_in_layout(folder: str, policy: PolicyConfig, written: str) -> Array:
    """Run on every rank: the logits of the model with `policy.lora.path`, which is written once more; on rank 0."""
    return _logits_of_ours(Path(folder), policy, Path(written), "per_expert", random=False)


def peft_writes_and_we_read(name: str, policy: PolicyConfig, root: str) -> tuple[Array, Array]:
    """Run on one rank: the logits here with an adapter that peft has written, and those of peft."""
    import peft

    folder, adapter = Path(root, "model"), Path(root, "adapter")
    write_reference(name, folder)
    base = read_model(folder)
    attention = sorted(
        {
            path.rpartition(".")[2]
            for path, module in base.named_modules()
            if ".self_attn." in path and isinstance(module, torch.nn.Linear)
        }
    )
    has_experts = any(path.endswith(".experts") for path, _ in base.named_modules())
    mlps = {path for path, module in base.named_modules() if ".mlp." in path and isinstance(module, torch.nn.Linear)}
    mlps = {path for path in mlps if not path.endswith(("gate", "router"))}
    parameters = [f"{path}.weight" for path in mlps] if has_experts else []
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=5.0,
        target_modules=attention if has_experts else [*attention, *{path.rpartition(".")[2] for path in mlps}],
        target_parameters=[*parameters, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None,
    )
    model: Any = peft.get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.6 * values * parameter.shape[-1] ** -0.5)
        theirs = model(token_ids(base.config.vocab_size)).logits.numpy()
    model.save_pretrained(adapter)
    return _logits_of_ours(folder, policy, Path(root, "third"), "per_expert", random=False), theirs
