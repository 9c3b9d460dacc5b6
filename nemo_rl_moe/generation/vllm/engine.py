# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in Ray actors, each with a copy of the model: requests are dealt out, dead engines replaced."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from jaxtyping import Float
from ray.exceptions import RayError

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import GenerationError, ReceiverLostError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.generation.refit import ActorReceivers, reason_of, refit
from nemo_rl_moe.generation.vllm.config import section_of
from nemo_rl_moe.generation.vllm.images import PictureSettings, image_runs
from nemo_rl_moe.generation.vllm.placement import Placement
from nemo_rl_moe.generation.vllm.record import captures_routes, number_format
from nemo_rl_moe.generation.vllm.worker import VllmSettings, VllmWorker
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.weight_sync.transport import WeightTransport
from nemo_rl_moe.weight_sync.watch import watched

if TYPE_CHECKING:
    from nemo_rl_moe.generation.registry import EngineSetup

_PROGRESS = "progress"
PARTS = ("weights", "kv_cache")
"""Parts of an engine's memory that are given back while it sleeps, as vLLM names them."""
POLL_S = 2.0
"""Seconds between questions to engines from which nothing has come."""


@dataclass
class _Engine:
    """One actor, and what it is doing.

    Attributes:
        number: From 0.
        actor: Handle of the `VllmWorker`.
        results: Its stream of answers; None while it has nothing to do.
        progress: Its steps when it was last asked.
        since: When they last grew.
        asleep: Parts of its memory that are given back.
    """

    number: int
    actor: Any
    results: Any = None
    progress: int = -1
    since: float = 0.0
    asleep: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """As users read it."""
        return f"vLLM engine {self.number}"


