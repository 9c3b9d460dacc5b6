# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of router losses alone: of this project in any layout, and in float64 from what routers get as input.

The reference runs one sequence at a time, without padding, on one rank. Its losses are written out from their equations
over the inputs of the routers, in float64; the model's own parameters get their gradients through these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, make_shard, per_token, with_empty_rows
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics
from nemo_rl_moe.models.megatron.training.microbatch import MicrobatchShape, pad_microbatch
from nemo_rl_moe.models.megatron.training.side_passes import zero_gradients
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.routing.routers import routers_of
from tests.support.tiny_model import parallel_job, tiny_batch
from tests.support.training_run import RankRun, full_weights, hf_config_of

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
LOSSES = (*KINDS, "z_loss")
ALL_KINDS = {"moe_router_load_balancing_type": f"[{', '.join(KINDS)}]", "moe_aux_loss_coeff": "[1.0, 1.0, 1.0]"}
"""All balancing losses; a run chooses among them by its coefficients."""
LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LossRun:
    """What is run.

    Attributes:
        policy: With `ALL_KINDS` and a z-loss.
        model: Changes to the tiny model, or the name of one of `FAMILY_MODELS`.
        microbatches: Sequences of each microbatch: those of the first data-parallel rank, then of the next. Numbers
            from 8 on are rows of padding.
        losses: Names of the losses, each run alone.
        with_routes: The batch has routed experts of rollouts that no router would choose.
        with_bias: Routers have an expert bias that changes their choice.
    """

    policy: PolicyConfig
    microbatches: tuple[tuple[int, ...], ...]
    model: Mapping[str, Any] | str = field(default_factory=dict)
    losses: tuple[str, ...] = LOSSES
    with_routes: bool = False
    with_bias: bool = False

    def trainer(self) -> MegatronTrainer:
        """Return this rank's trainer, in training mode, with random weights that no layout changes."""
        trainer = MegatronTrainer(self.policy, hf_config_of(self.model), None, num_steps=10)
        for ddp_chunk, chunk in zip(trainer.ddp_chunks, trainer.chunks, strict=True):
            ddp_chunk.train()
            for layer, router in routers_of(chunk.decoder) if self.with_bias else ():
                generator = torch.Generator().manual_seed(int(layer.key))
                router.expert_bias.copy_(torch.randn(len(router.expert_bias), generator=generator))
        return trainer

    def batch(self) -> TokenBatch:
        batch = tiny_batch(5, vocabulary_size=60, shortest=3, longest=23)
        return _with_routes(batch, hf_config_of(self.model)) if self.with_routes else batch

    def microbatches_of_rank(self, rank: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        count = len(self.microbatches) // num_ranks
        return self.microbatches[rank * count : (rank + 1) * count]


@dataclass(frozen=True)
class Found:
    """Gradients by parameter name, and the logged value, of each loss."""

    gradients: dict[str, dict[str, Array]]
    logged: dict[str, dict[str, float]]


def _with_routes(batch: TokenBatch, hf_config: Any) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    shape = (*batch.input_ids.shape, hf_config.num_hidden_layers, hf_config.num_experts)
    routes = torch.rand(shape, generator=generator).topk(hf_config.num_experts_per_tok, -1).indices.to(torch.int16)
    # An engine never feeds the last token.
    real = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None] - 1
    return batch.with_columns(
        **{ROUTED_EXPERTS: per_token(routes.where(real[:, :, None, None], -1), Destination.MODEL, fill=-1)}
    )


def without_gradient(inputs: LossInputs) -> LossOutputs:
    outputs = sft_loss(inputs)
    return type(outputs)(outputs.loss * 0.0, outputs.metrics)


without_gradient.__dict__.update(sft_loss.__dict__)


# This project's, in any layout


def run_losses(run: LossRun) -> list[tuple[RankRun, dict[str, float]]]:
    """Return gradients as if they were weights, and metrics, for each loss. Every rank of the job calls it."""
    with parallel_job(run.policy):
        trainer = run.trainer()
        return [_run_loss(trainer, run, name) for name in run.losses]


def _run_loss(trainer: MegatronTrainer, run: LossRun, name: str) -> tuple[RankRun, dict[str, float]]:
    config, place = trainer.config, trainer.coordinates
    config.moe_aux_loss_coeff = [float(kind == name) for kind in KINDS]
    config.moe_z_loss_coeff = 1.0 if name == "z_loss" else None
    batch = run.batch()
    filled = with_empty_rows(batch, max(max(rows) for rows in run.microbatches) + 1 - len(batch))
    mine = run.microbatches_of_rank(place.data_parallel_rank, place.data_parallel_size)
    shard = make_shard(filled, mine, filled)
    trainer._router_losses.start_step([shard])
    zero_gradients(trainer.ddp_chunks)
    trainer._forward_backward.train(trainer.ddp_chunks, shard, without_gradient)
    metrics = get_moe_metrics(1 / len(mine), None, True, config=config, device=torch.device("cpu"))
    pieces, shards = {}, {}
    for piece_name, shard_rank, layout, gradient in _gradients(trainer):
        pieces[piece_name, shard_rank], shards[piece_name] = gradient, layout
    return RankRun([], [], [], pieces, shards), metrics


