# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What `make test-gpu` checks in one process on one GPU. Each returns its numbers; `Failed` carries them too.

`rehearse` shrinks the sizes and takes the CPUs instead: the same lines run, so that none runs first on a GPU.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, make_shard
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from tests.gpu.process import job_of_one

SLICE: Mapping[str, Any] = {
    "num_hidden_layers": 4,  # of 48; the rest is the published model's
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
"""Four layers of Qwen3-30B-A3B."""
_SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
}

# NVIDIA's data sheets: dense bfloat16 products of a card, floating-point operations a second.
_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
TRACKING_GOAL = 1.005
"""Seconds of a step with MoE metrics over those without."""
MEMORY_TOLERANCE = 0.05
"""Share by which what is held may differ from what `plan` says."""


class Failed(AssertionError):
    """A check that did not hold, with what was measured."""

    def __init__(self, why: str, numbers: Mapping[str, Any]):
        super().__init__(why)
        self.numbers = dict(numbers)


def slice_config(*, rehearse: bool, num_layers: int | None = None) -> Any:
    """The slice's Hugging Face configuration."""
    from transformers import Qwen3MoeConfig

    fields = {**SLICE, **(_SMALL if rehearse else {})}
    return Qwen3MoeConfig(**fields | ({} if num_layers is None else {"num_hidden_layers": num_layers}))


def run_config(*, rehearse: bool, **changes: Any) -> SFTMasterConfig:
    """One rank's configuration with the settings of sft.yaml: bfloat16, distributed optimizer, logits in chunks.

    Args:
        rehearse: On CPUs, in float32.
        changes: Keys of `policy`; two underscores for a dot.
    """
    length = 32 if rehearse else 4096
    values: dict[str, Any] = {
        "policy.init": "random",
        "policy.train_global_batch_size": 4,
        "policy.train_micro_batch_size": 1,
        "policy.max_total_sequence_length": length,
        "policy.precision": "float32" if rehearse else "bfloat16",
        "policy.sequence_packing.enabled": "false",
        "policy.megatron_cfg.expert_model_parallel_size": 1,
        "cluster.num_nodes": 1,
        "cluster.gpus_per_node": 0 if rehearse else 1,
        "cluster.cpu_workers_per_node": 1,
        **{f"policy.{name.replace('__', '.')}": value for name, value in changes.items()},
    }
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    return load_config("examples/configs/sft.yaml", overrides, check_paths=False)


def random_shard(config: SFTMasterConfig, vocabulary: int, seed: int) -> GlobalBatchShard:
    """A global batch of full sequences of random tokens."""
    size, length = config.policy.train_global_batch_size, config.policy.max_total_sequence_length
    generator = torch.Generator().manual_seed(seed)
    batch = TokenBatch(
        input_ids=torch.randint(1, vocabulary, (size, length), generator=generator),
        lengths=torch.full((size,), length),
        token_mask=torch.ones(size, length, dtype=torch.bool),
        sample_ids=tuple(f"random:{index}" for index in range(size)),
    )
    rows = config.policy.train_micro_batch_size
    return make_shard(batch, [range(first, first + rows) for first in range(0, size, rows)], batch)


