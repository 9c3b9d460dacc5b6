# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Training of MTP layers: losses, gradients and weights, compared with the published equations
around transformers' decoder layers, in every layout."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Destination, per_token
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.checkpoint.index import holds_mtp
from nemo_rl_moe.models.megatron.model.memory_estimate import rank_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHook
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.routing.routers import routers_of
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.family_reference import tensors_in, trainer_of
from tests.support.family_training import SETTINGS, TRAINED, difference_of_changes
from tests.support.gloo_ranks import run_ranks
from tests.support.mtp_layers import write_with_mtp_layers
from tests.support.mtp_reference import ModelWithMtpLayer
from tests.support.quick_list import full, listed, some_of
from tests.support.tiny_model import (
    MICROBATCHES,
    forget_recorded_losses,
    layout,
    parallel_job,
    shard_of_rank,
    tiny_batch,
    tiny_grpo_policy,
    tiny_policy,
)

WEIGHT = 0.7
LAYER = 4
"""Index of the MTP layer of `deepseek_v3`."""
NUM_STEPS = 2
"""Later, rounding turns a close choice of experts."""
DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences of losses, gradient norms, and changes of weights."""

    loss: float = 1e-6
    norm: float = 2e-5
    change: float = 1e-4

    @classmethod
    def of(cls, name: str) -> "Tolerance":
        # Norms of the outputs of gated delta nets make rounding large.
        return cls(loss=5e-5, norm=5e-3, change=2e-2) if name in DELTA_NETS else cls()


FAMILIES = ("deepseek_v3", "glm4_moe_norms_groups", "qwen3_next")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "packed": (1, {"sequence_packing__enabled": True}),
    "chunked_head": (1, {"logprob_chunk_size": 7}),
    "recomputed": (1, {"activation_checkpointing": "full"}),
    "recomputed_moe": (1, {"activation_checkpointing": "moe"}),
    "dp2": (2, {}),
    "tp2": (2, layout(tp=2)),
    "tp2_packed": (2, {**layout(tp=2), "sequence_packing__enabled": True}),
    "pp2": (2, layout(pp=2)),
    "ep2": (2, layout(ep=2)),
}


def policy_of(folder: Path, world_size: int, *, is_detached: bool, **changes: Any) -> PolicyConfig:
    further = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": WEIGHT, "mtp_detach_heads": is_detached}
    return tiny_policy(world_size, model_name=str(folder), **{**SETTINGS, **further, **changes})


def train(policy: PolicyConfig, folder: str, exports: str) -> dict[str, list[float]]:
    """Train with this rank, write the weights, and return the values of each step."""
    with parallel_job(policy):
        forget_recorded_losses()
        trainer = trainer_of(Path(folder), policy, num_steps=NUM_STEPS)
        place = trainer.coordinates
        batch = tiny_batch(100, trainer.hf_config.vocab_size)
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, MICROBATCHES)
        found: dict[str, list[float]] = {"loss": [], "norm": [], "mtp_1_loss": [], "layers": []}
        for _ in range(NUM_STEPS):
            result = trainer.train([shard], sft_loss)
            found["loss"].append(result.global_loss)
            found["norm"].append(result.grad_norm)
            series = result.microbatch_metrics.get("mtp_1_loss")
            assert series is None or series.reduction is Reduction.SHARE
            found["mtp_1_loss"].append(0.0 if series is None else sum(series.values))
            load = EXPERT_LOAD.of(result.artifacts)
            found["layers"].append(0 if load is None else load.counts.shape[0])
        if exports:
            trainer.save_weights(Path(exports), {})
        return found


@cache
def reference(name: str, root: Path, is_detached: bool) -> tuple[Path, dict[str, list[float]]]:
    """A folder, its weights after training below it, and the values of each step."""
    folder = root / f"{name}_{is_detached}"
    tensors = write_with_mtp_layers(name, folder)
    model = ModelWithMtpLayer(folder, WEIGHT, is_detached=is_detached)
    chosen = policy_of(folder, 1, is_detached=is_detached).megatron_cfg.optimizer
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=(chosen.adam_beta1, chosen.adam_beta2),
        eps=chosen.adam_eps,
        weight_decay=0.0,
    )
    batch = tiny_batch(100, model.config.vocab_size)
    found: dict[str, list[float]] = {"loss": [], "norm": [], "mtp_1_loss": []}
    for _ in range(NUM_STEPS):
        adam.zero_grad()
        loss, further = model.losses(batch)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found["loss"].append((loss - WEIGHT * further).item())
        found["norm"].append(torch.nn.utils.get_total_norm(gradients).item())
        found["mtp_1_loss"].append(further.item())
        adam.step()
    found["moe_layers"] = [sum(hasattr(layer.mlp, "gate") for layer in model.model.model.layers)]
    model.save(folder / TRAINED, tensors)
    return folder, found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("further")


CASES = [
    *((name, "one", is_detached) for name in FAMILIES for is_detached in (True, False)),
    *(("deepseek_v3", chosen, True) for chosen in LAYOUTS if chosen != "one"),
    *(("deepseek_v3", chosen, False) for chosen in ("packed", "dp2", "tp2", "ep2")),
    *(("qwen3_next", chosen, False) for chosen in ("packed", "tp2")),
    ("qwen3_next", "pp2", True),
    *((name, "one", True) for name in ("kimi_k2", "glm4_moe_lite", "qwen3_5_moe_text", "qwen3_5_text")),
]


QUICK = {
    ("deepseek_v3", "one", True),
    ("deepseek_v3", "one", False),
    ("deepseek_v3", "tp2_packed", True),
    ("deepseek_v3", "pp2", True),
    ("deepseek_v3", "packed", False),
    ("qwen3_next", "one", False),
}


@pytest.mark.parametrize(("name", "chosen", "is_detached"), listed(CASES, QUICK, CASES))
def test_training_is_that_of_the_published_equations(
    name: str, chosen: str, is_detached: bool, root: Path, tmp_path: Path
) -> None:
    folder, expected = reference(name, root, is_detached)
    world_size, changes = LAYOUTS[chosen]
    policy = policy_of(folder, world_size, is_detached=is_detached, **changes)
    ranks = run_ranks(train, world_size, policy, str(folder), str(tmp_path / "out"))
    last, tolerance = ranks[-1], Tolerance.of(name)
    assert last["loss"] == pytest.approx(expected["loss"], rel=tolerance.loss)
    assert last["norm"] == pytest.approx(expected["norm"], rel=tolerance.norm)
    reported = np.sum([found["mtp_1_loss"] for found in ranks], axis=0)
    assert reported == pytest.approx(expected["mtp_1_loss"], rel=tolerance.loss)
    first, last_loss = expected["mtp_1_loss"]
    assert abs(last_loss / first - 1) > 20 * tolerance.loss, "the step is large enough to show differences"
    assert difference_of_changes(tmp_path / "out", folder) < tolerance.change
    assert set(ranks[0]["layers"]) == {expected["moe_layers"][0]}, "metrics of the load are of the model's layers"


def training_flops(policy: PolicyConfig, folder: str) -> int:
    """Return the operations of training on a sequence of five tokens, as the rank reports them."""
    with parallel_job(policy):
        flops = trainer_of(Path(folder), policy, num_steps=1).describe({}).forward_flops
        assert flops is not None
        return flops.training([5])


def test_training_counts_the_operations_of_the_layers(root: Path) -> None:
    """As in test_flops.py: 15 pairs. A detached loss does not train the output layer of 32 x 64."""
    folder, _ = reference("deepseek_v3", root, True)
    settings: list[tuple[int | None, bool]] = [(None, True), (1, True), (1, False)]
    without, detached, joint = (
        run_ranks(training_flops, 1, policy_of(folder, 1, is_detached=is_detached, mtp_num_layers=number), str(folder))[
            0
        ]
        for number, is_detached in settings
    )
    assert joint - without == 3 * (5 * 23_936 + 15 * 144)
    assert joint - detached == 5 * 2 * 32 * 64


def test_a_detached_loss_leaves_the_model_alone(root: Path, tmp_path: Path) -> None:
    """Without clipping, all other weights are bit for bit as without these layers."""
    folder, _ = reference("deepseek_v3", root, True)
    outs = {}
    for number in (None, 1):
        policy = policy_of(folder, 1, is_detached=True, mtp_num_layers=number)
        run_ranks(train, 1, policy, str(folder), str(tmp_path / f"{number}"))
        outs[number] = tensors_in(tmp_path / f"{number}")
    assert outs[None].keys() == outs[1].keys()
    further = {name for name in outs[1] if name.startswith(f"model.layers.{LAYER}.")}
    assert all(torch.equal(outs[None][name], outs[1][name]) for name in outs[1].keys() - further)
    source = tensors_in(folder)
    for name in further:
        assert torch.equal(outs[None][name], source[name]), f"{name}: kept"
    unchanged = {name for name in further if torch.equal(outs[1][name], source[name].float())}
    assert all("experts." in name or name.endswith("e_score_correction_bias") for name in unchanged), "trained"
    assert len(unchanged) < len(further) / 4, "some experts have no token"


@pytest.mark.parametrize("chosen", some_of(["tp2_packed", "packed", "recomputed_moe", "dp2", "ep2", "pp2"], 2))
def test_router_losses_and_expert_bias_do_not_depend_on_the_layout(chosen: str, root: Path, tmp_path: Path) -> None:
    """Also those of the MTP layer's router, of which transformers has no equations."""
    folder, _ = reference("deepseek_v3", root, True)
    found = {}
    for name in ("one", chosen):
        world_size, changes = LAYOUTS[name]
        with_losses = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01, "moe_router_bias_update_rate": 0.01}
        policy = policy_of(folder, world_size, is_detached=True, **with_losses, **changes)
        found[name] = run_ranks(train, world_size, policy, str(folder), str(tmp_path / name))[-1]
    assert found[chosen]["norm"] == pytest.approx(found["one"]["norm"], rel=2e-5)
    expected, ours, start = (tensors_in(each) for each in (tmp_path / "one", tmp_path / chosen, folder))
    for name, tensor in expected.items():
        change = (tensor - start[name].float()).abs().max().clamp_min(1e-4)
        assert ((ours[name] - tensor).abs().max() / change).item() < 1e-3, name
    moved = [name for name in expected if name.endswith("e_score_correction_bias") and f".{LAYER}." in name]
    assert not any(torch.equal(expected[name], start[name]) for name in moved)
    assert moved


