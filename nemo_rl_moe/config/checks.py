# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings. Each rule is a pure function that yields one line for each problem.

If the schema rejected a value, the rules that need it are skipped. All other rules run, so that the user sees every
problem at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import Any

from nemo_rl_moe.config.algorithm import algorithm_of, roles_of
from nemo_rl_moe.config.checks_data import DATA_RULES
from nemo_rl_moe.config.checks_lora import ADAPTER_RULES, LORA_RULES
from nemo_rl_moe.config.checks_mtp import MTP_RULES
from nemo_rl_moe.config.checks_optimizer import OPTIMIZER_RULES, learning_rates_fall
from nemo_rl_moe.config.checks_routing import ROUTING_RULES
from nemo_rl_moe.config.checks_run import CHECKPOINTING_RULES, PATH_RULES
from nemo_rl_moe.config.megatron_moe_fields import version_problem
from nemo_rl_moe.config.role_keys import role_problems
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import TrainedRoleConfig, sequence_multiple
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.errors import ConfigurationError

MEGATRON = "policy.megatron_cfg"
Rule = Callable[[Any], Iterator[str]]


def combination_problems(config: MasterConfig, *, is_whole: bool, megatron_version: str | None) -> list[str]:
    """Return one line for each rule that the configuration breaks.

    Args:
        is_whole: Whether the configuration has all values. If not, rules that need a missing value are skipped.
        megatron_version: Installed version of Megatron-Core. None: allow the fields of any version.
    """
    rules: list[Rule] = [*COMMON_RULES, *DATA_RULES, *CHECKPOINTING_RULES, *algorithm_of(config).rules]
    if megatron_version is not None:
        rules.append(partial(megatron_has_the_fields, installed=megatron_version))
    return apply_rules(rules, config, is_whole=is_whole)


def path_problems(config: MasterConfig, *, is_whole: bool) -> list[str]:
    """Return one line for each missing local file or folder. See `combination_problems` for `is_whole`."""
    return apply_rules(PATH_RULES, config, is_whole=is_whole)


def apply_rules(rules: Sequence[Rule], config: MasterConfig, *, is_whole: bool) -> list[str]:
    """Run each rule and return all problems. On a partial configuration, a rule ends at the first missing value."""
    problems: list[str] = []
    for rule in rules:
        try:
            problems.extend(rule(config))  # keeps the lines that come before a missing value
        except ConfigurationError as error:  # the user's engine cannot be found
            problems.extend(error.problems)
        except AttributeError:
            if is_whole:
                raise
    return problems


def model_parallel_fits_world(config: MasterConfig) -> Iterator[str]:
    """Check that the model parallel sizes of the dense part and of the experts divide the number of workers."""
    megatron, world = config.policy.megatron_cfg, config.cluster.world_size
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context, expert = megatron.context_parallel_size, megatron.expert_model_parallel_size
    expert_tensor = megatron.expert_tensor_parallel_size
    kind = "gpus_per_node" if config.cluster.gpus_per_node else "cpu_workers_per_node"
    workers = (
        f"cluster: {world} workers (num_nodes {config.cluster.num_nodes} x {kind} {config.cluster.workers_per_node})"
    )
    experts = {
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "pipeline_model_parallel_size": pipeline,
    }
    dense = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    # The keys are sizes, so that one line is made if both sizes are the same.
    for size, factors in {prod(sizes.values()): sizes for sizes in (experts, dense)}.items():
        if world % size:
            product = " x ".join(f"{name} {value}" for name, value in factors.items())
            yield (
                f"{workers} cannot be divided by {size} ({MEGATRON}: {product}); take a multiple of {size}"
                f" workers{_smaller_factor(factors, world)}"
            )


def _smaller_factor(factors: Mapping[str, int], world: int) -> str:
    """Return advice to lower the largest factor, or an empty text if this alone cannot divide the workers."""
    name, largest = max(factors.items(), key=lambda factor: factor[1])
    rest = prod(factors.values()) // largest
    return "" if world % rest else f", or lower {MEGATRON}.{name} to {gcd(largest, world // rest)}"


