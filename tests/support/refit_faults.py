# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Refits of tiny models, right and wrong ones: a Megatron trainer beside an engine of transformers.

The engine loads what the trainer exports, and a fault changes what it then stores. The check is the product's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.refit_check import RefitCheck, Scores, probe_sequences
from nemo_rl_moe.launch.refit import batch_of
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from tests.support.family_reference import trainer_of, write_reference
from tests.support.tiny_model import forget_recorded_losses, parallel_job, shard_of_rank, tiny_batch, tiny_policy

TEN_SHAPES = (
    "llama",
    "qwen2_yarn_positions",
    "qwen3_tied",
    "mixtral_top3_odd_vocabulary",
    "olmoe",
    "qwen2_moe_dense_layers_normalized_weights",
    "qwen3_moe",
    "qwen3_moe_every_second_layer_tied",
    "gpt_oss",
    "deepseek_v3",
)
"""Keys of `FAMILY_MODELS`: dense and with experts, tied embeddings, norms of queries, shared experts, biases."""
Parameters = Mapping[str, Tensor]


def policy_of(learning_rate: float, precision: str = "bfloat16") -> PolicyConfig:
    """Return a policy on one rank, whose steps have the size of the learning rate."""
    return tiny_policy(
        precision=precision,
        optimizer__lr=learning_rate,
        optimizer__min_lr=learning_rate,
        optimizer__adam_eps=1e-12,
        optimizer__weight_decay=0.0,
    )


# ---- what goes wrong in an engine ----


def experts_of(parameters: Parameters, number: int) -> tuple[Tensor, ...]:
    layers = sorted({name.rpartition(".")[0] for name in parameters if name.endswith(".experts.down_proj")})
    prefix = layers[number % len(layers)]
    return tuple(tensor for name, tensor in parameters.items() if name.startswith(f"{prefix}."))


def swap_two_experts(parameters: Parameters, number: int) -> None:
    """Experts `number` and `number + 1` of a layer change places."""
    for stacked in experts_of(parameters, number):
        stacked[[number, number + 1]] = stacked[[number + 1, number]]


def shift_one_expert(parameters: Parameters, number: int, by: float) -> None:
    """All numbers of an expert are off."""
    for stacked in experts_of(parameters, number):
        stacked[number] += by


def zero_a_norm(parameters: Parameters, number: int) -> None:
    """A layer's norm has no weights."""
    norms = [tensor for name, tensor in parameters.items() if name.endswith("layernorm.weight")]
    norms[number % len(norms)].zero_()


def scale_down_proj(parameters: Parameters, number: int, by: float) -> None:
    """A layer's output projections, of all experts, are off by a factor."""
    projections = [tensor for name, tensor in parameters.items() if name.endswith(("down_proj", "down_proj.weight"))]
    projections[number % len(projections)].mul_(by)


def shift_embedding(parameters: Parameters, number: int, by: float) -> None:
    """Noise on the embedding."""
    (embedding,) = (tensor for name, tensor in parameters.items() if name.endswith("embed_tokens.weight"))
    generator = torch.Generator().manual_seed(number)
    embedding += by * torch.randn(embedding.shape, generator=generator).to(embedding.dtype)


Fault = Callable[[Parameters, int], None]
COARSE_FAULTS: Mapping[str, Fault] = {
    "two experts swapped": swap_two_experts,
    "a norm zeroed": zero_a_norm,
    "down_proj x 1.01": partial(scale_down_proj, by=1.01),
    "embedding off by 1e-3": partial(shift_embedding, by=1e-3),
}
FINE_FAULTS: Mapping[str, Fault] = {
    "one expert off by 1e-5": partial(shift_one_expert, by=1e-5),
    "down_proj x 1.001": partial(scale_down_proj, by=1.001),
    "embedding off by 1e-6": partial(shift_embedding, by=1e-6),
}
STALE = "all weights one step old, lr 1e-6"
TIMES = 3


# ---- trainer and engine ----


