# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from nemo_rl_moe.routing.metrics.metric_keys import indices_of_layers, natural_order, outlier_key, with_moe_prefix


def test_the_prefix_is_added_once_and_not_to_outliers() -> None:
    metrics = {"cv_mean": 0.5, "layer_3/cv": 0.25, outlier_key(3, 7): 2.0, "what_if/max_overload_factor_ep_4": 1.5}
    assert with_moe_prefix(metrics) == {
        "moe/cv_mean": 0.5,
        "moe/layer_3/cv": 0.25,
        "moe_expert_utilization/layer_3_expert_7": 2.0,
        "moe/what_if/max_overload_factor_ep_4": 1.5,
    }


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["model.layers.10.mlp.gate", "model.layers.2.mlp.gate", "model.layers.1.mlp.gate"]
    assert sorted(names, key=natural_order) == [names[2], names[1], names[0]]
    # Comparing a number with a word must not fail.
    assert sorted(["a.b", "a.1", "1.a"], key=natural_order) == ["1.a", "a.1", "a.b"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([5, 0, 11], [(0, 0), (5, 5), (11, 11)]),
        (["layers.10.gate", "layers.2.gate"], [("layers.2.gate", 2), ("layers.10.gate", 10)]),
        # The component that is a number, not the digit of another name.
        (["model2.layers.7.gate", "model2.layers.3.gate"], [("model2.layers.3.gate", 3), ("model2.layers.7.gate", 7)]),
        (["layer_12", "layer_9"], [("layer_9", 9), ("layer_12", 12)]),
        # Two towers have a layer 3 each, and one name has no number: positions.
        (["b.3", "a.10", "a.3"], [("a.3", 0), ("a.10", 1), ("b.3", 2)]),
        (["router", "layers.4.router"], [("layers.4.router", 0), ("router", 1)]),
    ],
)
def test_indices_of_layers(layers: list[int | str], expected: list[tuple[int | str, int]]) -> None:
    assert list(indices_of_layers(layers).items()) == expected


def test_indices_and_names_do_not_mix() -> None:
    with pytest.raises(TypeError, match="both kinds"):
        indices_of_layers([1, "layers.2"])
