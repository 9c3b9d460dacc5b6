# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM as a generation engine: one or more engines in Ray actors, each with a copy of the model."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from jaxtyping import Float

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.shared_gpu import OwnGpu, SharedGpu
from nemo_rl_moe.errors import GenerationError, ReceiverLostError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.generation.refit import ActorReceivers, refit
from nemo_rl_moe.generation.vllm.actors import EngineActor, EngineActors
from nemo_rl_moe.generation.vllm.adapter_rules import delivered_adapters
from nemo_rl_moe.generation.vllm.adapters import AdapterSettings
from nemo_rl_moe.generation.vllm.config import KEY, captures_routes, section_of
from nemo_rl_moe.generation.vllm.images import ImageSettings, image_runs
from nemo_rl_moe.generation.vllm.placement import Placement
from nemo_rl_moe.generation.vllm.record import number_format
from nemo_rl_moe.generation.vllm.serving import Serving
from nemo_rl_moe.generation.vllm.worker import VllmSettings
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.linear_targets import adapted_modules
from nemo_rl_moe.weight_sync.transport import WeightTransport
from nemo_rl_moe.weight_sync.watch import watched

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig
    from nemo_rl_moe.generation.registry import EngineSetup

PARTS = ("weights", "kv_cache")
"""Parts of an engine's memory that are freed while it sleeps, by vLLM's names."""