def context_parallel_has_an_attention(config: MasterConfig) -> Iterator[str]:
    """Check that context parallelism has Transformer Engine's attention, since no other attention supports it."""
    megatron = config.policy.megatron_cfg
    without = {
        "on CPUs (cluster.gpus_per_node 0)": config.cluster.gpus_per_node == 0,
        f"with {MEGATRON}.layer_spec local": megatron.layer_spec == "local",
    }
    for where, is_so in without.items():
        if megatron.context_parallel_size > 1 and is_so:
            yield (
                f"{MEGATRON}.context_parallel_size: got {megatron.context_parallel_size}, expected 1 {where}:"
                " only Transformer Engine's attention lets ranks share a sequence"
            )
            return


def sequence_parallel_goes_with_tensor_parallel(config: MasterConfig) -> Iterator[str]:
    """Check that sequence parallelism is on if and only if tensor parallelism is on, because MoE layers need this."""
    megatron = config.policy.megatron_cfg
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield f"{MEGATRON}.sequence_parallel: true needs {MEGATRON}.tensor_model_parallel_size above 1"
    if not megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1:
        yield (
            f"{MEGATRON}.sequence_parallel: false cannot be used with {MEGATRON}.tensor_model_parallel_size"
            f" {megatron.tensor_model_parallel_size}: MoE layers need true"
        )


def expert_tensor_parallel_size_is_possible(config: MasterConfig) -> Iterator[str]:
    """Check that the expert tensor parallel size is 1 or the tensor parallel size."""
    megatron = config.policy.megatron_cfg
    size, tensor = megatron.expert_tensor_parallel_size, megatron.tensor_model_parallel_size
    if size not in (1, tensor):
        allowed = "1" if tensor == 1 else f"1 or {tensor}"
        yield f"{MEGATRON}.expert_tensor_parallel_size: got {size}, expected {allowed} (1 or the tensor parallel size)"


RANK_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
)
"""Environment variables from which ranks learn their numbers and find each other."""


def environment_leaves_ranks_their_places(config: MasterConfig) -> Iterator[str]:
    """Check that the workers' environment variables are valid, and are not variables that the run sets itself."""
    for name, value in config.policy.megatron_cfg.env_vars.items():
        if name in RANK_VARIABLES:
            yield f"{MEGATRON}.env_vars.{name}: got {value!r}, expected no such variable: the run sets it itself"
        elif not name or "=" in name or "\0" in name + value:
            yield f"{MEGATRON}.env_vars: got {name!r}, expected a name without = and NUL, and a value without NUL"


def hybridep_has_batches_of_one_size(config: MasterConfig) -> Iterator[str]:
    """Refuse HybridEP for batches of varying size: the size of its buffer is the size of the first batch that it
    sends."""
    megatron = config.policy.megatron_cfg
    if megatron.moe_flex_dispatcher_backend == "hybridep" and not megatron.moe_hybridep_pad_uneven_dispatch_inputs:
        yield (
            f"{MEGATRON}.moe_flex_dispatcher_backend: got 'hybridep', expected 'deepep' or, with Megatron-Core 0.19,"
            f" {MEGATRON}.moe_hybridep_pad_uneven_dispatch_inputs=true: its buffer is as large as the first batch,"
            " and later batches may be larger"
        )


