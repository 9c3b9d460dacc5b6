# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with images: the trainer's log-probs, tokens and routes, and refits of tower and projector."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from nemo_rl_moe.distributed.batch import ModelInput, TokenBatch
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.refit_check import RefitCheck, probe_sequences
from nemo_rl_moe.generation.vllm.engine import VllmEngine, image_settings
from nemo_rl_moe.launch.refit import batch_of, image_probe
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.images import IMAGE_SIZES, sequence_inputs
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import grpo_runs, sft_runs, vision_runs
from tests.support.vision_models import VOCABULARY, mixed_batch, transformers_inputs, write_vision_model
from tests.support.vllm_engines import SentWeights, as_they_are, generated, start_engine, vllm_tests

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
# Heads of 32, the smallest that vLLM's attention on CPUs takes, and experts of a width that it does not pad.
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "internvl": {"head_dim": 32, "rope_parameters": _ROPE},
    "qwen2_5_vl": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4]},
    },
    "qwen3_vl": {
        "head_dim": 32,
        "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
    },
    "qwen3_vl_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
    },
}


class VisionTrainer:
    """Weights that move, their scores of sequences with images, and their way into engines.

    Args:
        model_type: One of `DECODERS`.
        folder: Gets the model.
    """

    def __init__(self, model_type: str, folder: Path):
        self.model_type, self.folder = model_type, folder
        write_vision_model(model_type, folder, **DECODERS[model_type])
        self.hf_config = load_hf_config(str(folder))
        self.tensors = load_file(folder / "model.safetensors")
        self.version = 0
        self._load()
        batch = mixed_batch(model_type)
        self.batch = batch
        self.sequences = [batch.input_ids[row, : int(batch.lengths[row])].tolist() for row in range(len(batch))]
        self.inputs = sequence_inputs(batch, range(len(batch)))

    @property
    def model_files(self) -> dict[str, bytes]:
        """The folder without weights."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.suffix == ".json"}

    def change(self, part: str) -> None:
        """An update of the tensors whose names hold a text: each changes visibly."""
        chosen = [name for name in self.tensors if part in name]
        assert chosen, part
        generator = torch.Generator().manual_seed(self.version)
        for name in chosen:
            tensor = self.tensors[name]
            self.tensors[name] = tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        self.version += 1
        self._load()

    def refit(self, engine: VllmEngine, change: Change = as_they_are, *, altered: bool = False) -> None:
        """Send the weights as a change leaves them."""
        refit(engine, SentWeights(change(dict(self.tensors)), self.version), altered=altered)

    def scores(self, batch: TokenBatch) -> list[Any]:
        """Return the log-probs of the tokens of sequences, all but the first of each."""
        with torch.no_grad():
            logprobs = self.model(**transformers_inputs(self.model_type, batch)).logits.log_softmax(-1)
        found = logprobs[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return [row[: length - 1].numpy() for row, length in zip(found, batch.lengths.tolist(), strict=True)]

    def check_of(self, engine: VllmEngine) -> RefitCheck:
        """Check that a run makes of its refits."""
        of_text = probe_sequences(4, 24, VOCABULARY)
        probes = [image_probe(sequence, self.hf_config, 95, n) for n, sequence in enumerate(of_text)]
        sequences, inputs = [ids for ids, _ in probes], [each for _, each in probes]

        def start_scores(sequences: Sequence[Sequence[int]]) -> Callable[[], list[Any]]:
            found = self.scores(batch_of(sequences, inputs))
            return lambda: found

        return RefitCheck(
            sequences,
            1.0,
            start_scores,
            lambda altered: self.refit(engine, altered=altered),
            lambda copy: "",
            in_float32=True,
            bound_nats=None,
            refits_again=False,
            model_inputs=inputs,
        )

    def gap(self, engine: VllmEngine) -> float:
        """Return the largest difference of a log-prob from an engine's."""
        (found,) = engine.score(self.sequences, 1.0, *self.inputs)
        return max(float(np.abs(a - b).max()) for a, b in zip(found, self.scores(self.batch), strict=True))

    def greedy(self, row: int, num_tokens: int) -> tuple[list[int], Any]:
        """Return the tokens ranked first behind a sequence up to an image token, and the experts of all tokens that
        were fed.
        """
        chosen: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda module, args, output: chosen.append(output))
            for name, module in self.model.named_modules()
            if name.endswith("mlp.gate")
        ]
        batch = self.batch.select([row])
        length = int(batch.lengths[0])
        inputs = transformers_inputs(self.model_type, batch)
        inputs = {
            name: value[:, :length] if value.ndim == 2 and name.endswith(("ids", "mask")) else value
            for name, value in inputs.items()
        }
        tokens: list[int] = []
        with torch.no_grad():
            for _ in range(num_tokens):
                chosen.clear()
                logits = self.model(**inputs).logits[0, -1]
                tokens.append(int(logits.argmax()))
                if tokens[-1] == self.hf_config.image_token_id:  # which transformers takes for an image's
                    break
                added = {"input_ids": tokens[-1], "attention_mask": 1, "mm_token_type_ids": 0}
                for name, value in added.items():
                    if name in inputs:
                        inputs[name] = torch.cat([inputs[name], torch.tensor([[value]])], 1)
        for hook in hooks:
            hook.remove()
        routes = [output[-1] if isinstance(output, tuple) else output.topk(2).indices for output in chosen]
        return tokens, torch.stack(routes, 1).numpy() if routes else None

    def _load(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        self.model: Any = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()


def engine_changes(trainer: VisionTrainer) -> dict[str, Any]:
    """Return the settings of an engine of its model, for `start_engine`."""
    return {"image_settings": image_settings(trainer.hf_config), "model_files": trainer.model_files}


def with_images(sequences: Sequence[Mapping[str, ModelInput]]) -> list[int]:
    """Return the rows that have images."""
    return [row for row, inputs in enumerate(sequences) if len(inputs[IMAGE_SIZES].values)]


pytestmark = vllm_tests()
TOLERANCE = 5e-6
GREEDY = SamplingParameters(max_new_tokens=8, temperature=0.0)
PARTS = {
    "internvl": ("vision_tower.", "multi_modal_projector.", "mlp.experts"),
    "qwen2_5_vl": ("visual.blocks.", "visual.merger.", "mlp.down_proj"),
    "qwen3_vl": ("visual.blocks.", "merger", "mlp.down_proj"),
    "qwen3_vl_moe": ("visual.blocks.", "merger", "mlp.experts"),
}


# One family: each other one starts another engine, and is in the slow list.
FAMILIES = [name if name == "qwen3_vl_moe" else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]


@pytest.fixture(scope="module", params=FAMILIES)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTrainer:
    return VisionTrainer(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def engine(vllm_cluster: RayCluster, trainer: VisionTrainer) -> Iterator[VllmEngine]:
    has_experts = trainer.model_type in ("internvl", "qwen3_vl_moe")
    engine = start_engine(vllm_cluster, trainer, captures_routes=has_experts, **engine_changes(trainer))
    yield engine
    engine.shutdown()


def asked(trainer: VisionTrainer, sampling: SamplingParameters = GREEDY) -> list[GenerationRequest]:
    return [
        GenerationRequest(tuple(tokens), index, sampling, inputs)
        for index, (tokens, inputs) in enumerate(zip(trainer.sequences, trainer.inputs, strict=True))
    ]


def test_a_refit_of_tower_projector_and_decoder_arrives(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    assert trainer.gap(engine) < TOLERANCE
    for part in PARTS[trainer.model_type]:
        before = dict(trainer.tensors)
        trainer.change(part)
        trainer.refit(engine, lambda tensors, before=before: before)
        with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
            trainer.check_of(engine).after_refit(engine)
        # The same images as before: what an engine has kept of them is another tower's.
        trainer.refit(engine)
        assert trainer.check_of(engine).after_refit(engine).largest < TOLERANCE
        assert trainer.gap(engine) < TOLERANCE, part


def test_greedy_tokens_and_routes_are_those_of_transformers(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    requests = asked(trainer)
    assert {0, 1, 2} <= {len(inputs["image_sizes"].values) for inputs in trainer.inputs}
    for row, (request, sequence) in enumerate(zip(requests, generated(engine, requests), strict=True)):
        tokens, routes = trainer.greedy(row, GREEDY.max_new_tokens)
        assert sequence.token_ids[: len(tokens)].tolist() == tokens
        if routes is None:
            assert sequence.routed_experts is None
            continue
        assert sequence.routed_experts is not None
        (piece,) = sequence.routed_experts.pieces
        found = ray.get(piece.source)[piece.first : piece.first + piece.num_rows]
        assert len(routes) == len(request.token_ids) + len(tokens) - 1
        np.testing.assert_array_equal(np.sort(found[: len(routes)], -1), np.sort(routes, -1))


def test_many_images_in_one_step_are_answered_as_if_alone(engine: VllmEngine, trainer: VisionTrainer) -> None:
    # More tokens, and more of images, than a step takes: no prompt may be cut in two.
    trainer.refit(engine)
    rows = with_images(trainer.inputs)
    requests = [asked(trainer, SamplingParameters(max_new_tokens=4))[row] for row in rows * 20]
    requests = [GenerationRequest(r.token_ids, seed, r.sampling, r.model_inputs) for seed, r in enumerate(requests)]
    engines = engine.process_ids()
    together = generated(engine, requests)
    assert engine.process_ids() == engines, "none has failed"
    for index in (0, 41, 97):
        (alone,) = generated(engine, [requests[index]])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()


def test_text_alone_goes_on_beside_images(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    prompt = GenerationRequest((3, 4, 5), 1, GREEDY)
    (sequence,) = generated(engine, [prompt])
    assert len(sequence.token_ids) == GREEDY.max_new_tokens


APPLIED: dict[str, Any] = {
    "policy__lora": {
        "rank": 4,
        "alpha": 8.0,
        "use_rslora": False,
        "targets": ["all-linear"],
        "dropout": 0.0,
        "experts": "none",
        "init": "kaiming",
        "path": None,
    },
    "policy__generation__lora_refit": "adapter",
    "policy__megatron_cfg__optimizer__lr": 0.01,
}
"""Adapters that the engine applies to the decoder."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny_internvl_moe", {}),
        ("tiny_internvl_moe", APPLIED),
        ("tiny_qwen3_vl_moe", {"policy__freeze__vision_tower": True}),
        ("tiny_qwen3_vl_moe", APPLIED),
    ],
)
def test_a_run_draws_from_the_weights_that_it_trains(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    shapes = vision_runs.make_shapes(tmp_path / "shapes")
    overrides = grpo_runs.settings(
        tmp_path,
        shapes,
        policy__megatron_cfg__routing_replay="rollout",
        policy__generation__backend="vllm",
        **changes,
        **vision_runs.grpo_changes(shapes)
        | {"policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets" / name},
        **sft_runs.only_jsonl(),
    )
    command = grpo_runs.command(overrides, vision_runs.GRPO_EXEMPLAR)
    sft_runs.run_command(command, tmp_path)
    records = read_metrics(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    steps = [record.metrics for record in records if "train/refit/logprob_gap" in record.metrics]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["train/refit/logprob_gap"] < 2e-5
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
        assert metrics["train/moe/routing/agreement"] > 0.999
        assert metrics["train/moe/routing/rows_missing_share"] == 0.0
        assert metrics["train/moe/image/token_share"] > 0.5