@dataclass
class EngineCopy:
    """An engine of one copy of the weights, in this process.

    Attributes:
        folder: Has the model's configuration.
        dtype: Of the weights.
        gives_fingerprints: False: it leaves out every tensor, as an engine would whose layout is not known.
    """

    folder: Path
    dtype: torch.dtype
    gives_fingerprints: bool = True
    model: Any = None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        config = AutoConfig.from_pretrained(self.folder)
        self.model = (
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            .from_pretrained(
                None, config=config, state_dict=dict(tensors), dtype=self.dtype, experts_implementation="eager"
            )
            .eval()
        )

    @contextmanager
    def harmed(self, fault: Fault, number: int) -> Iterator[bool]:
        """Have a fault for a while; False: rounding leaves every number as it was."""
        kept = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        with torch.no_grad():
            fault(dict(self.model.named_parameters()), number)
        yield any(not torch.equal(kept[name], tensor) for name, tensor in self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.copy_(kept[name])

    def score(self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Any) -> list[Scores]:
        ids = torch.tensor(sequences)
        with torch.no_grad():
            logprobs = (self.model(ids).logits.float() / temperature).log_softmax(-1)
        return [list(logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy())]

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        from transformers.core_model_loading import revert_weight_conversion

        stored = revert_weight_conversion(self.model, self.model.state_dict()) if self.gives_fingerprints else {}
        return [fingerprints_of(stored.items(), number_format)]


class Pair:
    """A trainer and an engine with a copy of its weights.

    Args:
        name: A key of `FAMILY_MODELS`.
        folder: Gets the model.
        policy: Of the trainer.
        num_steps: Steps that it can make.
    """

    def __init__(self, name: str, folder: Path, policy: PolicyConfig, num_steps: int = 1):
        from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank

        forget_recorded_losses()
        write_reference(name, folder)
        self.trainer = trainer_of(folder, policy, num_steps)
        self.vocabulary: int = self.trainer.hf_config.vocab_size
        self._export = lambda: dict(
            tensors_of_this_rank(self.trainer.chunks, self.trainer.config, self.trainer.hf_config)
        )
        self.precision: str = policy.precision
        self.engine = EngineCopy(folder, getattr(torch, self.precision))

    def refit(self, altered: bool = False) -> None:
        """Give the engine the trainer's weights, or others."""
        tensors = self._export()
        self.engine.load({name: 1.5 * each.roll(1, -1) for name, each in tensors.items()} if altered else tensors)

    def step(self, seed: int) -> None:
        self.trainer.train([shard_of_rank(tiny_batch(seed, self.vocabulary))], sft_loss)

    def check(self) -> RefitCheck:
        return RefitCheck(
            probe_sequences(4, 32, self.vocabulary),
            1.0,
            self._start_scores,
            self.refit,
            lambda copy: "",
            in_float32=self.precision == "float32",
            bound_nats=None,
            refits_again=False,
            start_fingerprints=self._start_fingerprints,
            number_format=self.precision,
        )

    def _start_scores(self, sequences: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        (found,) = self.trainer.logprobs([batch_of(sequences)])
        return lambda: list(found[:, 1:].numpy())

    def _start_fingerprints(self, number_format: str) -> Callable[[], dict[str, str]]:
        found = self.trainer.weight_fingerprints(number_format)
        return lambda: found


# ---- what the rank of a job runs ----


@dataclass(frozen=True)
class RightRefits:
    """Right refits of one model.

    Attributes:
        gaps: Mean difference of the log-probs of each, in nats.
        share_compared: Share of the tensors whose fingerprints were compared.
        alarms: What the check has said of one.
    """

    gaps: list[float]
    share_compared: float
    alarms: list[str] = field(default_factory=list)


def right_refits(names: Sequence[str], root: str, num_steps: int, learning_rate: float) -> dict[str, RightRefits]:
    """Return the refits of each model before the first step and after each; no fault is planted."""
    found = {}
    with parallel_job(policy := policy_of(learning_rate)):
        for name in names:
            pair, alarms, gaps = Pair(name, Path(root, name), policy, num_steps), list[str](), list[float]()
            check = pair.check()
            for step in range(num_steps + 1):
                pair.refit()
                try:
                    gaps.append(check.after_refit(pair.engine).mean)
                except WeightSyncError as error:
                    alarms.append(f"step {step}: {error}")
                if step < num_steps:
                    pair.step(step)
            found[name] = RightRefits(gaps, check.share_compared or 0.0, alarms)
    return found


@dataclass(frozen=True)
class FaultRun:
    """What a check says of planted faults, each of which strikes after right refits.

    Attributes:
        said: Fault to what the check has said each time; None: nothing.
        num_changed: Fault to the times that it changed a number: rounding may leave all as they were.
    """

    said: Mapping[str, Sequence[str | None]]
    num_changed: Mapping[str, int]

    def num_found(self, fault: str) -> int:
        return sum(each is not None for each in self.said[fault])


def plant_faults(
    name: str, root: str, faults: Sequence[str], precision: str, gives_fingerprints: bool = True, num_before: int = 2
) -> FaultRun:
    """Plant each fault `TIMES` times into an engine of a model.

    Args:
        name: A key of `FAMILY_MODELS`.
        root: A folder for the model's.
        faults: Names of them.
        precision: Of trainer and engine.
        gives_fingerprints: As of `EngineCopy`.
        num_before: Right refits before them, of which the check learns.
    """
    with parallel_job(policy := policy_of(1e-6, precision)):
        pair = Pair(name, Path(root, name), policy, num_steps=num_before + TIMES)
        pair.engine.gives_fingerprints = gives_fingerprints
        check = pair.check()
        for step in range(num_before):
            pair.refit()
            check.after_refit(pair.engine)
            pair.step(step)
        said: dict[str, list[str | None]] = {}
        num_changed = dict.fromkeys(faults, 0)
        pair.refit()
        for fault in faults:
            if fault == STALE:
                continue
            for number in range(TIMES):
                with pair.engine.harmed((COARSE_FAULTS | FINE_FAULTS)[fault], number) as has_changed:
                    num_changed[fault] += has_changed
                    said.setdefault(fault, []).append(_said(check, pair))
        if STALE in faults:
            for number in range(TIMES):
                pair.step(num_before + number)  # without a refit
                num_changed[STALE] += 1
                said.setdefault(STALE, []).append(_said(check, pair))
                pair.refit()
        assert _said(check, pair) is None, "a right refit"
    return FaultRun(said, num_changed)


def _said(check: RefitCheck, pair: Pair) -> str | None:
    try:
        check.after_refit(pair.engine)
    except WeightSyncError as error:
        return str(error)
    return None