def virtual_pipeline_is_possible(config: MasterConfig) -> Iterator[str]:
    """Check that the interleaved schedule has several stages, several pieces per stage, and a number of microbatches
    that is a multiple of the number of stages."""
    megatron = config.policy.megatron_cfg
    pieces, stages = megatron.virtual_pipeline_model_parallel_size, megatron.pipeline_model_parallel_size
    name = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
    if pieces is None:
        return
    if pieces < 2:
        yield f"{name}: got {pieces}, expected 2 or more, or null"
    if stages < 2:
        yield f"{name}: {pieces} needs {MEGATRON}.pipeline_model_parallel_size above 1"
        return
    policy = config.policy
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return  # both choose a number of microbatches that is such a multiple
    rows = policy.train_micro_batch_size * config.data_parallel_size
    if rows and policy.train_global_batch_size % rows == 0 and (policy.train_global_batch_size // rows) % stages:
        yield (
            f"policy.train_global_batch_size: {policy.train_global_batch_size} makes"
            f" {policy.train_global_batch_size // rows} microbatches of {policy.train_micro_batch_size} on each of"
            f" {config.data_parallel_size} data-parallel ranks; {name} {pieces} needs a multiple of {stages}"
        )


def only_one_way_to_batch(config: MasterConfig) -> Iterator[str]:
    """Check that sequence packing and dynamic batching are not both on."""
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        yield "policy.sequence_packing.enabled and policy.dynamic_batching.enabled: only one of them can be true"


def packing_has_an_attention(config: MasterConfig) -> Iterator[str]:
    """Check that the attention accepts packed rows. Megatron-Core's unfused attention refuses them."""
    if config.policy.sequence_packing.enabled and config.policy.megatron_cfg.layer_spec == "local":
        yield (
            f"policy.sequence_packing.enabled: true cannot be used with {MEGATRON}.layer_spec local, whose attention"
            " takes no packed rows; use auto"
        )


def shared_prefixes_have_packed_rows(config: MasterConfig) -> Iterator[str]:
    """Check that no setting needs separate sequences if a shared prefix is computed once."""
    policy, name = config.policy, "policy.shared_prefix"
    if policy.shared_prefix is False:
        return
    got = f"{name}: got {str(policy.shared_prefix).lower()}, expected false with"
    if policy.dynamic_batching.enabled:
        yield f"{got} policy.dynamic_batching.enabled true, which pads sequences; sequence_packing takes no padding"
    if policy.megatron_cfg.layer_spec == "local":
        yield f"{got} {MEGATRON}.layer_spec local, whose attention takes no packed rows"
    if policy.megatron_cfg.context_parallel_size > 1:
        yield f"{got} {MEGATRON}.context_parallel_size {policy.megatron_cfg.context_parallel_size}"
    capacity = policy.megatron_cfg.moe_transformer_fields.get("moe_expert_capacity_factor")
    if capacity is not None:
        yield f"{got} {MEGATRON}.moe_expert_capacity_factor {capacity:g}, which would drop other assignments"


def a_microbatch_holds_the_longest_sample(config: MasterConfig) -> Iterator[str]:
    """Check that the token budget of a microbatch is enough for the longest sample, which consists of two sequences if
    samples are pairs."""
    num_sequences = algorithm_of(config).sequences_per_sample
    is_pair, ranks = num_sequences == 2, config.policy.megatron_cfg.context_parallel_size
    multiple = sequence_multiple(ranks)
    for name in ("sequence_packing", "dynamic_batching"):
        budget, longest = getattr(config.policy, name), config.policy.max_total_sequence_length
        padded = -(-longest // multiple) * multiple if name == "sequence_packing" else longest
        if budget.enabled and budget.train_mb_tokens < padded * num_sequences:
            shared = f", padded for {MEGATRON}.context_parallel_size {ranks}," if padded > longest else ""
            yield (
                f"policy.{name}.train_mb_tokens: got {budget.train_mb_tokens}, expected at least"
                f" {'2 x ' if is_pair else ''}policy.max_total_sequence_length{shared} = {padded * num_sequences}"
                f"{', as the sequences of a pair run together' if is_pair else ''}"
            )


def global_batch_divides(config: MasterConfig) -> Iterator[str]:
    """Check that the data-parallel ranks and, without a token budget, their microbatches divide the batch."""
    policy = config.policy
    size, copies = policy.train_global_batch_size, config.data_parallel_size
    if copies == 0 or config.cluster.world_size % policy.megatron_cfg.model_parallel_size:
        return  # reported by model_parallel_fits_world
    by_tokens = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
    unit = copies if by_tokens else copies * policy.train_micro_batch_size
    if size % unit:
        factors = f"{copies} data-parallel ranks" + (
            "" if by_tokens else f" x policy.train_micro_batch_size {policy.train_micro_batch_size}"
        )
        nearby = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})
        yield (
            f"policy.train_global_batch_size: got {size}, expected a multiple of {unit} ({factors});"
            f" nearest: {' or '.join(map(str, nearby))}"
        )


def per_layer_logging_needs_tracking(config: MasterConfig) -> Iterator[str]:
    """Check that MoE metrics are tracked if they are logged for each layer."""
    megatron = config.policy.megatron_cfg
    if megatron.moe_per_layer_logging and not megatron.track_moe_metrics:
        yield f"{MEGATRON}.moe_per_layer_logging: true needs {MEGATRON}.track_moe_metrics true"


def details_are_asked_for_once(config: MasterConfig) -> Iterator[str]:
    """Check that detailed MoE metrics are on for every step or for every Nth, not both."""
    metrics = config.policy.megatron_cfg.moe_metrics
    if metrics.mode == "detailed" and metrics.detailed_every_steps is not None:
        yield (
            f"{MEGATRON}.moe_metrics.detailed_every_steps: got {metrics.detailed_every_steps}, expected null when"
            f" {MEGATRON}.moe_metrics.mode is detailed (on every step); use mode brief for details on every Nth step"
        )


