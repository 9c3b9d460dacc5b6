# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of vLLM's engines, also where a CUDA graph runs in place of Python."""

import numpy as np
import pytest
import torch
from torch import nn

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm import routes
from nemo_rl_moe.generation.vllm.routes import RouteRecorder
from tests.support.vllm_runner import MOST_TOKENS, NUM_LAYERS, TOPK, Capture, Runner, chosen


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_each_token_has_its_experts(in_a_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_FIRST_TOKENS", 2)
    runner = Runner()
    recorder = RouteRecorder(runner)
    if in_a_graph:
        with Capture() as runner.graph:
            runner.model(MOST_TOKENS)
        for layer in runner.get_model():  # type: ignore[attr-defined]
            layer.router.set_capture_fn(None)  # Python is not asked again
    runner.step({"early": (0, 4)}, chosen(900, 4))
    recorder.start()
    prompts, first, second = chosen(0, 5), chosen(100, 2), chosen(200, 2)
    runner.step({"7-x": (0, 3), "8": (0, 2)}, prompts)
    runner.step({"8": (2, 1), "7-x": (3, 1)}, first)
    runner.step({"8": (3, 1), "7-x": (4, 1)}, second)
    found = recorder.take("7", 6)
    assert found is not None
    assert found.dtype == np.int16
    expected = torch.cat([prompts[:3], first[1:], second[1:], torch.full((1, NUM_LAYERS, TOPK), -1)])
    np.testing.assert_array_equal(found, expected.numpy())
    other = recorder.take("8", 4)
    np.testing.assert_array_equal(other, torch.cat([prompts[3:], first[:1], second[:1]]).numpy())
    assert recorder.take("8", 4) is None
    assert recorder.take("early", 4) is None, "nobody was recording"


def test_a_token_beyond_the_end_of_a_request_leaves_nothing() -> None:
    runner = Runner()
    recorder = RouteRecorder(runner)
    recorder.start()
    runner.step({"7-x": (0, 3)}, chosen(0, 3))
    runner.step({"7-x": (3, 1), "8-x": (0, 2)}, chosen(100, 3))  # begun before the end of request 7 was known
    found = recorder.take("7", 3)
    np.testing.assert_array_equal(found, chosen(0, 3).numpy())
    runner.step({"8-x": (2, 1)}, chosen(200, 1))
    other = recorder.take("8", 3)
    np.testing.assert_array_equal(other, torch.cat([chosen(100, 3)[1:], chosen(200, 1)]).numpy())
    assert not recorder._routes


def test_only_the_rank_that_reports_copies_to_the_host() -> None:
    runner = Runner()
    recorder = RouteRecorder(runner, reports=False)
    recorder.start()
    runner.step({"7": (0, 3)}, chosen(0, 3))
    assert recorder.take("7", 3) is None


def test_a_layer_that_reports_nothing_ends_the_generation() -> None:
    runner = Runner(silent=1)
    RouteRecorder(runner).start()
    with pytest.raises(GenerationError, match="the experts of 2 of 3 MoE layers"):
        runner.step({"7": (0, 3)}, chosen(0, 3))


def test_a_dense_model_has_none() -> None:
    runner = Runner()
    runner._model = nn.ModuleList()
    recorder = RouteRecorder(runner)
    recorder.start()
    runner.step({"7": (0, 3)}, chosen(0, 3))
    assert recorder.take("7", 3) is None
