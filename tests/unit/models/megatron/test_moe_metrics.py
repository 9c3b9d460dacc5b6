# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`get_moe_metrics` against numbers worked out by hand from what each rank's routers recorded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.model.releases import recorded_auxiliary_losses
from nemo_rl_moe.models.megatron.model.transformer_config import auxiliary_loss_names, build_transformer_config
from nemo_rl_moe.models.megatron.moe_metrics import MAX_TRACKED_LAYERS, get_moe_metrics
from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder
from nemo_rl_moe.routing.routers import moe_layer_indices
from tests.support.gloo_ranks import RankError, run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_hf_config, tiny_policy
from tests.support.training_run import record_auxiliary_loss

# Rank to (name, global 0-based layer, one value for each microbatch).
Records = Sequence[Sequence[tuple[str, int, Sequence[float]]]]


@contextmanager
def noted_reductions() -> Iterator[list[int]]:
    """Give the sizes of what is reduced meanwhile."""
    sizes, all_reduce = list[int](), dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", noting):
        yield sizes


def record(records: Sequence[tuple[str, int, Sequence[float]]], num_layers: int) -> None:
    for name, layer, values in records:
        for value in values:
            record_auxiliary_loss(name, torch.tensor(value), layer + 1, num_layers)


def record_and_report(
    policy: PolicyConfig, model: Mapping[str, Any], records: Records, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what one rank reports, how many collectives that took, and what is left afterwards."""
    config = build_transformer_config(policy, tiny_hf_config(**model))
    with parallel_job(policy) as rank, noted_reductions() as operations:
        record(records[rank], config.num_layers)
        first = get_moe_metrics(config=config, device=torch.device("cpu"), **arguments)
        left = {name: values.abs().sum().item() for name, values in recorded_auxiliary_losses().items()}
        num_operations = len(operations)
        second = get_moe_metrics(config=config, device=torch.device("cpu"), **arguments)
        return {"metrics": first, "left": left, "collectives": num_operations, "afterwards": second}


def report(
    records: Records,
    *,
    model: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    loss_scale: float = 0.5,
    per_layer_logging: bool = True,
    **changes: Any,
) -> dict[str, float]:
    """The metrics, after checking what holds for every report."""
    world_size = len(records)
    policy = tiny_policy(world_size, **layout(**(sizes or {})), **changes)
    arguments = {"loss_scale": loss_scale, "per_layer_logging": per_layer_logging}
    answers = run_ranks(record_and_report, world_size, policy, model or {}, records, arguments, timeout_s=60.0)
    for answer in answers:
        assert answer["metrics"] == answers[0]["metrics"], "every rank reports the same, to the last bit"
        assert answer["collectives"] == (1 if world_size > 1 else 0)
        assert set(answer["left"].values()) <= {0.0}, "the tracker is cleared"
        assert set(answer["afterwards"].values()) <= {0.0}
        assert answer["afterwards"].keys() == answer["metrics"].keys()
    metrics: dict[str, float] = answers[0]["metrics"]
    return metrics


LOSS = "load_balancing_loss"
Z = "z_loss"


def by_key(expected: Mapping[str, float | Sequence[float | None]]) -> Any:
    """Numbers by key; of a list the first is the mean over layers, and the others are those of the layers."""
    found: dict[str, float] = {}
    for name, values in expected.items():
        mean, *of_layers = values if isinstance(values, Sequence) else [values]
        keys = [name, *(f"{name}_layer_{layer}" for layer in range(len(of_layers)))]
        found |= {key: each for key, each in zip(keys, [mean, *of_layers], strict=True) if each is not None}
    # The routers record in float32.
    return pytest.approx(found, rel=1e-6)


GLOBAL, OF_SEQUENCES = "global_load_balancing_loss", "seq_load_balancing_loss"
LAST_LAYER = {"mlp_only_layers": [0, 1, 2]}
FIRST_LAYER: dict[str, Any] = {"model": {"mlp_only_layers": [1, 2, 3]}, "loss_scale": 1.0, "per_layer_logging": False}
ONE_RANK: Records = [[(LOSS, 0, [1.0, 2.0]), (LOSS, 1, [0.5, 0.5]), (LOSS, 2, [1.0, 1.0]), (LOSS, 3, [1.0, 3.0])]]


CASES: dict[str, tuple[Records, dict[str, Any], dict[str, Any]]] = {
    # Two microbatches; layers 0 to 3 have sums 3, 1, 2, 4; times 1/2.
    "one rank": (ONE_RANK, {}, {LOSS: [1.25, 1.5, 0.5, 1.0, 2.0]}),
    "without layers": (ONE_RANK, {"per_layer_logging": False}, {LOSS: 1.25}),
    # Layers 1 and 3 have experts: (1.2 + 1.8) / 2, not / 4; and no keys for the dense ones.
    "divisor is the number of expert layers": (
        [[(LOSS, 1, [1.2]), (LOSS, 3, [1.8])]],
        {"model": {"mlp_only_layers": [0, 2]}, "loss_scale": 1.0},
        {LOSS: [1.5, None, 1.2, None, 1.8]},
    ),
    # Sums 2.4 and 4.6, mean 3.5, halved; z sums 6 and 14, mean 10, halved.
    "data-parallel ranks are averaged": (
        [[(LOSS, 3, [1.0, 1.4]), (Z, 3, [2.0, 4.0])], [(LOSS, 3, [2.0, 2.6]), (Z, 3, [6.0, 8.0])]],
        {"model": LAST_LAYER, "moe_z_loss_coeff": 0.1},
        {LOSS: [1.75, None, None, None, 1.75], Z: [5.0, None, None, None, 5.0]},
    ),
    # 0.3 + 0.9 and 0.5 + 0.7 are the two microbatches' losses; the z-loss is a mean over the ranks' tokens.
    "tensor-parallel ranks record parts of one sum": (
        [[(LOSS, 3, [0.3, 0.5]), (Z, 3, [2.0, 4.0])], [(LOSS, 3, [0.9, 0.7]), (Z, 3, [6.0, 8.0])]],
        {"model": LAST_LAYER, "sizes": {"tp": 2}, "moe_z_loss_coeff": 0.1},
        {LOSS: [1.2, None, None, None, 1.2], Z: [5.0, None, None, None, 5.0]},
    ),
    # Rank 0 holds the dense layers 0 and 1 and records nothing.
    "stage without experts": (
        [[], [(LOSS, 2, [1.0, 2.0]), (LOSS, 3, [3.0, 4.0])]],
        {"model": {"mlp_only_layers": [0, 1]}, "sizes": {"pp": 2}},
        {LOSS: [2.5, None, None, 1.5, 3.5]},
    ),
    # Ranks 0 and 1 are the first stage. Layer 0: (0.25 + 0.75) and (0.5 + 1) -> 2.5; layer 2: 1.5;
    # layer 3: 0.5 + 3.5.
    "pipeline with tensor parallelism": (
        [
            [(LOSS, 0, [0.25, 0.5])],
            [(LOSS, 0, [0.75, 1.0])],
            [(LOSS, 2, [0.5, 0.0]), (LOSS, 3, [0.25, 0.25])],
            [(LOSS, 2, [0.5, 0.5]), (LOSS, 3, [1.5, 2.0])],
        ],
        {"model": {"mlp_only_layers": [1]}, "sizes": {"tp": 2, "pp": 2}},
        {LOSS: [4 / 3, 1.25, None, 0.75, 2.0]},
    ),
    # Ranks 0, 1 share a batch, ranks 2, 3 another. Losses 1 and 3: mean 2. Global loss: parts of one sum, 0.1 to
    # 0.4.
    "data and tensor parallelism together": (
        [
            [(LOSS, 0, [a]), (Z, 0, [z]), (GLOBAL, 0, [g])]
            for a, z, g in ((0.25, 1.0, 0.1), (0.75, 2.0, 0.2), (1.5, 3.0, 0.3), (1.5, 6.0, 0.4))
        ],
        FIRST_LAYER
        | {
            "sizes": {"tp": 2},
            "moe_z_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "[aux_loss,global_aux_loss]",
            "moe_aux_loss_coeff": "[0.1,0.2]",
        },
        {LOSS: 2.0, GLOBAL: 1.0, Z: 3.0},
    ),
    # Over two data-parallel ranks the global loss is a sum of parts, the others are means.
    "several balancing losses": (
        [
            [(LOSS, 0, [1.0]), (OF_SEQUENCES, 0, [2.0]), (GLOBAL, 0, [3.0])],
            [(LOSS, 0, [3.0]), (OF_SEQUENCES, 0, [4.0]), (GLOBAL, 0, [5.0])],
        ],
        FIRST_LAYER
        | {
            "moe_router_load_balancing_type": "[seq_aux_loss,aux_loss,global_aux_loss]",
            "moe_aux_loss_coeff": "[0.1,0.1,0.1]",
        },
        {LOSS: 2.0, OF_SEQUENCES: 3.0, GLOBAL: 8.0},
    ),
    "enabled losses that nobody recorded are zero and do not hang": (
        [[], []],
        {"per_layer_logging": False, "moe_z_loss_coeff": 0.1},
        {LOSS: 0.0, Z: 0.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reported_are_the_losses_that_a_hand_works_out(name: str) -> None:
    records, settings, expected = CASES[name]
    assert report(records, **settings) == by_key(expected)


@pytest.mark.parametrize("balancing", ["none", "sinkhorn"])
def test_without_a_loss_there_is_no_key_and_no_collective(balancing: str) -> None:
    policy = tiny_policy(2, moe_router_load_balancing_type=balancing, moe_aux_loss_coeff=0.0)
    answers = run_ranks(record_and_report, 2, policy, {}, [[], []], {"loss_scale": 1.0})
    assert [(answer["metrics"], answer["collectives"]) for answer in answers] == [({}, 0), ({}, 0)]


def test_totals_accumulate_without_the_layers() -> None:
    (answers,) = run_ranks(accumulate, 1, tiny_policy(1))
    assert answers == {LOSS: pytest.approx(0.25 + 0.5), "lm loss": 7.0}


def accumulate(policy: PolicyConfig) -> dict[str, float]:
    config = build_transformer_config(policy, tiny_hf_config())
    totals = {"lm loss": 7.0}
    with parallel_job(policy):
        for value in (1.0, 2.0):
            record_auxiliary_loss(LOSS, torch.tensor(value), 1, 4)
            get_moe_metrics(1.0, totals, per_layer_logging=True, config=config, device=torch.device("cpu"))
    return totals


# Without a configuration: what Megatron-Core's tracker and its parallel state report is enough.


def record_and_report_in_any_loop(
    sizes: Mapping[str, int], num_layers: int, steps: Sequence[Records], per_layer_logging: bool
) -> dict[str, Any]:
    """Metrics of each step on one rank, the totals after them, and the collectives that all of it took."""
    policy = tiny_policy(len(steps[0]), **layout(**sizes))
    totals: dict[str, float] = {"lm loss": 7.0}
    with parallel_job(policy) as rank, noted_reductions() as operations:
        metrics = []
        for records in steps:
            record(records[rank], num_layers)
            metrics.append(get_moe_metrics(0.5, totals, per_layer_logging))
        return {"metrics": metrics, "totals": totals, "shapes": operations}


def report_in_any_loop(
    *steps: Records, sizes: Mapping[str, int] | None = None, num_layers: int = 4, per_layer_logging: bool = False
) -> dict[str, Any]:
    """The first rank's answer, after checking that all ranks say the same and take one collective a step."""
    world_size = len(steps[0])
    answers = run_ranks(
        record_and_report_in_any_loop, world_size, sizes or {}, num_layers, steps, per_layer_logging, timeout_s=60.0
    )
    for answer in answers:
        assert answer == answers[0], "every rank reports the same, to the last bit"
        assert len(answer["shapes"]) == (len(steps) if world_size > 1 else 0)
        assert len(set(answer["shapes"])) <= 1, "the shape is the same whatever was recorded"
    return dict(answers[0])


AVERAGED: Records = [
    [(LOSS, 1, [1.0, 1.4]), (LOSS, 3, [0.5, 0.5]), (Z, 1, [2.0, 4.0])],
    [(LOSS, 1, [2.0, 2.6]), (LOSS, 3, [1.0, 1.0]), (Z, 1, [6.0, 8.0])],
]


CASES_OF_ANY_LOOP: dict[str, tuple[list[Records], dict[str, Any], list[dict[str, Any]]]] = {
    # Layers 1 and 3 of four: sums 2.4 and 4.6, mean 3.5, halved: 1.75; 1 and 2: 0.75. The z-loss: 6 and 14, halved:
    # 5. The tracker is cleared in between.
    "averages over data-parallel ranks": (
        [AVERAGED, AVERAGED],
        {"per_layer_logging": True},
        [{LOSS: [1.25, None, 1.75, None, 0.75], Z: [5.0, None, 5.0]}] * 2,
    ),
    # Rank 0 holds dense layers alone: its tracker is empty, and knows neither names nor the number of layers.
    "stage without experts": (
        [[[], [(LOSS, 2, [1.0, 2.0]), (LOSS, 3, [3.0, 4.0]), (Z, 3, [8.0])]]],
        {"sizes": {"pp": 2}, "per_layer_logging": True},
        [{LOSS: [2.5, None, None, 1.5, 3.5], Z: [4.0, None, None, None, 4.0]}],
    ),
    # Each rank's tracker holds the one name that the other's lacks.
    "stages with other losses": (
        [[[(OF_SEQUENCES, 0, [3.0])], [(LOSS, 3, [5.0])]]],
        {"sizes": {"pp": 2}},
        [{LOSS: 2.5, OF_SEQUENCES: 1.5}],
    ),
    # Parts of one sum for the balancing losses, means over the ranks' own tokens for the z-loss.
    "tensor parallelism": (
        [
            [
                [(LOSS, 0, [0.3, 0.5]), (GLOBAL, 0, [0.5]), (Z, 0, [2.0, 4.0])],
                [(LOSS, 0, [0.9, 0.7]), (GLOBAL, 0, [1.5]), (Z, 0, [6.0, 8.0])],
            ]
        ],
        {"sizes": {"tp": 2}},
        [{LOSS: 1.2, GLOBAL: 1.0, Z: 5.0}],
    ),
    # The second step records nothing: the first step's entries are still in the tracker, as zeros.
    "no key for a loss that nobody recorded": ([[[], [(LOSS, 0, [1.0])]], [[], []]], {}, [{LOSS: 0.25}, {}]),
    "one rank needs no collective": ([[[(LOSS, 0, [1.0, 2.0])]]], {}, [{LOSS: 1.5}]),
}


@pytest.mark.parametrize("name", CASES_OF_ANY_LOOP)
def test_any_loop(name: str) -> None:
    steps, settings, expected = CASES_OF_ANY_LOOP[name]
    answer = report_in_any_loop(*steps, **settings)
    means = [{name: each[0] if isinstance(each, list) else each for name, each in of.items()} for of in expected]
    totals = {name: sum(of.get(name, 0.0) for of in means) for name in means[0]}
    assert answer["metrics"] == [by_key(each) for each in expected]
    assert answer["totals"] == by_key({"lm loss": 7.0, **totals})


def test_any_loop_fails_on_all_ranks_for_a_tracker_that_is_too_long() -> None:
    # The rank that recorded nothing fails too, and does not wait for the other.
    records: Records = [[], [(LOSS, 0, [1.0])]]
    arguments = ({"pp": 2}, MAX_TRACKED_LAYERS + 1, [records], False)
    with pytest.raises(RankError) as error:
        run_ranks(record_and_report_in_any_loop, 2, *arguments)
    assert str(error.value).count("ValueError: a tracker has more than 1024 layers") == 2


def test_recorder_without_a_configuration_is_refused() -> None:
    recorder = ExpertLoadRecorder(1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="a recorder needs the model's configuration"):
        get_moe_metrics(1.0, recorder=recorder)


@pytest.mark.parametrize(
    ("types", "coefficients", "z_loss", "expected"),
    [
        ("aux_loss", 0.01, None, [LOSS]),
        ("aux_loss", 0.0, None, []),
        ("none", 0.01, 0.1, [Z]),
        ("[global_aux_loss,aux_loss]", "[0.1,0.1]", None, [LOSS, "global_load_balancing_loss"]),
        ("[global_aux_loss,aux_loss]", "[0.0,0.1]", 0.1, [LOSS, Z]),
        ("seq_aux_loss", 0.01, 0.0, ["seq_load_balancing_loss"]),
    ],
)
def test_names_follow_from_the_configuration(
    types: str, coefficients: float | str, z_loss: float | None, expected: list[str]
) -> None:
    changes: dict[str, Any] = {"moe_router_load_balancing_type": types, "moe_aux_loss_coeff": coefficients}
    policy = tiny_policy(1, moe_z_loss_coeff=z_loss, **changes)
    assert auxiliary_loss_names(build_transformer_config(policy, tiny_hf_config())) == expected


@pytest.mark.parametrize(("frequency", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2]), ("[0,1,1,0]", [1, 2])])
def test_expert_layers_follow_from_the_configuration(frequency: int | str, expected: list[int]) -> None:
    policy = tiny_policy(1, moe_layer_freq=frequency)
    assert moe_layer_indices(build_transformer_config(policy, tiny_hf_config())) == expected