def save_and_go_on(policy: PolicyConfig, folder: str, directory: str) -> tuple[list[float], int]:
    """Train a step, save, train another; what the second gave, and how many parameters this rank has."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=3)
        step_of(trainer)
        trainer.start_checkpoint(Path(directory), with_optimizer=True)
        problem = trainer.finish_checkpoint()
        assert problem is None, problem
        embeddings = [chunk.mtp.embedding_weight for chunk in trainer.chunks if hasattr(chunk, "mtp")]
        of_model = {id(tensor): tensor for chunk in trainer.chunks for tensor in [*chunk.parameters(), *embeddings]}
        return step_of(trainer), sum(tensor.numel() for tensor in of_model.values())


def load_and_go_on(policy: PolicyConfig, folder: str, directory: str) -> list[float]:
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=3)
        trainer.load_checkpoint(Path(directory), with_optimizer=True)
        return step_of(trainer)


def step_of(trainer: Any) -> list[float]:
    """Loss, gradient norm and this rank's part of the MTP layer's loss of one update."""
    forget_recorded_losses()
    place = trainer.coordinates
    batch = tiny_batch(100, trainer.hf_config.vocab_size)
    shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, MICROBATCHES)
    result = trainer.train([shard], sft_loss)
    series = result.microbatch_metrics.get("mtp_1_loss")
    return [result.global_loss, result.grad_norm, 0.0 if series is None else sum(series.values)]


@pytest.mark.parametrize("name", ["deepseek_v3", full("qwen3_next")])
def test_checkpoints_contain_them_in_any_layout_and_memory_is_counted(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_with_mtp_layers(name, folder)
    for saved in ("saved", "by_stage"):
        (tmp_path / saved).mkdir()
    policy = policy_of(folder, 2, is_detached=True, **layout(tp=2))
    written = run_ranks(save_and_go_on, 2, policy, str(folder), str(tmp_path / "saved"))
    assert [step for step, _ in written] == run_ranks(load_and_go_on, 2, policy, str(folder), str(tmp_path / "saved"))
    other = policy_of(folder, 2, is_detached=True, **layout(pp=2))
    first, last = run_ranks(load_and_go_on, 2, other, str(folder), str(tmp_path / "saved"))
    assert first[:2] == last[:2] == pytest.approx(written[0][0][:2], rel=2e-4)
    assert last[2] == pytest.approx(written[0][0][2], rel=2e-4)
    hf_config = load_hf_config(str(folder))
    config = build_transformer_config(policy, hf_config)
    assert [number for _, number in written] == [rank_parameters(config, hf_config, 0, mtp_layers=1).total] * 2
    by_stage = run_ranks(save_and_go_on, 2, other, str(folder), str(tmp_path / "by_stage"))
    config = build_transformer_config(other, hf_config)
    expected = [rank_parameters(config, hf_config, stage, mtp_layers=1).total for stage in range(2)]
    assert [number for _, number in by_stage] == expected


def load_without(policy: PolicyConfig, folder: str, trained: Head | None) -> tuple[list[str], int]:
    """What a model reports of a folder, and how many MTP layers it has.

    Args:
        trained: The head of a model that is trained. None: the model is not trained.
    """
    with parallel_job(policy):
        hf_config = plain_config(load_hf_config(folder))
        model = (
            MegatronModel(policy, hf_config, Path(folder))
            if trained is None
            else MegatronTrainer(policy, hf_config, Path(folder), num_steps=1, heads=[trained])
        )
        return list(model.notices), sum(hasattr(chunk, "mtp") for chunk in model.chunks)


def test_models_that_are_not_trained_on_tokens_leave_trained_layers_out(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    write_with_mtp_layers("deepseek_v3", folder)
    (checkpoint / "policy").mkdir(parents=True)
    (checkpoint / "config.json").write_bytes((folder / "config.json").read_bytes())
    run_ranks(save_and_go_on, 1, policy_of(folder, 1, is_detached=True), str(folder), str(checkpoint / "policy"))
    policy = policy_of(checkpoint, 1, is_detached=True, mtp_num_layers=None)
    for trained in (None, Head.VALUE, Head.SCORE):  # the last two are critics and reward models
        ((notices, num_layers),) = run_ranks(load_without, 1, policy, str(checkpoint), trained)
        (line,) = notices
        assert "tensors of multi-token prediction left out: only training on tokens uses them" in line
        assert num_layers == 0
    assert holds_mtp(checkpoint / "policy")


def train_with_replay(policy: PolicyConfig, folder: str, routes: Any) -> tuple[float, list[bool], list[set[bool]]]:
    """Loss of an update that replays routes; for each router, whether it has a hook, and chose what it would choose."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=1)
        kinds, own = list[bool](), dict[int, set[bool]]()

        def compare(router: Any, arguments: Any, output: Any) -> None:
            logits = router.gating(arguments[0]).detach()
            scores = logits.flatten(0, 1).sigmoid() + router.expert_bias
            same = scores.topk(3).indices.sort(-1).values == output[1].nonzero()[:, 1].view(-1, 3)
            own.setdefault(router.layer_number, set()).add(bool(same.all()))

        for chunk in trainer.chunks:
            for _, router in routers_of(chunk):
                kinds.append(isinstance(router.router_replay, RouterHook))
                router.register_forward_hook(compare)
        batch = tiny_batch(100, trainer.hf_config.vocab_size)
        batch = batch.with_columns(**{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)})
        result = trainer.train([shard_of_rank(batch)], sft_loss)
        return result.global_loss, kinds, [own[number] for number in sorted(own)]