def _gradients(trainer: MegatronTrainer) -> Iterator[tuple[str, int, Any, Array]]:
    kept = [(parameter, parameter.detach().clone()) for chunk in trainer.chunks for parameter in chunk.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.copy_(parameter.main_grad)
        for piece in parameter_pieces(trainer.chunks, trainer.config):
            if not piece.is_expert_bias:
                layout = (piece.shard_dimension, piece.num_shards, piece.sections)
                yield piece.name, piece.shard_rank, layout, piece.local.float().numpy().copy()
        for parameter, weights in kept:
            parameter.copy_(weights)


def joined(answers: Sequence[Sequence[tuple[RankRun, dict[str, float]]]], losses: Sequence[str]) -> Found:
    """Return the whole gradients from the ranks' pieces; all ranks must have logged the same."""
    gradients, logged = {}, {}
    for number, name in enumerate(losses):
        gradients[name] = full_weights([answer[number][0] for answer in answers])
        logged[name] = answers[0][number][1]
        assert all(answer[number][1] == logged[name] for answer in answers)
    return Found(gradients, logged)


# In float64


@dataclass(frozen=True)
class Rules:
    """How a model's losses count, by its family's paper.

    Attributes:
        groups: Number of groups and of those that a token may use, best score first (DeepSeek-V2); None: no groups.
        best_of_group: Experts whose logits add up to a group's; 1: the best score, which is that of the best logit.
    """

    topk: int
    sigmoid: bool = False
    groups: tuple[int, int] | None = None
    best_of_group: int = 1


def reference_losses(run: LossRun, rules: Rules, num_ranks: int, counted: str = "live") -> Found:
    """Return gradients and values in float64. Runs on one rank, on a policy of its own without any router loss.

    Args:
        num_ranks: Data-parallel ranks that the microbatches are dealt out to.
        counted: Under replay, `live` or `replayed` experts.
    """
    with parallel_job(run.policy):
        trainer = run.trainer()
        batch = run.batch()
        gradients, logged = {}, {}
        for name in run.losses:
            zero_gradients(trainer.ddp_chunks)
            by_layer = _inputs_of_routers(trainer, batch)
            losses = {}
            for layer, (weight, inputs) in by_layer.items():
                tokens = [
                    _Tokens.of(each, weight, rules, _replayed(batch, row, layer) if counted == "replayed" else None)
                    for row, each in enumerate(inputs)
                ]
                losses[layer] = _EQUATIONS[name](tokens, _rounds(run, num_ranks))
            sum(losses.values()).backward()
            gradients[name] = {piece: values for piece, _, _, values in _gradients(trainer)}
            logged[name] = {f"{LOGGED[name]}_layer_{layer}": float(loss) for layer, loss in losses.items()}
        return Found(gradients, logged)


def _replayed(batch: TokenBatch, row: int, layer: int) -> Tensor:
    return batch.columns[ROUTED_EXPERTS].values[row, : int(batch.lengths[row]), layer].long()


def _inputs_of_routers(trainer: MegatronTrainer, batch: TokenBatch) -> dict[int, tuple[Tensor, list[Tensor]]]:
    """Return the weight of each router and its inputs `[length, hidden]` of each sequence, with their graph."""
    (chunk,) = trainer.chunks
    found: dict[int, tuple[Tensor, list[Tensor]]] = {}
    handles = []
    for layer, router in routers_of(chunk.decoder):
        inputs: list[Tensor] = []
        found[int(layer.key)] = (router.weight, inputs)
        handles.append(router.register_forward_pre_hook(partial(_keep_input, inputs)))
    for row in range(len(batch)):
        one = pad_microbatch(batch.select([row]), MicrobatchShape(1), torch.device("cpu"))
        trainer._forward_backward._run_model(trainer.ddp_chunks[0], one, row, labels=one.labels)
    for handle in handles:
        handle.remove()
    return found


def _keep_input(inputs: list[Tensor], _module: Any, arguments: tuple[Tensor, ...]) -> None:
    inputs.append(arguments[0][:, 0])


@dataclass(frozen=True)
class _Tokens:
    """Logits, scores and counted experts (0 or 1) of a sequence in a layer, `[length, experts]`, in float64."""

    logits: Tensor
    scores: Tensor
    chosen: Tensor

    @classmethod
    def of(cls, inputs: Tensor, weight: Tensor, rules: Rules, experts: Tensor | None) -> "_Tokens":
        logits = inputs.double() @ weight.double().T
        scores = logits.sigmoid() if rules.sigmoid else logits.exp()
        scores = scores / scores.sum(1, keepdim=True)
        chosen = torch.zeros_like(scores)
        for token, row in enumerate((scores if rules.sigmoid else logits).tolist()):
            replayed = [] if experts is None else experts[token].tolist()
            chosen[token, replayed if replayed and replayed[0] >= 0 else _best(row, rules)] = 1.0
        return cls(logits, scores, chosen)


def _best(scores: list[float], rules: Rules) -> list[int]:
    usable = list(range(len(scores)))
    if rules.groups is not None:
        number, most = rules.groups
        size = len(scores) // number
        groups = [usable[first : first + size] for first in range(0, len(scores), size)]
        groups.sort(key=lambda group: -sum(sorted(scores[expert] for expert in group)[-rules.best_of_group :]))
        usable = [expert for group in groups[:most] for expert in group]
    return sorted(usable, key=lambda expert: -scores[expert])[: rules.topk]


def _rounds(run: LossRun, num_ranks: int) -> list[list[list[int]]]:
    """Return the sequences of the microbatches that run at the same time, one list for each data-parallel rank."""
    of_ranks = [run.microbatches_of_rank(rank, num_ranks) for rank in range(num_ranks)]
    return [[[row for row in rows if row < 8] for rows in microbatches] for microbatches in zip(*of_ranks, strict=True)]


Microbatches = Sequence[Sequence[Sequence[int]]]


def _balance(count: Tensor, total: float, scores: Tensor) -> Tensor:
    """`E * sum_e f_e P_e` for the sum of the scores of some tokens, times their number."""
    return scores.shape[-1] * (count / total * scores.sum(0)).sum()


def _aux(tokens: Sequence[_Tokens], rounds: Microbatches) -> Tensor:
    total, number = torch.zeros((), dtype=torch.float64), 0
    for microbatches in rounds:
        for rows in filter(None, microbatches):
            scores = torch.cat([tokens[row].scores for row in rows])
            chosen = torch.cat([tokens[row].chosen for row in rows])
            total = total + _balance(chosen.sum(0), float(chosen.sum()), scores)
            number += len(scores)
    return total / number


def _sequences(tokens: Sequence[_Tokens], rounds: Microbatches) -> Tensor:
    rows = [row for microbatches in rounds for microbatch in microbatches for row in microbatch]
    of_rows = [
        _balance(tokens[row].chosen.sum(0), float(tokens[row].chosen.sum()), tokens[row].scores)
        / len(tokens[row].scores)
        for row in rows
    ]
    return torch.stack(of_rows).mean()


def _global(tokens: Sequence[_Tokens], rounds: Microbatches) -> Tensor:
    total, number = torch.zeros((), dtype=torch.float64), 0
    so_far = torch.zeros_like(tokens[0].chosen[0])
    for microbatches in rounds:
        rows = [row for microbatch in microbatches for row in microbatch]
        if not rows:
            continue
        scores = torch.cat([tokens[row].scores for row in rows])
        so_far = so_far + torch.cat([tokens[row].chosen for row in rows]).sum(0)
        total = total + _balance(so_far, float(so_far.sum()), scores)
        number += len(scores)
    return total / number


def _z(tokens: Sequence[_Tokens], rounds: Microbatches) -> Tensor:
    rows = [row for microbatches in rounds for microbatch in microbatches for row in microbatch]
    return torch.cat([tokens[row].logits.logsumexp(1) for row in rows]).square().mean()


_EQUATIONS: Mapping[str, Callable[[Sequence[_Tokens], Microbatches], Tensor]] = {
    "aux_loss": _aux,
    "seq_aux_loss": _sequences,
    "global_aux_loss": _global,
    "z_loss": _z,
}


def largest_difference(found: Mapping[str, Array], expected: Mapping[str, Array]) -> tuple[float, str]:
    """Return the largest difference of a parameter's gradient, as a share of its norm, and the parameter's name.

    A gradient that is rounding alone counts as a share of the whole gradient's norm.
    """
    whole = float(np.sqrt(sum(np.square(values).sum() for values in expected.values())))
    assert found.keys() == expected.keys()
    shares = {
        name: float(
            np.linalg.norm(found[name][: len(values)] - values) / max(float(np.linalg.norm(values)), 1e-3 * whole)
        )
        for name, values in expected.items()
    }
    name = max(shares, key=lambda each: shares[each])
    return shares[name], name
