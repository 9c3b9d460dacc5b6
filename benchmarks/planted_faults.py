# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Silent failures of routing, planted into the workers of a real run from outside of the package.

A worker of a planted run is a subclass of the real one that wraps its trainer: the generated sequences, the training
batch, the routers, or the weights for a generation engine. Each fault has a reference to a real case of its kind.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from healthy_steps import record_steps, replace_train

from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.generation.interface import GeneratedSequence
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy.start_rank import start_rank

Routes = np.ndarray
"""Experts of a sequence's tokens in each MoE layer, `[tokens, moe_layers, topk]`."""
Spoil = Callable[["Site", list[Routes]], list[Routes]]
NUM_EXPERTS, NUM_REPLAYED = 8, 67
SHARED_RUN = ("policy.megatron_cfg.routing_replay=rollout",)
IN_BFLOAT16 = (
    *SHARED_RUN,
    "policy.precision=bfloat16",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "policy.megatron_cfg.activation_checkpointing=full",
)
"""Two pipeline stages and full recomputation."""
WITH_BIAS = (
    "policy.megatron_cfg.moe_router_enable_expert_bias=true",
    "policy.megatron_cfg.moe_router_score_function=sigmoid",
)
WITH_EXPERT_PARALLELISM = (
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "policy.megatron_cfg.log_moe_overload_factor=true",
)


@dataclass
class Site:
    """One worker of a planted run.

    Attributes:
        onset: First faulty step.
        step: Present step, from 1.
        kept: Routes of the previous step, by position.
    """

    trainer: Any
    rank: int
    onset: int
    step: int = 1
    kept: Sequence[Routes] = ()

    @property
    def strikes(self) -> bool:
        """Return whether this step is faulty."""
        return self.step >= self.onset


@dataclass(frozen=True)
class Fault:
    """One kind of failure.

    Attributes:
        seen: Reference to a real case. Empty if none is known.
        plant: Plants it into a worker.
        settings: Overrides of a run that can have it.
        vllm: It changes the weights of an engine with a copy of them.
        spoil: Changes routes, if only the capture is wrong, so that files can have the fault too.
        in_own_engine: The same fault for an engine without a copy, which then generates with other weights than the
            trained ones. None if `plant` does it.
    """

    title: str
    seen: str
    plant: Callable[[Site], None]
    settings: tuple[str, ...] = SHARED_RUN
    vllm: bool = False
    spoil: Spoil | None = None
    in_own_engine: Callable[[Site], None] | None = None


def start_planted(
    rank: int,
    world_size: int,
    *,
    fault: str | None,
    onset: int,
    record_to: Path | None,
    own_engine: bool = False,
    **kwargs: Any,
) -> MegatronModel | UserError:
    """Start a rank with a fault.

    Args:
        fault: Name in `FAULTS` or `RENUMBERED`, if any.
        onset: First faulty step.
        record_to: Folder for records from which healthy steps are made, if any.
        own_engine: Generates with the trainer's engine, independent of the fault's run.
    """
    trainer = start_rank(rank, world_size, **kwargs)
    if isinstance(trainer, UserError):
        return trainer
    site = Site(trainer, rank, onset)
    if fault is not None:
        planted = (FAULTS | RENUMBERED)[fault]
        (planted.in_own_engine if own_engine and planted.in_own_engine else planted.plant)(site)
    if record_to is not None:
        record_steps(trainer, rank, record_to)
    _count_steps(site)
    return trainer


def _count_steps(site: Site) -> None:
    train = site.trainer.train

    def counting(*args: Any) -> Any:
        result = train(*args)
        site.step += 1
        return result

    replace_train(site.trainer, counting)


def captured(spoil: Spoil) -> Callable[[Site], None]:
    """Return a fault of the routes that an engine reports with rollouts."""

    def plant(site: Site) -> None:
        generate = site.trainer._generator.generate

        def spoiling(*args: Any, **kwargs: Any) -> list[GeneratedSequence]:
            made = generate(*args, **kwargs)
            routes = [sequence.routed_experts.pieces[0].source for sequence in made]
            given = spoil(site, [rows.copy() for rows in routes]) if site.strikes else routes
            site.kept = routes
            return [
                replace(sequence, routed_experts=StoredRows.of(rows))
                for sequence, rows in zip(made, given, strict=True)
            ]

        site.trainer._generator.generate = spoiling

    return plant