@pytest.mark.parametrize("recompute", ["none", "moe"])
def test_replayed_routes_are_of_the_model_s_layers_alone(recompute: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_with_mtp_layers("deepseek_v3", folder, n_group=1, topk_group=1)
    batch = tiny_batch(100)
    scores = torch.rand(*batch.input_ids.shape, 3, 16, generator=torch.Generator().manual_seed(1))
    fed = torch.arange(batch.input_ids.shape[1]) < (batch.lengths - 1)[:, None]
    routes = scores.topk(3, -1).indices.to(torch.int16).where(fed[:, :, None, None], -1)
    found = {}
    for number in (None, 1):
        policy = tiny_grpo_policy(
            1,
            model_name=str(folder),
            routing_replay="rollout",
            activation_checkpointing=recompute,
            mtp_num_layers=number,
            moe_aux_loss_coeff=0.0,
            max_grad_norm=None,
        )
        (found[number],) = run_ranks(train_with_replay, 1, policy, str(folder), routes)
    without, with_layer = found[None], found[1]
    assert with_layer[0] == without[0], "the model's loss, by the replayed routes"
    assert with_layer[1] == [*without[1], False] == [True, True, True, False]
    assert with_layer[2] == [{False}, {False}, {False}, {True}], "in every pass, also recomputed"


@pytest.mark.parametrize("sizes", [full({}), {"pp": 2}])
def test_bfloat16_with_the_distributed_optimizer(sizes: dict[str, int], root: Path, tmp_path: Path) -> None:
    folder, expected = reference("deepseek_v3", root, True)
    changes = {"precision": "bfloat16", "distributed_data_parallel_config__use_distributed_optimizer": True}
    policy = policy_of(folder, 2, is_detached=True, **layout(**sizes), **changes)
    ranks = run_ranks(train, 2, policy, str(folder), "")
    reported = np.sum([found["mtp_1_loss"] for found in ranks], axis=0)
    assert reported == pytest.approx(expected["mtp_1_loss"], rel=0.02)


def test_random_weights_have_such_layers_too(tmp_path: Path) -> None:
    write_with_mtp_layers("deepseek_v3", tmp_path / "model")
    policy = policy_of(tmp_path / "model", 1, is_detached=True)
    (first,) = run_ranks(random_weights, 1, policy, str(tmp_path / "model"))
    (second,) = run_ranks(random_weights, 1, policy, str(tmp_path / "model"))
    assert first == second
    assert len(first) > 10


def gradients_of_sources(policy: PolicyConfig, folder: str) -> dict[str, float]:
    """What the routers' gradients from each source are reported to be."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=1)
        forget_recorded_losses()
        result = trainer.train([shard_of_rank(tiny_batch(100, trainer.hf_config.vocab_size))], sft_loss)
        return {name: value for name, value in result.moe_metrics.items() if name.startswith("router_gradient/")}


@pytest.mark.full
def test_routers_gradients_by_source(tmp_path: Path) -> None:
    """A loss that trains the model counts as the algorithm's, and not as one of the routers'."""
    folder = tmp_path / "model"
    write_with_mtp_layers("qwen3_next", folder)
    found = {}
    cases = {"without": {"mtp_num_layers": None}, "joint with less weight": {"mtp_loss_scaling_factor": 0.1 * WEIGHT}}
    for name in ("without", "detached", "joint", "joint with less weight"):
        more = {"moe_aux_loss_coeff": 0.05, "router_gradients__every_n_steps": 1, **cases.get(name, {})}
        policy = policy_of(folder, 1, is_detached=name in ("without", "detached"), **more)
        (found[name],) = run_ranks(gradients_of_sources, 1, policy, str(folder))
    of_policy, of_loss = "router_gradient/norm_policy", "router_gradient/norm_aux"
    assert found["detached"][of_policy] == found["without"][of_policy]
    assert found["detached"][of_loss] == found["without"][of_loss]
    assert found["joint"][of_policy] != pytest.approx(found["joint with less weight"][of_policy], rel=0.01)
    # The router of the MTP layer has a loss too, whose gradient reaches the decoder's routers.
    assert found["joint"][of_loss] == pytest.approx(found["joint with less weight"][of_loss], rel=1e-5)
    checked = {name for name in found["without"] if name.startswith("router_gradient/error_")}
    assert checked <= found["detached"].keys()
    assert not checked & found["joint"].keys()


def random_weights(policy: PolicyConfig, folder: str) -> dict[str, float]:
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, plain_config(load_hf_config(folder)), None, num_steps=1)
        (chunk,) = trainer.chunks
        found = {name: float(tensor.float().std()) for name, tensor in chunk.mtp.named_parameters()}
        assert all(0.0 <= value < 1.0 for value in found.values())
        return found