def recompute_is_said_once(config: MasterConfig) -> Iterator[str]:
    """Check that `moe_layer_recompute`, Megatron-Core's older switch, agrees with `activation_checkpointing`."""
    megatron = config.policy.megatron_cfg
    older, ours = megatron.moe_transformer_fields.get("moe_layer_recompute"), megatron.activation_checkpointing
    if older is not None and older != (ours == "moe"):
        yield (
            f"{MEGATRON}.moe_layer_recompute: {str(older).lower()} contradicts {MEGATRON}.activation_checkpointing"
            f" {ours}; leave it out and use activation_checkpointing: none, full or moe"
        )


def megatron_has_the_fields(config: MasterConfig, installed: str) -> Iterator[str]:
    """Check that the installed version of Megatron-Core supports the `moe_*` fields that are set."""
    for name, value in config.policy.megatron_cfg.moe_transformer_fields.items():
        problem = version_problem(name, value, installed)
        if problem is not None:
            yield f"{MEGATRON}.{name}: {problem}"


def roles_are_placed(config: MasterConfig) -> Iterator[str]:
    """Check that the algorithm's roles have machines, and that their parallel layouts fit the machines."""
    algorithm = algorithm_of(config)
    roles = roles_of(config)
    known_names = [*roles, *algorithm.optional_places(config)]
    for name in sorted(config.cluster.roles.keys() - known_names):
        if name == GENERATION_ROLE and (generates := generating(config.policy)) is not None:
            backend = generates.generation.backend
            yield (
                f"cluster.roles.{name}: expected none with policy.generation.backend {backend}, which generates on the"
                f" policy's own workers; to remove it: ~cluster.roles.{name}"
            )
            continue
        known = f"its roles: {', '.join(known_names)}" if known_names else "it has none; set cluster.roles {}"
        yield f"cluster.roles.{name}: no role of the algorithm {algorithm.name}; {known}"
    for name, model in roles.items():
        if name not in config.cluster.roles:
            yield (
                f"cluster.roles.{name}: missing; expected num_nodes and gpus_per_node (or cpu_workers_per_node) for the"
                f" workers of the {name}, or {{}} for the policy's sizes"
            )
            continue
        update = {"policy": model.as_policy(config.policy), "cluster": config.cluster.place_of(name)}
        rules = (*LAYOUT_RULES, *TRAINING_RULES) if isinstance(model, TrainedRoleConfig) else LAYOUT_RULES
        for rule in rules:
            yield from role_problems(config, name, rule(config.model_copy(update=update)))


def loop_lets_rollouts_run_ahead(config: MasterConfig) -> Iterator[str]:
    """Check that the algorithm's loop supports asynchronous rollouts."""
    algorithm = algorithm_of(config)
    is_asynchronous = isinstance(config, GRPOMasterConfig) and config.grpo.rollouts.is_asynchronous
    if is_asynchronous and not algorithm.rollouts_run_ahead:
        yield (
            f"grpo.rollouts.mode: got asynchronous, expected synchronous with the algorithm {algorithm.name}, whose"
            " loop generates a step's responses only when the step begins"
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    model_parallel_fits_world,
    sequence_parallel_goes_with_tensor_parallel,
    expert_tensor_parallel_size_is_possible,
)
TRAINING_RULES: tuple[Rule, ...] = (global_batch_divides, learning_rates_fall, *ADAPTER_RULES)
"""Rules for trained roles other than the policy. For the policy, these rules are among the common rules."""
COMMON_RULES: tuple[Rule, ...] = (
    roles_are_placed,
    loop_lets_rollouts_run_ahead,
    model_parallel_fits_world,
    context_parallel_has_an_attention,
    sequence_parallel_goes_with_tensor_parallel,
    expert_tensor_parallel_size_is_possible,
    virtual_pipeline_is_possible,
    environment_leaves_ranks_their_places,
    hybridep_has_batches_of_one_size,
    only_one_way_to_batch,
    packing_has_an_attention,
    shared_prefixes_have_packed_rows,
    a_microbatch_holds_the_longest_sample,
    global_batch_divides,
    per_layer_logging_needs_tracking,
    details_are_asked_for_once,
    recompute_is_said_once,
    *ROUTING_RULES,
    *LORA_RULES,
    *MTP_RULES,
    *OPTIMIZER_RULES,
)