class VllmEngine(GenerationEngine):
    """One or more vLLM engines, which take requests as they come.

    An engine that dies, or makes no step for `stall_timeout_s`, is given up. Its unanswered requests go to the others,
    and the next refit starts a replacement. If no engine is left, all are restarted at once with the policy's current
    weights.

    Args:
        gpu: The GPUs that the engines share with the trainer; None: they share none.
    """

    can_score = True

    def __init__(
        self,
        settings: VllmSettings,
        *,
        num_engines: int,
        start_timeout_s: float,
        stall_timeout_s: float,
        placement: Placement,
        refit: Callable[["VllmEngine"], object],
        warn: Callable[[str], None],
        gpu: SharedGpu | None = None,
    ):
        self._gpu = gpu or OwnGpu()
        self.number_format = settings.dtype
        self._ranks_per_engine = settings.tensor_parallel_size
        # Each of several ranks holds only shards, which have no fingerprints, and computes parts of outputs. NCCL
        # need not sum these parts in a fixed order.
        self.repeats_bits = self.gives_fingerprints = self.gives_module_outputs = self._ranks_per_engine == 1
        self._settings, self._placement = settings, placement
        self._refit, self._warn = refit, warn
        self._version: int | None = None
        self._actors = EngineActors(
            settings,
            num_engines,
            start_timeout_s=start_timeout_s,
            stall_timeout_s=stall_timeout_s,
            placement=placement,
            warn=warn,
        )
        self._serving = Serving(self._actors, self._prepare)
        self._gpu.start_engine()
        self._actors.start_missing()

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Return the continuation of one sequence. Engines without weights first get the policy's."""
        # Checked here, because an engine that gets an invalid request would count as failed.
        if self._settings.image_settings is not None:
            image_runs(self._settings.image_settings, request.token_ids, request.model_inputs)
        elif request.model_inputs:
            raise ValueError("this engine takes only token ids, but the request has further model inputs")
        return await self._serving.generate(request)

    async def pause(self) -> None:
        await self._serving.come_to_rest()

    def _prepare(self) -> int:
        """Give the engines weights if needed; return the version of the weights."""
        if self._version is None or not self._actors.present:
            if threading.current_thread() is not threading.main_thread():
                raise GenerationError("no vLLM engine is left, and new ones cannot get weights while training runs")
            self._refit(self)
        self._require_awake()
        self._gpu.generate()
        assert self._version is not None  # a refit that fails raises
        return self._version

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> list[list[Float[np.ndarray, " tokens"]]]:
        self._serving.drain()
        num_before = len(self._actors.present)
        self.wake()
        self._require_awake()
        self._gpu.generate()
        if (num_lost := num_before - len(self._actors.present)) > 0:
            raise GenerationError(f"{num_lost} of {num_before} engines were lost before they scored")
        return self._answers_of_all("scored", lambda handle: handle.score.remote(sequences, temperature, *model_inputs))

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        return self._answers_of_all("read its weights", lambda handle: handle.weight_fingerprints.remote(number_format))

    def _answers_of_all(self, doing: str, question: Callable[[Any], Any]) -> list[Any]:
        answers, lost = self._actors.ask(question)
        if lost is not None:
            raise GenerationError(f"{lost} while it {doing}")
        return [answer for _, answer in answers]

    def process_ids(self) -> list[int]:
        return list(ray.get([actor.handle.process_id.remote() for actor in self._actors.present]))

    def num_steps(self) -> int:
        """Return the total number of engine steps so far. Allowed while engines generate."""
        return sum(ray.get([actor.ask_num_steps() for actor in self._actors.present]))

    def module_outputs(self, copy: int, token_ids: Sequence[int]) -> dict[str, Float[np.ndarray, "tokens features"]]:
        call = self._actors.present[copy].handle.module_outputs.remote(token_ids)
        return dict(ray.get(call, timeout=self._actors.stall_timeout_s))

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Replace missing engines, then receive on all ranks of all engines while the trainer sends.

        Raises:
            ReceiverLostError: An engine died or froze. All engines have been ended, and the next transfer starts new
                ones.
            WeightSyncError: Not every tensor arrived everywhere, for another reason.
        """
        hold_weights, self._version = self._version is not None, None
        self._serving.drain()
        actors = self._actors
        num_started = actors.num_started
        actors.give_up_the_dead()
        if not actors.present:
            self._gpu.end_engine()
        if len(actors.present) < actors.number:
            self._gpu.start_engine("when an engine is replaced")
        self._gpu.receive_weights()
        self._wake("weights")
        actors.start_missing()
        ranks = self._ranks_per_engine
        spec = transport.open(
            ranks * len(actors.present),
            version,
            receivers=f"{id(self)}-{actors.num_started}",
            hold_weights=hold_weights and actors.num_started == num_started,
        )
        by_name = {actor.name: actor for actor in actors.present}
        receivers = ActorReceivers(
            {actor.handle.receive.remote(spec, n * ranks): name for n, (name, actor) in enumerate(by_name.items())},
            ask=lambda name: by_name[name].ask_num_steps(),
            end=lambda name: by_name[name].end(),
            patience_s=actors.stall_timeout_s,
        )
        try:
            with watched(transport, receivers):
                transport.send()
                receivers.wait()
        except BaseException as error:
            if isinstance(error, ReceiverLostError):
                self._warn(f"{error}; all engines are started anew")
            # vLLM would count the tensors of an interrupted reload as part of the next one.
            self.shutdown()
            raise
        self._version = version

    def sleep(self) -> None:
        """Free the memory of GPUs shared with the trainer, including the weights, which must be sent again."""
        self._serving.drain()
        if not (self._settings.on_gpus and self._placement.is_shared):
            return
        present = self._actors.present
        for part in PARTS:  # vLLM's `sleep` does nothing on an engine whose weights already sleep
            self._wake(part, [actor for actor in present if actor.asleep != set(PARTS)])
        awake = [actor for actor in self._actors.present if not actor.asleep]
        for actor, _ in self._actors.ask(lambda handle: handle.sleep.remote(), awake)[0]:
            actor.asleep = set(PARTS)
        self._version = None
        self._gpu.sleep_engine()

    def wake(self) -> None:
        """Allocate the key-value cache again. The memory of the weights is allocated when they arrive."""
        self._gpu.wake_cache()
        self._wake("kv_cache")

    def _wake(self, part: str, actors: Sequence[EngineActor] | None = None) -> None:
        """Allocate a part, such as the key-value cache, again in the engines (default: all) that have freed it."""
        asleep = [actor for actor in (self._actors.present if actors is None else actors) if part in actor.asleep]
        for actor, _ in self._actors.ask(lambda handle: handle.wake.remote(part), asleep)[0]:
            actor.asleep.remove(part)

    def _require_awake(self) -> None:
        """Raise if an engine sleeps, even partly, because it would take requests and never answer them."""
        for actor, parts in self._actors.ask(lambda handle: handle.asleep.remote())[0]:
            if parts:
                raise GenerationError(
                    f"{actor.name} cannot generate: still asleep: {', '.join(parts)}; call wake() before requests, and"
                    " send new weights after sleep()"
                )

    def shutdown(self) -> None:
        self._actors.end_all()
        self._gpu.end_engine()


def make_vllm_engine(setup: "EngineSetup") -> VllmEngine:
    config = setup.config
    generation, cluster = config.policy.generation, config.cluster
    chosen = section_of(config)
    on_gpus = cluster.gpus_per_node > 0
    gpus_per_engine = chosen.tensor_parallel_size if on_gpus else 0
    placement = Placement(setup.own_cluster or setup.cluster, gpus_per_engine, is_shared=setup.own_cluster is None)
    policy = setup.policy
    if chosen.prefix_caching == "keep":
        setup.warn(
            f"{KEY}.prefix_caching: keep: after an update, responses continue with keys and values of older weights."
            " The versions of tokens do not show this, and mismatch metrics include its effect"
        )
    return VllmEngine(
        VllmSettings(
            model_files=policy.model_files,
            decodes_text=generation.stop_strings is not None,
            dtype=number_format(config.policy),
            max_tokens=config.policy.max_total_sequence_length,
            max_sequences=generation.max_batch_size,
            seed=config.grpo.seed,
            on_gpus=on_gpus,
            tensor_parallel_size=chosen.tensor_parallel_size,
            expert_parallel=chosen.expert_parallel,
            gpu_memory_utilization=chosen.gpu_memory_utilization,
            cpu_cache_gib=chosen.cpu_cache_gib,
            num_threads=chosen.cpu_threads,
            prefix_caching=chosen.prefix_caching,
            captures_routes=captures_routes(config),
            image_settings=image_settings(setup.hf_config),
            adapters=adapter_settings(config.policy, setup.hf_config),
        ),
        num_engines=chosen.num_engines or placement.num_engines,
        start_timeout_s=chosen.start_timeout_s,
        stall_timeout_s=chosen.stall_timeout_s,
        placement=placement,
        refit=lambda engine: refit(engine, policy),
        warn=setup.warn,
        gpu=policy.gpu,
    )


def adapter_settings(policy: "GeneratingPolicyConfig", hf_config: Any) -> AdapterSettings | None:
    """Return the settings of adapters that engines apply, or None if engines get merged weights."""
    lora = delivered_adapters(policy)
    return None if lora is None else AdapterSettings(lora, tuple(sorted({*adapted_modules(lora, hf_config).values()})))


def image_settings(hf_config: Any) -> ImageSettings | None:
    """Return the image settings of a model, by its flattened configuration; None for a text model."""
    if getattr(hf_config, "vision_config", None) is None:
        return None
    vision = family_of(hf_config).vision
    assert vision is not None  # it has a tower
    return ImageSettings(
        hf_config.model_type,
        hf_config.architectures[0],
        hf_config.pixel_rule,
        hf_config.image_token_id,
        vision.pixels_per_token(hf_config),
    )
