# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that translate NeMo-RL's layout, optimizer, learning rate, validation and machines."""

from collections.abc import Mapping
from math import ceil

from nemo_rl_moe.config.nemo_rl_translation import MEGATRON, Theirs, Translation, shown


def engine_of_training(theirs: Theirs, translation: Translation) -> None:
    """Translate layout, optimizer and learning rate of the training backend that is enabled."""
    values = translation.values
    uses_megatron = theirs.get(f"{MEGATRON}.enabled", False)
    engine = MEGATRON if uses_megatron else "policy.dtensor_cfg"
    if not uses_megatron:
        for key in [key for key in values if key.startswith(f"{MEGATRON}.")]:
            del values[key]
        translation.changed.append("policy.dtensor_cfg: Megatron-Core trains here, in the same layout")
        values[f"{MEGATRON}.tensor_model_parallel_size"] = theirs.get("policy.dtensor_cfg.tensor_parallel_size", 1)
        values[f"{MEGATRON}.pipeline_model_parallel_size"] = 1
        values[f"{MEGATRON}.expert_model_parallel_size"] = theirs.get("policy.dtensor_cfg.expert_parallel_size", 1)
        values[f"{MEGATRON}.expert_tensor_parallel_size"] = 1
        theirs.get("policy.dtensor_cfg.enabled")
        _torch_optimizer(theirs, translation)
        _torch_scheduler(theirs, translation)
    else:
        if theirs.get(f"{MEGATRON}.optimizer.optimizer", "adam") != "adam":
            translation.changed.append(f"{MEGATRON}.optimizer.optimizer: Adam with decoupled weight decay")
        if theirs.get(f"{MEGATRON}.scheduler.lr_warmup_init"):
            translation.changed.append(f"{MEGATRON}.scheduler.lr_warmup_init: the warm-up begins at 0")
        _optimizer_on_the_host(theirs, translation)
    if chunk_size := theirs.get("policy.logprob_chunk_size"):
        values["policy.logprob_chunk_size"] = chunk_size
    if variables := theirs.get(f"{engine}.env_vars"):
        values[f"{MEGATRON}.env_vars"] = {name: str(value) for name, value in variables.items()}
    values[f"{MEGATRON}.context_parallel_size"] = theirs.get(f"{engine}.context_parallel_size", 1)
    is_shared = values.get(f"{MEGATRON}.tensor_model_parallel_size", 1) > 1
    values[f"{MEGATRON}.sequence_parallel"] = is_shared
    if theirs.get(f"{engine}.sequence_parallel", is_shared) != is_shared:
        translation.changed.append(
            f"{engine}.sequence_parallel: {str(not is_shared).lower()}: {str(is_shared).lower()}, as MoE layers need it"
            " with tensor parallelism, and there alone"
        )
    values[f"{MEGATRON}.activation_checkpointing"] = _recomputed(theirs, translation, engine)
    if values.get(f"{MEGATRON}.moe_router_load_balancing_type") == "none":
        values.setdefault(f"{MEGATRON}.moe_aux_loss_coeff", 0.0)


def _optimizer_on_the_host(theirs: Theirs, translation: Translation) -> None:
    """Translate optimizer offload and the number formats of moments. A fraction of 0 means no offload, and
    `torch.float32` becomes `float32`."""
    values, key = translation.values, f"{MEGATRON}.optimizer"
    if theirs.get(f"{key}.optimizer_cpu_offload") and theirs.get(f"{key}.optimizer_offload_fraction") == 0:
        values[f"{key}.optimizer_cpu_offload"] = False
        translation.changed.append(f"{key}.optimizer_cpu_offload: false, as a fraction of 0 offloads nothing")
    if not values.get(f"{key}.optimizer_cpu_offload"):
        for name in (f"{key}.optimizer_offload_fraction", f"{key}.overlap_cpu_optimizer_d2h_h2d"):
            if values.pop(name, None) is not None:
                translation.unread.append(f"{name}: {shown(theirs.get(name))}")
    for name in (f"{key}.exp_avg_dtype", f"{key}.exp_avg_sq_dtype"):
        if isinstance(values.get(name), str):
            values[name] = values[name].removeprefix("torch.")


def _recomputed(theirs: Theirs, translation: Translation, engine: str) -> str:
    if not theirs.get(f"{engine}.activation_checkpointing", False):
        return "none"
    if (granularity := theirs.get(f"{engine}.recompute_granularity", "full")) != "selective":
        if granularity != "full":
            translation.changed.append(f"{engine}.recompute_granularity: {granularity}: full")
        return "full"
    modules = theirs.get(f"{engine}.recompute_modules", [])
    if modules != ["moe"]:
        translation.changed.append(
            f"{engine}.recompute_modules: {shown(modules)}: full, which recomputes all of each layer"
        )
    return "moe" if modules == ["moe"] else "full"


