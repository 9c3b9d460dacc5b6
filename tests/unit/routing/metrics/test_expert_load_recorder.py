# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.routing.metrics import expert_load_recorder as recorder_module
from nemo_rl_moe.routing.metrics.expert_load_recorder import BACKWARD, FORWARD, ExpertLoadRecorder, add_assignments

LAYERS, EXPERTS, TOPK = 3, 8, 2


def recorder(microbatches: int = 2) -> ExpertLoadRecorder:
    made = ExpertLoadRecorder(LAYERS, EXPERTS, torch.device("cpu"))
    made.start(microbatches)
    return made


def routed(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random choices as a map and as indices, and padding for about a third of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK).indices
    chosen = torch.zeros(num_tokens, EXPERTS, dtype=torch.bool).scatter_(1, indices, True)
    return chosen, indices, torch.rand(num_tokens, generator=generator) < 0.3


def count(indices: Tensor, padding: Tensor | None) -> list[int]:
    counts = [0] * EXPERTS
    for token, experts in enumerate(indices.tolist()):
        if padding is None or not padding[token]:
            for expert in experts:
                counts[expert] += 1
    return counts


@pytest.mark.parametrize("with_padding", [False, True])
def test_maps_and_indices_count_alike(with_padding: bool) -> None:
    made = recorder()
    expected = torch.zeros(2, LAYERS, EXPERTS, dtype=torch.long)
    for seed, (microbatch, layer) in enumerate([(1, 0), (0, 2), (1, 2), (1, 0)]):
        chosen, indices, padding = routed(40, seed)
        mask = padding if with_padding else None
        with made.training_forward(chunk=0, microbatch=microbatch):
            made.add(layer, chosen, mask)
            made.add(layer, indices, mask)
        expected[microbatch, layer] += 2 * torch.tensor(count(indices, mask))
    assert torch.equal(made.counts, expected)


def test_layers_with_views_of_one_mask_are_counted_at_once_and_others_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = []
    monkeypatch.setattr(recorder_module, "add_assignments", lambda *args: (groups.append(1), add_assignments(*args)))
    made, mask = recorder(), torch.rand(4, 10) < 0.3
    calls = [(routed(40, seed)[1], (mask.T, mask.T, mask)[seed]) for seed in range(LAYERS)]
    with made.training_forward(0, 0):
        for layer, (indices, padding) in enumerate(calls):
            made.add(layer, indices, padding)
    assert made.counts[0].tolist() == [count(indices, padding.reshape(-1)) for indices, padding in calls]
    assert len(groups) == 2


def test_int32_indices_and_no_tokens() -> None:
    made = recorder()
    chosen, indices, padding = routed(0)
    with made.training_forward(0, 0):
        made.add(0, chosen, padding)
        made.add(0, indices, padding)
        made.add(1, chosen, None)
    assert made.counts.sum() == 0
    chosen, indices, _ = routed(5)
    with made.training_forward(0, 0):
        made.add(0, chosen, torch.ones(5, dtype=torch.bool))
        made.add(0, indices, torch.ones(5, dtype=torch.bool))
    assert made.counts.sum() == 0


def test_counts_beyond_what_small_types_hold() -> None:
    made = recorder(1)
    chosen = torch.zeros(70_000, EXPERTS, dtype=torch.bool)
    chosen[:, 3] = True
    with made.training_forward(0, 0):
        for _ in range(3):
            made.add(0, chosen, None)
    assert made.counts[0, 0].tolist() == [0, 0, 0, 210_000, 0, 0, 0, 0]


def test_nothing_counts_outside_of_a_training_forward() -> None:
    made = recorder()
    chosen, indices, padding = routed(10)
    made.add(0, chosen, padding)
    made.add(0, indices, None)
    with pytest.raises(RuntimeError, match="forward failed"), made.training_forward(0, 0):
        raise RuntimeError("forward failed")
    made.add(0, chosen, None)
    assert made.counts.sum() == 0


def test_starting_clears_what_was() -> None:
    made = recorder(2)
    chosen, _, _ = routed(10)
    for microbatches in (2, 3, 3, 1):
        made.start(microbatches)
        assert made.counts.shape == (microbatches, LAYERS, EXPERTS)
        assert made.counts.dtype == torch.long
        assert made.counts.sum() == 0
        assert made.events == []
        with made.training_forward(0, 0):
            made.add(0, chosen, None)
        assert made.counts.sum() == 10 * TOPK


def test_events_follow_the_order_of_the_passes() -> None:
    made = recorder()
    weight = torch.ones(3, requires_grad=True)
    outputs = []
    for microbatch in (0, 1):
        with made.training_forward(chunk=1, microbatch=microbatch):
            outputs.append(weight * microbatch)
        made.watch_backward([outputs[-1]], chunk=1, microbatch=microbatch)
    for output in reversed(outputs):
        (output * output).sum().backward()
    assert made.events == [(FORWARD, 1, 0), (FORWARD, 1, 1), (BACKWARD, 1, 1), (BACKWARD, 1, 0)]


def test_a_watched_output_keeps_its_gradient() -> None:
    made = recorder()
    plain, watched = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    output = watched * 2
    made.watch_backward([output], 0, 0)
    (output * 3).sum().backward()
    (plain * 2 * 3).sum().backward()
    assert torch.equal(watched.grad, plain.grad)
    made.watch_backward([], 0, 0)
    assert len(made.events) == 1


def test_recomputed_passes_do_not_count() -> None:
    made = recorder(1)
    chosen, _, _ = routed(10)
    weight = torch.ones(2, requires_grad=True)

    def layer(values: Tensor) -> Tensor:
        made.add(0, chosen, None)
        return values * weight

    with made.training_forward(0, 0):
        output = torch.utils.checkpoint.checkpoint(layer, weight * 2, use_reentrant=False)
        output = torch.utils.checkpoint.checkpoint(layer, output, use_reentrant=True)
    assert made.counts.sum() == 2 * 10 * TOPK
    output.sum().backward()
    assert made.counts.sum() == 2 * 10 * TOPK


def test_counting_leaves_no_trace_in_the_graph() -> None:
    made = recorder(1)
    _, indices, padding = routed(10)
    probabilities = torch.rand(10, EXPERTS, requires_grad=True)
    with made.training_forward(0, 0):
        made.add(0, probabilities > 0.5, padding)
        made.add(1, indices, padding)
    assert not made.counts.requires_grad
    assert probabilities.grad_fn is None


def test_counting_never_needs_the_data() -> None:
    """Tensors of a device that holds no data: whatever would wait for a value is an error."""
    device = torch.device("meta")
    made = ExpertLoadRecorder(LAYERS, EXPERTS, device)
    made.start(2)
    made.start(2)
    chosen = torch.empty(10, EXPERTS, dtype=torch.bool, device=device)
    indices = torch.empty(10, TOPK, dtype=torch.long, device=device)
    padding = torch.empty(10, dtype=torch.bool, device=device)
    for mask in (None, padding):
        with made.training_forward(0, 1):
            made.add(0, chosen, mask)
            made.add(1, indices, mask)
    assert made.counts.device == device
    # What a careless recorder might do is noticed.
    for careless in (lambda: indices.reshape(-1).bincount(), lambda: chosen[~padding], lambda: padding.sum().item()):
        with pytest.raises((NotImplementedError, RuntimeError)):
            careless()