def _of_each(change: Callable[[Routes], Routes | None]) -> Spoil:
    """Apply a change, in place or not, to the routes of every sequence."""

    def spoil(site: Site, sequences: list[Routes]) -> list[Routes]:
        changed = [(rows, change(rows)) for rows in sequences]
        return [rows if new is None else new for rows, new in changed]

    return spoil


def _wrong_layer(rows: Routes) -> None:
    rows[:, 2] = rows[:, 1]


def _layer_one_in_layer_zero(rows: Routes) -> None:
    rows[:, 0] = rows[:, 1]


def _one_late(rows: Routes) -> None:
    rows[1:] = rows[:-1].copy()


def _permuted_ids(rows: Routes) -> None:
    """Renumber layer 2, like a load balancer that reports physical instead of logical ids."""
    rows[:, 2] = (5 * rows[:, 2] + 2) % NUM_EXPERTS


def _exchanged_ids(rows: Routes) -> None:
    ids = np.arange(NUM_EXPERTS)
    ids[[2, 5]] = 5, 2
    rows[:, 1] = ids[rows[:, 1]]


def renumbered(kind: str, seed: int) -> Spoil:
    """Return a fault that renumbers the expert ids of one layer, which the seed selects.

    Args:
        kind: `permuted` (all ids change) or `exchanged` (two ids).
        seed: At least 0.
    """

    def change(rows: Routes) -> None:
        generator = np.random.default_rng(seed)
        layer = int(generator.integers(rows.shape[1]))
        ids = np.arange(NUM_EXPERTS)
        chosen = generator.permutation(NUM_EXPERTS)[: 2 if kind == "exchanged" else NUM_EXPERTS]
        ids[chosen] = np.roll(chosen, 1)
        rows[:, layer] = ids[rows[:, layer]]

    return _of_each(change)


def _zeros(rows: Routes) -> None:
    rows[:] = 0


def _behind_the_end(rows: Routes) -> Routes:
    """Return the routes of five more tokens than the sequence has, from a buffer's earlier content."""
    return np.concatenate([rows, rows[:5]])


def _of_the_step_before(site: Site, sequences: list[Routes]) -> list[Routes]:
    for rows, old in zip(sequences, site.kept or sequences[::-1], strict=False):
        length = min(len(rows), len(old))
        rows[:length] = old[:length]
    return sequences


def _replayed_again(site: Site, sequences: list[Routes]) -> list[Routes]:
    """Repeat one row of the first rank 67 times, over several sequences."""
    if site.rank > 0:
        return sequences
    left, row = NUM_REPLAYED, sequences[0][4].copy()
    for rows in sequences:
        taken = min(left, len(rows) - 4)
        rows[4 : 4 + taken] = row
        left -= taken
    return sequences


def _swapped(site: Site, sequences: list[Routes]) -> list[Routes]:
    """Swap the routes of neighbouring sequences, up to the shorter length."""
    for one, other in zip(sequences[::2], sequences[1::2], strict=False):
        length = min(len(one), len(other))
        one[:length], other[:length] = other[:length].copy(), one[:length].copy()
    return sequences


def _dropped_in_one_rank(site: Site) -> None:
    from nemo_rl_moe.distributed.batch import TokenBatch
    from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN

    train = site.trainer.train

    def without(batch: TokenBatch) -> TokenBatch:
        column = batch.columns[ROUTED_EXPERTS]
        return batch.with_columns(**{ROUTED_EXPERTS: replace(column, values=column.values.clone().fill_(UNKNOWN))})

    def dropping(shards: Sequence[Any], loss_function: Any) -> Any:
        if site.strikes and site.rank == 1:
            fetched = site.trainer._fetched
            shards = [replace(shard, microbatches=tuple(map(without, fetched(shard.microbatches)))) for shard in shards]
        return train(shards, loss_function)

    replace_train(site.trainer, dropping)


def _routers(site: Site) -> Iterator[tuple[int, Any]]:
    from megatron.core.transformer.moe.router import TopKRouter

    found = (module for chunk in site.trainer.chunks for module in chunk.modules() if isinstance(module, TopKRouter))
    yield from enumerate(found)