def _torch_optimizer(theirs: Theirs, translation: Translation) -> None:
    name, section = theirs.get("policy.optimizer.name", "torch.optim.AdamW"), f"{MEGATRON}.optimizer"
    if not name.endswith("Adam") and not name.endswith("AdamW"):
        translation.changed.append(f"policy.optimizer.name: {name}: Adam with decoupled weight decay")
    for key, ours in (("lr", "lr"), ("weight_decay", "weight_decay"), ("eps", "adam_eps")):
        if (value := theirs.get(f"policy.optimizer.kwargs.{key}")) is not None:
            translation.values[f"{section}.{ours}"] = value
    betas = theirs.get("policy.optimizer.kwargs.betas", [0.9, 0.999])
    translation.values |= {f"{section}.adam_beta1": betas[0], f"{section}.adam_beta2": betas[1]}


def _torch_scheduler(theirs: Theirs, translation: Translation) -> None:
    """Translate a chain of PyTorch's schedulers: a warm-up and a decay after it."""
    section, values = f"{MEGATRON}.scheduler", translation.values
    steps = theirs.get("policy.scheduler", [])
    steps = [step for step in (steps if isinstance(steps, list) else [steps]) if isinstance(step, Mapping)]
    values |= {f"{section}.lr_decay_style": "constant", f"{section}.lr_warmup_iters": 0}
    named = [(str(step["name"]).rpartition(".")[2], step.get("kwargs", {})) for step in steps if "name" in step]
    if named and named[0][0] == "LinearLR" and named[0][1].get("start_factor", 1 / 3) < 1.0:
        values[f"{section}.lr_warmup_iters"] = named.pop(0)[1].get("total_iters", 5)
    warmup = values[f"{section}.lr_warmup_iters"]
    for name, arguments in named:
        if name == "ConstantLR" and arguments.get("factor", 1.0) == 1.0:
            continue
        style, length = {"CosineAnnealingLR": ("cosine", "T_max"), "LinearLR": ("linear", "total_iters")}.get(
            name, ("", "")
        )
        if style and length in arguments:
            values |= {f"{section}.lr_decay_style": style, f"{section}.lr_decay_iters": warmup + arguments[length]}
            # PyTorch's defaults: the cosine decay ends at a rate of 0, the linear one at the full rate.
            factor = arguments.get("end_factor", 1.0) if name == "LinearLR" else 0.0
            end = arguments.get("eta_min", factor * values.get(f"{MEGATRON}.optimizer.lr", 0))
            values[f"{MEGATRON}.optimizer.min_lr"] = end
        else:
            translation.without.append(f"policy.scheduler: {name}: {shown(dict(arguments))}: no such schedule")
    if warmup:
        translation.changed.append("policy.scheduler: the warm-up begins at 0")


def batches_of_validation(theirs: Theirs, translation: Translation) -> None:
    """Translate the size of a validation into a number of batches of the training batch size."""
    name = translation.algorithm
    number = theirs.get(f"{name}.val_batches")
    if translation.generates or number is None:
        return
    if number <= 0:
        translation.values[f"{name}.val_batches"] = None
        return
    size, ours = theirs.get(f"{name}.val_global_batch_size"), theirs.get("policy.train_global_batch_size")
    batches = ceil(number * size / ours) if size and ours else number
    translation.values[f"{name}.val_batches"] = batches
    if size and size != ours:
        translation.changed.append(f"{name}.val_batches: {number} of {size} samples: {batches} of {ours}")


def machines(theirs: Theirs, translation: Translation) -> None:
    """Translate the machines of the policy and of separate engines, and the optimizer's place where they share GPUs."""
    values = translation.values
    nodes, gpus = theirs.get("cluster.num_nodes", 1), theirs.get("cluster.gpus_per_node", 1)
    place = "policy.generation.colocated"
    if translation.generates and theirs.get(f"{place}.enabled", True) is False:
        own_gpus = theirs.get(f"{place}.resources.gpus_per_node")
        if nodes == 1:
            values["cluster.roles.generation"] = {"num_nodes": 1, "gpus_per_node": own_gpus}
            gpus -= own_gpus or 0
        else:
            own_nodes = theirs.get(f"{place}.resources.num_nodes")
            values["cluster.roles.generation"] = {"num_nodes": own_nodes, "gpus_per_node": own_gpus or gpus}
            nodes -= own_nodes or 0
        translation.changed.append(f"{place}.enabled: the engines' GPUs are counted separately from the policy's")
    elif translation.generates and theirs.get("policy.generation.backend", "vllm") == "vllm":
        values["policy.offload_optimizer_for_generation"] = True
        translation.changed.append(
            "policy.offload_optimizer_for_generation: true, as NeMo-RL always moves the optimizer to the host while"
            " colocated engines generate"
        )
    values |= {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus}


TRAINING_RULES = (engine_of_training, batches_of_validation, machines)