class VllmEngine:
    """A `GenerationEngine` of one or more vLLM engines.

    An engine that dies, or makes no step for `stall_timeout_s`, is given up: those of its requests that are not
    answered go to the others, and another engine takes its place with the next weights. Where none is left, engines are
    started anew at once and get the weights that the policy has.

    Args:
        settings: Of each engine.
        num_engines: Engines, which share the requests.
        start_timeout_s: Seconds until they are to be ready.
        stall_timeout_s: Seconds without a step after which an engine that generates is given up.
        placement: Places of the engines.
        refit: Sends this engine the weights that the policy has now.
        warn: Tells the user of an engine that was given up.

    Attributes:
        dtype: Number format of the weights.
        ranks_per_engine: Processes that share the weights of an engine.

    Raises:
        GenerationError: An engine does not start.
    """

    shares_weights = False

    def __init__(
        self,
        settings: VllmSettings,
        *,
        num_engines: int,
        start_timeout_s: float,
        stall_timeout_s: float,
        placement: "Placement",
        refit: Callable[["VllmEngine"], object],
        warn: Callable[[str], None],
    ):
        self.dtype = settings.dtype
        self.ranks_per_engine = settings.tensor_parallel_size
        self._settings = settings
        self._num_engines = num_engines
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._placement = placement
        self._refit = refit
        self._warn = warn
        self._version: int | None = None
        self._engines: list[_Engine] = []
        self._num_started = 0
        self._start_missing()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        """Continuations as they finish; engines without weights get those that the policy has.

        Raises:
            GenerationError: Engines fail again and again, one of them sleeps, or pictures and image tokens of a request
                do not go together.
            ValueError: A request has inputs beside its tokens, and the model takes text alone.
        """
        self._check_inputs(requests)
        waiting = dict(enumerate(requests))
        lives = 2 * self._num_engines
        while waiting:
            if self._version is None or not self._engines:
                self._refit(self)
            num_before = len(self._engines)
            self._require_awake()
            if self._engines:  # all that did not answer are given up
                yield from self._answers(waiting)
            lives -= num_before - len(self._engines)
            if lives < 0:
                raise GenerationError("vLLM's engines fail again and again; the last reason is told above")

    def _check_inputs(self, requests: Sequence[GenerationRequest]) -> None:
        """Checks pictures here: what is wrong with a request is no fault of the engine that gets it."""
        pictures = self._settings.pictures
        for request in requests:
            if pictures is not None:
                image_runs(pictures, request.token_ids, request.model_inputs)
            elif request.model_inputs:
                raise ValueError("this engine takes tokens alone, and no further model inputs")

    def _answers(self, waiting: dict[int, GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        """Answers of the engines that are there; what is answered leaves `waiting`."""
        busy = self._deal_out(waiting)
        while busy:
            ready, _ = ray.wait([engine.results for engine in busy], num_returns=1, timeout=POLL_S)
            for engine in [each for each in busy if each.results in ready]:
                try:
                    answers = ray.get(next(engine.results))
                except StopIteration:
                    engine.results = None
                    busy.remove(engine)
                    continue
                except RayError as error:
                    busy.remove(engine)
                    self._give_up(engine, reason_of(error))
                    continue
                engine.since = time.monotonic()
                for number, sequence in answers:
                    del waiting[number]
                    yield number, sequence
            if not ready:
                for engine in self._stalled(busy):
                    busy.remove(engine)
                    self._give_up(engine, f"made no step for {self._stall_timeout_s:g} s")

    def _deal_out(self, waiting: Mapping[int, GenerationRequest]) -> list[_Engine]:
        """Gives each engine its share: neighbours are often answers to one prompt, and alike in length."""
        shares: list[dict[int, GenerationRequest]] = [{} for _ in self._engines]
        for place, (number, request) in enumerate(waiting.items()):
            shares[place % len(shares)][number] = request
        busy = []
        for engine, share in zip(self._engines, shares, strict=True):
            if share:
                engine.results = engine.actor.generate.options(num_returns="streaming").remote(share, self._version)
                engine.progress, engine.since = -1, time.monotonic()
                busy.append(engine)
        return busy

    def _stalled(self, busy: Sequence[_Engine]) -> list[_Engine]:
        """Engines that have made no step for too long; a frozen one does not even answer."""
        questions = {_question(engine): engine for engine in busy}
        answered, _ = ray.wait(list(questions), num_returns=len(questions), timeout=POLL_S)
        now = time.monotonic()
        for answer in answered:
            with suppress(RayError):  # a dead one is noticed by its results
                steps = ray.get(answer)
                engine = questions[answer]
                if steps != engine.progress:
                    engine.progress, engine.since = steps, now
        return [engine for engine in busy if now - engine.since > self._stall_timeout_s]

    def _give_up(self, engine: _Engine, reason: str) -> None:
        self._engines.remove(engine)
        _end(engine)
        left = len(self._engines)
        if engine.results is None:
            others = "another one takes its place"
        else:
            others = f"the other {left} take over what it had" if left else "engines are started anew"
        self._warn(f"{engine.name} {reason}; {others}")

    def _give_up_the_dead(self) -> None:
        """Gives up engines that have died, or do not answer, since they last generated."""
        questions = {_question(engine): engine for engine in self._engines}
        if not questions:
            return
        _, late = ray.wait(list(questions), num_returns=len(questions), timeout=self._stall_timeout_s)
        for question, engine in questions.items():
            try:
                if question not in late:
                    ray.get(question)
                    continue
                reason = f"has not answered for {self._stall_timeout_s:g} s"
            except RayError as error:
                reason = reason_of(error)
            self._give_up(engine, reason)

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> list[list[Float[np.ndarray, " tokens"]]]:
        """Log-probability of each token after the first, by each engine: `[engine][sequence]`.

        Args:
            sequences: Tokens.
            temperature: Divides the logits.
            model_inputs: Of each sequence, as of a `GenerationRequest`; none at all where all are text.

        Raises:
            GenerationError: An engine has no weights, or died, or does not answer; another one takes the place of such
                a one with the next weights.
        """
        num_before = len(self._engines)
        self._wake("kv_cache")
        self._require_awake()
        if len(self._engines) < num_before:
            raise GenerationError(
                f"{num_before - len(self._engines)} of {num_before} engines were lost before they scored"
            )
        scores: list[list[Float[np.ndarray, " tokens"]]] = self._answers_of_all(
            "scored", "score", sequences, temperature, *model_inputs
        )
        return scores

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        """Return the fingerprints of the weights that each engine stores; empty where several ranks share them.

        Raises:
            GenerationError: An engine died or does not answer; another one takes its place with the next weights.
        """
        if self.ranks_per_engine > 1:
            return [{} for _ in self._engines]
        found: list[dict[str, str]] = self._answers_of_all("read its weights", "weight_fingerprints", number_format)
        return found

    def _answers_of_all(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine at the same time; return what each answers.

        Raises:
            GenerationError: An engine died or does not answer while it is `doing`.
        """
        calls = [(engine, getattr(engine.actor, method).remote(*arguments)) for engine in self._engines]
        answers, problem = [], None
        for engine, call in calls:
            try:
                answers.append(ray.get(call, timeout=self._stall_timeout_s))
            except RayError as error:
                problem = f"{engine.name} {reason_of(error)} while it {doing}"
                self._give_up(engine, reason_of(error))
        if problem is not None:
            raise GenerationError(problem)
        return answers

    def process_ids(self) -> list[int]:
        """Processes of the engines that are there."""
        return list(ray.get([engine.actor.process_id.remote() for engine in self._engines]))

    def num_steps(self) -> int:
        """Steps that the engines have made, also while they generate."""
        return sum(ray.get([_question(engine) for engine in self._engines]))

    def module_outputs(self, copy: int, token_ids: Sequence[int]) -> dict[str, Float[np.ndarray, "tokens features"]]:
        """Output of every module of an engine for one sequence, by its name in the model; copy: as `score` counts."""
        call = self._engines[copy].actor.module_outputs.remote(token_ids)
        return dict(ray.get(call, timeout=self._stall_timeout_s))

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Has all ranks of all engines receive while the trainer sends; engines that were given up are replaced before.

        Raises:
            ReceiverLostError: An engine died or froze meanwhile. All of them have been ended; the next transfer starts
                new ones.
            WeightSyncError: Not every tensor arrived everywhere, for another reason.
            GenerationError: An engine does not start.
        """
        self._version = None
        self._give_up_the_dead()
        self._wake("weights")
        self._start_missing()
        ranks = self.ranks_per_engine
        spec = transport.open(ranks * len(self._engines), version, receivers=f"{id(self)}-{self._num_started}")
        by_name = {engine.name: engine for engine in self._engines}
        receivers = ActorReceivers(
            {engine.actor.receive.remote(spec, n * ranks): name for n, (name, engine) in enumerate(by_name.items())},
            ask=lambda name: _question(by_name[name]),
            end=lambda name: _end(by_name[name]),
            patience_s=self._stall_timeout_s,
        )
        try:
            with watched(transport, receivers):
                transport.send()
                receivers.wait()
        except BaseException as error:
            if isinstance(error, ReceiverLostError):
                self._warn(f"{error}; all engines are started anew")
            # What a reload that was broken off has kept, vLLM would count as part of the next one.
            self.shutdown()
            raise
        self._version = version

    def sleep(self) -> None:
        """Frees the GPUs that are the trainer's too, of the weights as well: the next ones are needed to generate."""
        if not (self._settings.on_gpus and self._placement.is_shared):
            return
        for part in PARTS:  # vLLM leaves an engine as it is whose weights sleep already
            self._wake(part, [engine for engine in self._engines if engine.asleep != set(PARTS)])
        for engine, _ in self._ask("sleep", [engine for engine in self._engines if not engine.asleep]):
            engine.asleep = set(PARTS)
        self._version = None

    def wake(self) -> None:
        """Takes the memory of the key-value cache again; that of the weights is taken when they come."""
        self._wake("kv_cache")

    def _wake(self, part: str, engines: Sequence[_Engine] | None = None) -> None:
        """Takes the memory of a part again, of all engines or of some, where it is given back."""
        asleep = [engine for engine in (self._engines if engines is None else engines) if part in engine.asleep]
        for engine, _ in self._ask("wake", asleep, part):
            engine.asleep.remove(part)

    def _require_awake(self) -> None:
        """Asks the engines themselves: one that sleeps in part would take requests and answer none of them.

        Raises:
            GenerationError: One sleeps.
        """
        for engine, parts in self._ask("asleep", self._engines):
            if parts:
                raise GenerationError(
                    f"{engine.name} cannot generate: asleep are {', '.join(parts)}; expected wake() and, after sleep(),"
                    " new weights before"
                )

    def _ask(self, method: str, engines: Sequence[_Engine], *arguments: Any) -> list[tuple[_Engine, Any]]:
        """Calls a method of engines; what each that answers returns. Those that die or do not answer are given up."""
        answers = []
        for engine, call in [(each, getattr(each.actor, method).remote(*arguments)) for each in engines]:
            try:
                answers.append((engine, ray.get(call, timeout=self._stall_timeout_s)))
            except RayError as error:
                self._give_up(engine, reason_of(error))
        return answers

    def shutdown(self) -> None:
        """Ends the actors; those that do not answer leave the model's files for the next one to remove."""
        if self._engines and ray.is_initialized():
            with suppress(RayError, ValueError):
                closing = [engine.actor.close.options(concurrency_group=_PROGRESS).remote() for engine in self._engines]
                ray.wait(closing, num_returns=len(closing), timeout=POLL_S)
        while self._engines:
            _end(self._engines.pop())

    def _start_missing(self) -> None:
        """Starts engines until all are there; new ones have no weights yet."""
        taken = {engine.number for engine in self._engines}
        missing = deque(sorted(set(range(self._num_engines)) - taken))
        if not missing:
            return
        # Questions about progress are answered while the engine's own thread generates.
        actor_class = ray.remote(concurrency_groups={_PROGRESS: 1})(VllmWorker)
        started = []
        for number in missing:
            options = self._placement.options(number)
            settings = replace(self._settings, gpus=self._placement.gpus(number))
            started.append(_Engine(number, actor_class.options(**options).remote(settings, list(sys.path))))
        self._engines += started
        self._num_started += len(started)
        self._engines.sort(key=lambda engine: engine.number)
        calls = {engine.actor.start.remote(): engine for engine in started}
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=self._start_timeout_s)
        problems = {calls[call].number: f"did not start within {self._start_timeout_s:g} s" for call in late}
        for call in ready:
            try:
                problem = ray.get(call)
            except RayError as error:
                problem = reason_of(error)
            if problem is not None:
                problems[calls[call].number] = problem
        if problems:
            self.shutdown()
            number, problem = min(problems.items())
            raise GenerationError(f"vLLM engine {number} of {self._num_engines} cannot start: {problem}")


def make_vllm_engine(setup: "EngineSetup") -> VllmEngine:
    """The engines of `backend: vllm`.

    Raises:
        GenerationError: An engine does not start.
    """
    config = setup.config
    generation, cluster = config.policy.generation, config.cluster
    chosen = section_of(config)
    on_gpus = cluster.gpus_per_node > 0
    gpus_per_engine = chosen.tensor_parallel_size if on_gpus else 0
    placement = Placement(setup.own_cluster or setup.cluster, gpus_per_engine, is_shared=setup.own_cluster is None)
    policy = setup.policy
    return VllmEngine(
        VllmSettings(
            model_files=policy.model_files,
            decodes_text=bool(generation.stop_strings),
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
            captures_routes=captures_routes(config),
            pictures=picture_settings(setup.hf_config),
        ),
        num_engines=chosen.num_engines or placement.num_engines,
        start_timeout_s=chosen.start_timeout_s,
        stall_timeout_s=chosen.stall_timeout_s,
        placement=placement,
        refit=lambda engine: refit(engine, policy),
        warn=setup.warn,
    )


def picture_settings(hf_config: Any) -> PictureSettings | None:
    """Pictures of a model, by its flattened configuration; None: it takes text alone."""
    if getattr(hf_config, "vision_config", None) is None:
        return None
    vision = family_of(hf_config).vision
    assert vision is not None  # it has a tower
    return PictureSettings(
        hf_config.model_type,
        hf_config.architectures[0],
        hf_config.pixel_rule,
        hf_config.image_token_id,
        vision.pixels_per_token(hf_config),
    )


def _end(engine: _Engine) -> None:
    with suppress(RayError, ValueError):
        ray.kill(engine.actor, no_restart=True)


def _question(engine: _Engine) -> Any:
    """Number of its steps: answered also while it generates or receives, unless it is frozen."""
    return engine.actor.num_steps.options(concurrency_group=_PROGRESS).remote()