def synchronize() -> None:
    """Waits for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_step(trainer: Any, shard: GlobalBatchShard) -> tuple[float, Any]:
    """Seconds of one optimizer step, and its result."""
    synchronize()
    began = time.perf_counter()
    result = trainer.train([shard], sft_loss)
    synchronize()
    return time.perf_counter() - began, result


def families(*, rehearse: bool, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """One optimizer step of a tiny model of every family, on Transformer Engine's modules; all failures are
    reported."""
    from tests.support.family_models import FAMILY_MODELS
    from tests.support.tiny_model import forget_recorded_losses, shard_of_rank, tiny_batch

    engine = None if rehearse else _engine_release()
    losses: dict[str, float] = {}
    errors: dict[str, str] = {}
    config = run_config(rehearse=rehearse, train_global_batch_size=8, train_micro_batch_size=2)
    with job_of_one(config.policy):
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        for name in names or FAMILY_MODELS:
            try:
                hf_config = FAMILY_MODELS[name].hf_config()
                trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=2)
                # A token beyond the vocabulary would end the GPU's context, and with it all families behind this one.
                batch = tiny_batch(1, vocabulary_size=hf_config.vocab_size)
                losses[name] = trainer.train([shard_of_rank(batch)], sft_loss).global_loss
                if not 2.0 < losses[name] < 7.0:  # log(64) = 4.2 of random weights
                    errors[name] = f"its loss is {losses[name]}"
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"[:200]
            finally:
                forget_recorded_losses()  # its size is the first model's number of layers
    numbers = {"transformer_engine": engine, "losses": losses, "errors": errors}
    if errors:
        raise Failed(f"{len(errors)} of {len(errors.keys() | losses.keys())} families: {', '.join(errors)}", numbers)
    return numbers


def _engine_release() -> str:
    import transformer_engine
    import transformer_engine.pytorch  # what a wrong build fails in

    return str(transformer_engine.__version__)


def slice_step(*, rehearse: bool, num_steps: int = 5) -> dict[str, Any]:
    """Steps of the slice: tokens a second, the share of the card's peak, and memory against `plan`'s arithmetic."""
    config, hf_config = run_config(rehearse=rehearse), slice_config(rehearse=rehearse)
    with job_of_one(config.policy):
        from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters, worker_memory
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=100)
        steps = [timed_step(trainer, random_shard(config, hf_config.vocab_size, seed)) for seed in range(num_steps + 2)]
        planned = worker_memory(config, trainer.config, hf_config, 0)
        parameters = whole_model_parameters(trainer.config, hf_config)
        on_gpu = torch.cuda.is_available()
        held = torch.cuda.memory_allocated() if on_gpu else None
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
    seconds = statistics.median(each for each, _ in steps[2:])
    tokens = config.policy.train_global_batch_size * config.policy.max_total_sequence_length
    flops = flops_of_a_token(hf_config, parameters, config.policy.max_total_sequence_length)
    card = torch.cuda.get_device_name() if on_gpu else ""
    best = next((value for name, value in _PEAKS.items() if name in card), None)
    numbers = {
        "card": card,
        "parameters": parameters,
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "mfu": None if best is None else round(tokens * flops / seconds / best, 4),
        "losses": [result.global_loss for _, result in steps],
        "held_bytes": held,
        "planned_held_bytes": planned.always,
        "peak_bytes": peak,
        "planned_peak_bytes_at_least": planned.peak_at_least,
    }
    if not all(torch.isfinite(torch.tensor(numbers["losses"]))):
        raise Failed("a loss is not finite", numbers)
    if held is not None and peak is not None:
        wrong = memory_problem(held, planned.always, peak, planned.peak_at_least)
        if wrong:
            raise Failed(wrong, numbers)
    return numbers


def memory_problem(held: int, planned: int, peak: int, planned_peak: int) -> str | None:
    """Return what `plan` says wrongly: what is held all the time, or a lower bound that is none."""
    if abs(held / planned - 1) > MEMORY_TOLERANCE:
        return f"plan says that {planned / 1e9:.1f} GB are held all the time, and {held / 1e9:.1f} GB are"
    if peak < planned_peak * (1 - MEMORY_TOLERANCE):
        return f"plan says a peak of {planned_peak / 1e9:.1f} GB at least, and it was {peak / 1e9:.1f} GB"
    return None


def flops_of_a_token(hf_config: Any, parameters: int, length: int) -> float:
    """Floating-point operations of training on a token: six a weight that it passes, and those of causal attention.

    The embedding is looked up and not multiplied; of the routed experts, a token passes some. A query meets half of the
    keys in the mean, in two products of two operations, once forward and twice backward: 6 a layer, head width and key.
    """
    layers, hidden = hf_config.num_hidden_layers, hf_config.hidden_size
    idle = hf_config.num_experts - hf_config.num_experts_per_tok
    passed = parameters - hf_config.vocab_size * hidden - layers * idle * 3 * hidden * hf_config.moe_intermediate_size
    return float(6 * passed + 6 * layers * hf_config.num_attention_heads * hf_config.head_dim * length)


def decode_auto(*, rehearse: bool) -> dict[str, Any]:
    """Decoding with the attention that Transformer Engine chooses."""
    return _decode("auto", rehearse=rehearse)


def decode_flash(*, rehearse: bool) -> dict[str, Any]:
    """Decoding with flash-attn, which plans nothing for each length."""
    return _decode("flash", rehearse=rehearse)


def _decode(backend: str, *, rehearse: bool) -> dict[str, Any]:
    num_tokens, prompt, rows = (6, 4, 2) if rehearse else (200, 128, 32)
    # What the environment says of attention is fixed once in a process: each backend has its own.
    override = {} if rehearse else {"megatron_cfg__model_overrides": f"{{attention_backend: {backend}}}"}
    config, hf_config = run_config(rehearse=rehearse, **override), slice_config(rehearse=rehearse)
    with job_of_one(config.policy):
        from nemo_rl_moe.models.megatron.generation import MegatronGenerator
        from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel

        model = MegatronModel(config.policy, hf_config, None)
        engine = MegatronGenerator(model.chunks, model.config, None, model.device)
        for chunk in model.modules:
            chunk.eval()
        tokens = torch.randint(1, hf_config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
        seconds = []
        # Twice: plans that are kept between the two show as the difference.
        for _ in range(2):
            request = GenerationBatch(
                tuple(tuple(row) for row in tokens.tolist()), tuple(range(rows)), SamplingParameters(num_tokens)
            )
            synchronize()
            began = time.perf_counter()
            made = engine.generate(request, weight_version=0, max_batch_size=None)
            synchronize()
            seconds.append(time.perf_counter() - began)
    numbers = {
        "attention_backend": backend,
        "first_seconds_per_token": round(seconds[0] / num_tokens, 5),
        "second_seconds_per_token": round(seconds[1] / num_tokens, 5),
        "tokens_per_second": round(rows * num_tokens / seconds[1], 1),
    }
    if any(len(sequence.token_ids) != num_tokens for sequence in made):
        raise Failed(f"a response has fewer than {num_tokens} tokens", numbers)
    return numbers


def save_and_resume(*, rehearse: bool) -> dict[str, Any]:
    """A checkpoint read back: the weights to the last bit, and a step behind it that equals the run that went on."""
    config, hf_config = run_config(rehearse=rehearse), slice_config(rehearse=True)
    shards = [random_shard(config, hf_config.vocab_size, seed) for seed in range(3)]
    with job_of_one(config.policy), tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        first, second = (MegatronTrainer(config.policy, hf_config, None, num_steps=10) for _ in range(2))
        for shard in shards[:2]:
            first.train([shard], sft_loss)
        began = time.perf_counter()
        first.start_checkpoint(Path(folder), with_optimizer=True)
        problem = first.finish_checkpoint()
        saved = time.perf_counter()
        if problem is not None:
            raise Failed(problem, {})
        second.train([shards[2]], sft_loss)  # moments and weights that must leave no trace
        loading = time.perf_counter()
        second.load_checkpoint(Path(folder), with_optimizer=True)
        loaded = time.perf_counter()
        differing = sum(
            not torch.equal(left, right)
            for a, b in zip(first.chunks, second.chunks, strict=True)
            for left, right in zip(a.parameters(), b.parameters(), strict=True)
        )
        on, resumed = (trainer.train([shards[2]], sft_loss) for trainer in (first, second))
    gap = abs(on.global_loss - resumed.global_loss) / on.global_loss
    norm_gap = abs(on.grad_norm - resumed.grad_norm) / on.grad_norm
    numbers = {
        "differing_tensors": differing,
        "loss_gap": gap,
        "grad_norm_gap": norm_gap,
        "save_seconds": round(saved - began, 3),
        "load_seconds": round(loaded - loading, 3),
    }
    if differing:
        raise Failed(f"{differing} tensors are not what was saved", numbers)
    # Sums on a GPU are not taken in one order.
    if gap > 1e-3 or norm_gap > 2e-2:
        raise Failed("the step behind the checkpoint differs from that of the run that went on", numbers)
    return numbers


def refusal_without_engine(*, rehearse: bool) -> dict[str, Any]:
    """A GPU without Transformer Engine: refused in one line, before a model is built."""
    message = None
    with _hidden("transformer_engine"):
        from nemo_rl_moe.models.megatron.cpu import cpu_backend
        from nemo_rl_moe.models.megatron.model.transformer_config import require_transformer_engine

        was_active, cpu_backend.ACTIVE = cpu_backend.ACTIVE, cpu_backend.ACTIVE and not rehearse
        try:
            require_transformer_engine()
        except ConfigurationError as error:
            message = str(error)
        finally:
            cpu_backend.ACTIVE = was_active
    if message is None or "needs Transformer Engine" not in message:
        raise Failed("training on a GPU without Transformer Engine is not refused", {"message": message})
    return {"message": message}


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """A frame in which a package cannot be imported."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *kept]))  # type: ignore[arg-type]  # None: not to be found
    try:
        yield
    finally:
        sys.modules.pop(package)
        sys.modules.update(kept)