def _router_in_bfloat16(site: Site) -> None:
    """Compute the engine's routers in bfloat16, and the training routers in float32."""
    from torch.nn.functional import linear

    generate = site.trainer._generator.generate
    generates = False

    def generating(*args: Any, **kwargs: Any) -> Any:
        nonlocal generates
        generates = site.strikes
        try:
            return generate(*args, **kwargs)
        finally:
            generates = False

    def gating_of(router: Any, gating: Callable[[Any], Any], inputs: Any) -> Any:
        return linear(inputs.bfloat16(), router.weight.bfloat16()).float() if generates else gating(inputs)

    def evaluate_of(router: Any, evaluate: Callable[[Any], Any], inputs: Any) -> Any:
        return router._choose(router.gating(inputs)) if generates else evaluate(inputs)

    site.trainer._generator.generate = generating
    for _, router in _routers(site):
        router.gating = functools.partial(gating_of, router, router.gating)
        if hasattr(router, "evaluate"):  # the router of one rank on a CPU has a separate path
            router.evaluate = functools.partial(evaluate_of, router, router.evaluate)


def _with_logits(site: Site, router: Any, change: Callable[[Any], Any]) -> None:
    name = "_choose" if hasattr(router, "_choose") else "routing"  # of one rank on a CPU; Megatron-Core's
    choose = getattr(router, name)

    def changed(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return choose(change(logits) if site.strikes else logits, *args, **kwargs)

    setattr(router, name, changed)


def _dead_expert(site: Site) -> None:
    def without_expert(logits: Any) -> Any:
        logits = logits.clone()
        logits[..., 3] -= 1e4
        return logits

    for layer, router in _routers(site):
        if layer == 1:
            _with_logits(site, router, without_expert)


def _hot_rank(site: Site) -> None:
    def to_the_first_half(logits: Any) -> Any:
        logits = logits.clone()
        logits[..., : logits.shape[-1] // 2] += 1e4
        return logits

    for _, router in _routers(site):
        _with_logits(site, router, to_the_first_half)


def _frozen_bias(site: Site) -> None:
    module: Any = import_module("megatron.core.distributed.finalize_model_grads")
    update = module._update_router_expert_bias

    def forgetting(*args: Any, **kwargs: Any) -> None:
        if not site.strikes:
            update(*args, **kwargs)

    module._update_router_expert_bias = forgetting


def on_refit(change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> Callable[[Site], None]:
    """Return a fault of the tensors that an engine receives, made from the present and the previous refit's."""

    def plant(site: Site) -> None:
        from nemo_rl_moe.models.megatron.training import megatron_model as module

        gather = module.tensors_of_this_rank
        earlier: dict[str, Any] = {}

        def spoiling(*args: Any) -> Iterator[tuple[str, Any]]:
            now = {name: tensor.clone() for name, tensor in gather(*args)}
            # A refit follows the training of its step, so the first faulty refit is after the first faulty step.
            given = change(now, earlier or now) if site.step > site.onset else now
            earlier.update(given)
            yield from given.items()

        module.tensors_of_this_rank = spoiling  # type: ignore[assignment]

    return plant


def on_own_engine(part_of: Callable[[str, Any], Any]) -> Callable[[Site], None]:
    """Return a fault of a refit for an engine without refits: generation keeps earlier values of the lost part.

    Args:
        part_of: Returns the lost part of a parameter with a name, or None.
    """

    def plant(site: Site) -> None:
        import torch

        generate = site.trainer._generator.generate
        kept: list[Any] = []

        def generating(*args: Any, **kwargs: Any) -> Any:
            named = [pair for chunk in site.trainer.chunks for pair in chunk.named_parameters()]
            parts = [part for name, values in named if (part := part_of(name, values.data)) is not None]
            assert parts, "no parameter has what is to be lost"
            now = [part.clone() for part in parts]
            if not site.strikes or not kept:
                kept[:] = now
            _fill(parts, kept)
            try:
                return generate(*args, **kwargs)
            finally:
                _fill(parts, now)

        def _fill(parts: list[Any], values: list[Any]) -> None:
            with torch.no_grad():
                for part, value in zip(parts, values, strict=True):
                    part.copy_(value)

        site.trainer._generator.generate = generating

    return plant


def _of_experts(name: str, values: Any) -> Any:
    return values if ".experts." in name else None


def _of_layer_one(name: str, values: Any) -> Any:
    return values if ".layers.1." in name else None


def _of_expert_three(name: str, values: Any) -> Any:
    if ".layers.1." not in name or ".experts." not in name:
        return None
    if ".local_experts." in name:
        return values if ".local_experts.3." in name else None
    return values[3]  # stacked


def _stale_experts(now: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    return {name: earlier[name] if ".experts." in name else tensor for name, tensor in now.items()}


def _without_an_expert(now: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in now.items() if "layers.1.mlp.experts.3." not in name}


def _lost_bucket(site: Site) -> None:
    from nemo_rl_moe.weight_sync import folder

    send: Any = folder._Sender._send_bucket

    def losing(sender: Any, bucket: Any) -> None:
        if site.step <= site.onset or sender._num_buckets:
            return send(sender, bucket)
        sender._num_buckets += 1
        sender._num_tensors += len(bucket)
        sender._num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        return None

    folder._Sender._send_bucket = losing  # type: ignore[method-assign, assignment]


def _of_capture(title: str, seen: str, spoil: Spoil, settings: tuple[str, ...] = SHARED_RUN) -> Fault:
    return Fault(title, seen, captured(spoil), settings, spoil=spoil)


FAULTS: dict[str, Fault] = {
    "wrong_layer": _of_capture("routes of another layer", "NeMo-RL#3327", _of_each(_wrong_layer)),
    "mtp_layer": _of_capture("layer 1's routes in layer 0", "NeMo-RL#3903", _of_each(_layer_one_in_layer_zero)),
    "token_shift": _of_capture("routes one token late", "SkyRL#1908", _of_each(_one_late)),
    "permuted_ids": _of_capture("a layer's expert ids permuted", "", _of_each(_permuted_ids)),
    "exchanged_ids": _of_capture("two expert ids exchanged", "", _of_each(_exchanged_ids)),
    "permuted_ids_bf16": _of_capture("the same in bfloat16: permuted", "", _of_each(_permuted_ids), IN_BFLOAT16),
    "exchanged_ids_bf16": _of_capture("the same in bfloat16: exchanged", "", _of_each(_exchanged_ids), IN_BFLOAT16),
    "zeros": _of_capture("routes that nobody wrote", "vllm#54730", _of_each(_zeros)),
    "stale_step": _of_capture("routes of the step before", "sglang#36404", _of_the_step_before),
    "repeated_row": _of_capture("one row replayed 67 times", "sglang#36404", _replayed_again),
    "swapped": _of_capture("sequences' routes swapped", "AReno#524", _swapped),
    "padding": _of_capture("padding carries routes", "sglang#36404", _of_each(_behind_the_end)),
    "dropped_rank": Fault("rows dropped in one rank", "AReno#524", _dropped_in_one_rank),
    "router_bf16": Fault("the engine's router in bfloat16", "", _router_in_bfloat16),
    "dead_expert": Fault("a dead expert", "", _dead_expert, settings=()),
    "hot_rank": Fault("all tokens to one rank", "", _hot_rank, settings=WITH_EXPERT_PARALLELISM),
    "frozen_bias": Fault("an expert bias that stands still", "", _frozen_bias, settings=WITH_BIAS),
    "stale_experts": Fault(
        "stale experts after a refit",
        "vllm#42821",
        on_refit(_stale_experts),
        vllm=True,
        in_own_engine=on_own_engine(_of_experts),
    ),
    "lost_bucket": Fault(
        "a bucket lost in a refit", "", _lost_bucket, vllm=True, in_own_engine=on_own_engine(_of_layer_one)
    ),
    "skipped_expert": Fault(
        "an expert left out of a refit",
        "NeMo-RL#3659",
        on_refit(_without_an_expert),
        vllm=True,
        in_own_engine=on_own_engine(_of_expert_three),
    ),
}
"""By name."""
MOST_SEEDS = 16
RENUMBERED = {
    f"{kind}_{seed}": _of_capture(f"{kind} expert ids, seed {seed}", "", renumbered(kind, seed))
    for kind in ("permuted", "exchanged")
    for seed in range(MOST_SEEDS)
}
"""Faults of `permuted_ids.py`, by name."""