def tracking_cost(*, rehearse: bool, num_pairs: int = 20) -> dict[str, Any]:
    """Seconds of a step with MoE metrics over those of one without, in turns on the same batches."""
    num_pairs = 2 if rehearse else num_pairs
    hf_config = slice_config(rehearse=rehearse, num_layers=2)
    configs = [
        run_config(rehearse=rehearse, megatron_cfg__track_moe_metrics=tracked, train_micro_batch_size=1)
        for tracked in (False, True)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    with job_of_one(configs[0].policy):
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainers = [MegatronTrainer(config.policy, hf_config, None, num_steps=100) for config in configs]
        num_metrics = []
        for number in range(-2, num_pairs):
            shard = random_shard(configs[0], hf_config.vocab_size, number + 2)
            results = {}
            for index in (0, 1) if number % 2 else (1, 0):
                taken, results[index] = timed_step(trainers[index], shard)
                if number >= 0:
                    seconds[index].append(taken)
            num_metrics = [len(results[index].moe_metrics) for index in (0, 1)]
    ratio = statistics.median(on / off for off, on in zip(*seconds, strict=True))
    numbers = {
        "on_to_off": round(ratio, 4),
        "goal": TRACKING_GOAL,
        "seconds_off": round(statistics.median(seconds[0]), 4),
        "seconds_on": round(statistics.median(seconds[1]), 4),
        "metrics": num_metrics,
    }
    if not num_metrics[1] > num_metrics[0]:
        raise Failed("the tracked steps have no more metrics than the others", numbers)
    if not rehearse and ratio > TRACKING_GOAL:
        raise Failed(f"tracking costs {ratio - 1:.2%} of a step, more than {TRACKING_GOAL - 1:.1%}", numbers)
    return numbers
