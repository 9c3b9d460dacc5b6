# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of GRPO: prompts, environment, generation, then the loop."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.algorithms.capture_writer import CaptureWriter
from nemo_rl_moe.algorithms.custom_estimator import check_estimator
from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo
from nemo_rl_moe.algorithms.grpo_batch import failure_rule, make_source
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.lag_metrics import LagMetrics
from nemo_rl_moe.algorithms.losses.custom_objective import check_objective
from nemo_rl_moe.algorithms.routing_measurements import RoutingMeasurements
from nemo_rl_moe.algorithms.run_observers import CaptureVolume, RoutingAnomalyWatch, RunObserver, checked_refits
from nemo_rl_moe.algorithms.step_recorder import StepRecorder, num_training_steps
from nemo_rl_moe.checkpoints.changes import MODEL, TRAINING_DATA, model_fingerprint, samples_fingerprint
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import GenerationConfig, PromptSourceConfig, rollouts_in_float32
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.data.prompts import Prompt, PromptDataset, PromptLoader, load_prompts, without_training_prompts
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationEngine, SamplingParameters
from nemo_rl_moe.generation.registry import EngineSetup, make_engine
from nemo_rl_moe.launch.asynchronous import RolloutPlan, plan_rollouts, running_source, state_at
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel, images_of_data
from nemo_rl_moe.launch.tools import (
    PreparedTools,
    continuation_of,
    data_with_tools,
    prepare_tools,
    running_tool_workers,
)
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.image_rules import ImageRule
from nemo_rl_moe.rewards.registry import make_reward_function
from nemo_rl_moe.rewards.worker_pool import RewardWorkers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.limits import RolloutLimits
from nemo_rl_moe.rollouts.rollout_function import make_environment
from nemo_rl_moe.rollouts.source import RolloutSource
from nemo_rl_moe.rollouts.worker import RolloutWorker
from nemo_rl_moe.runs.folder.artifacts import TIME_LINE
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER, existing_capture
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


_SAMPLED = "drawn"
"""Name of sampled prompts in the fingerprints of checkpoints, those of older releases too."""


@dataclass(frozen=True)
class PreparedRollouts:
    """Parts that rollouts are made from: prompts, environment, engine, sampling; checked before anything is started.

    Attributes:
        environment: Drives trajectories where there are no tools.
        tools: Tools that the model may call; None: none.
        sampling: How training responses are sampled.
        held_out: The prompts to validate with; empty: no validation.
    """

    model: PreparedModel
    environment: Environment
    tools: PreparedTools | None
    sampling: SamplingParameters
    training: PromptDataset
    held_out: Sequence[Prompt]

    def loader(self, config: GRPOMasterConfig) -> PromptLoader:
        """Return the prompts to train on in the order of the steps.

        Raises:
            DataError: They do not fill one step.
        """
        return PromptLoader(self.training, config.grpo.num_prompts_per_step, config.grpo.seed, config.data.shuffle)

    def fingerprints(self, config: GRPOMasterConfig) -> dict[str, str]:
        """Return the fingerprints of the inputs: the prompts, and the model where it is the reference."""
        prompts = samples_fingerprint(config.data.train.path or _SAMPLED, _token_ids_and_images(self.training))
        if not algorithm_of(config).needs_reference(config):
            return {TRAINING_DATA: prompts}
        return {TRAINING_DATA: prompts, MODEL: model_fingerprint(config.policy.model_name)}


def run_grpo(config: GRPOMasterConfig, run: TrainingRun) -> None:
    """Run GRPO from start to end.

    Raises:
        UserError: The model, the tokenizer, the environment or the prompts cannot be used.
        WorkerDiedError: A worker failed.
    """
    prepared, plan = prepare_rollouts(config, run), plan_rollouts(config)
    loader = prepared.loader(config)
    run.begin(num_training_steps(config.grpo, len(loader)), prepared.fingerprints(config))
    if run.is_complete:
        return
    policy = run.start_policy()
    run.restore()  # before engines share its GPUs
    worker = start_rollouts(config, run, policy, prepared)
    recorder = run.open()
    failures = failure_rule(config)
    source = start_source(config, run, plan, worker, prepared, recorder)
    held_out = prepared.held_out
    validate = Validator(config.grpo, worker, held_out, prepared.sampling, failures) if held_out else None
    rollouts = Rollouts(worker.engine, source, validate, pad_token_id(prepared.model.tokenizer))
    observers = [
        *make_run_observers(config, policy, worker.engine, prepared.model, run),
        LagMetrics(recorder.record_artifact),
    ]
    summary = train_grpo(config, policy, rollouts, recorder, observers)
    run.end(summary)
    if summary.stopped_for is None and summary.num_steps < run.num_steps:
        run.console.warn(f"the prompts of all epochs were used up after {summary.num_steps} of {run.num_steps} steps")


def start_source(
    config: GRPOMasterConfig,
    run: TrainingRun,
    plan: RolloutPlan | None,
    worker: RolloutWorker,
    prepared: PreparedRollouts,
    recorder: StepRecorder,
) -> RolloutSource:
    """Return the source of a run's trajectories; an asynchronous one runs for the rest of the run."""
    loader, sampling = prepared.loader(config), prepared.sampling
    if plan is None:
        return make_source(config, worker, loader, sampling)
    resume = run.saved.resume
    state = state_at(config, recorder.state, None if resume is None else resume.folder, loader)
    warn, message = run.console.warn, run.console.message
    record = partial(recorder.record_artifact, TIME_LINE.name)
    return run.use(running_source(config, plan, worker, loader, sampling, run.folder, state, warn, message, record))


def prepare_rollouts(config: GRPOMasterConfig, run: ModelRun) -> PreparedRollouts:
    """Check environment, engine and model, and read the prompts; start nothing.

    Raises:
        UserError: The model, the tokenizer, the environment or the prompts cannot be used.
    """
    make_reward_function(config.env)  # so that what is wrong with it is reported before a worker starts
    check_estimator(config)
    check_objective(config.loss_fn)
    environment = make_environment(config.env)
    engine = config.policy.generation.engine
    engine.check_installation(config)
    model = run.prepare_model()
    engine.check_model(config, model.hf_config)
    sampling = sampling_parameters(config.policy.generation, model.tokenizer, model.hf_config.vocab_size)
    tools = prepare_tools(config, model.tokenizer, sampling.stop_token_ids)
    training = read_prompts(config, config.data.train, model.tokenizer, run.console, image_rule=model.image_rule)
    held_out: Sequence[Prompt] = ()
    if config.data.validation is not None:
        is_overfitting = is_same_file(config.data.train, config.data.validation)
        if is_overfitting:
            run.console.message("validating with the training prompts: data.validation.path is data.train.path")
        left_out = () if is_overfitting else training
        held_out = read_prompts(
            config, config.data.validation, model.tokenizer, run.console, left_out, image_rule=model.image_rule
        )
    return PreparedRollouts(model, environment, tools, sampling, training, held_out)


def start_engine(
    config: GRPOMasterConfig, run: ModelRun, policy: "MegatronPolicy", model: PreparedModel
) -> GenerationEngine:
    """Start the generation engine for the rest of the run; one that keeps a copy of the weights has none yet.

    The policy makes room before, as an engine wants its whole share of a GPU when it starts; then it sleeps until it
    gets weights.
    """
    policy.prepare_for_generation(PhaseClock())
    own_cluster = run.start_places(GENERATION_ROLE) if GENERATION_ROLE in config.cluster.roles else None
    setup = EngineSetup(
        config, run.cluster, model.source, model.hf_config, model.tokenizer, policy, run.console.warn, own_cluster
    )
    engine = run.use(running_engine(setup, run.console))
    engine.sleep()
    return engine


def make_run_observers(
    config: GRPOMasterConfig, policy: "MegatronPolicy", engine: GenerationEngine, model: PreparedModel, run: TrainingRun
) -> list[RunObserver]:
    """Return the observers that a configuration asks for, in the order in which they see a step."""
    megatron = config.policy.megatron_cfg
    stops = megatron.routing_replay != "none" and megatron.routing_replay_on_anomaly == "stop"
    check = make_refit_check(config, policy, engine, model.hf_config, run.console)
    measurements = make_routing_measurements(config, policy, engine, run)
    further = [] if measurements is None else [measurements]
    return [CaptureVolume(), RoutingAnomalyWatch(stops=stops), *checked_refits(check, engine), *further]


def make_routing_measurements(
    config: GRPOMasterConfig, policy: "MegatronPolicy", engine: GenerationEngine, run: TrainingRun
) -> RoutingMeasurements | None:
    """Return the measurements that a configuration asks for; None without a capture, which says what routers choose."""
    megatron, moe = config.policy.megatron_cfg, policy.moe_configuration
    has_capture = megatron.capture_routing or megatron.routing_replay != "none"
    if not has_capture or not moe or moe.get("moe_router_fusion"):
        return None
    measured = megatron.routing_measurements
    return RoutingMeasurements(
        measured,
        config.loss_fn,
        policy,
        engine,
        temperature=config.policy.generation.temperature,
        max_tokens=config.policy.max_total_sequence_length,
        seed=config.grpo.seed,
        updates_per_step=config.updates_per_step,
        replays=megatron.routing_replay == "rollout",
        has_reference=algorithm_of(config).needs_reference(config),
        capture=CaptureWriter(
            existing_capture(run.folder) or run.folder / CAPTURE_FOLDER,
            moe,
            run.console.warn,
            fetch_objects,
            is_exact=rollouts_in_float32(config.policy) and config.grpo.rollouts.most_lag == 0,
        )
        if measured.save_capture
        else None,
    )


def start_rollouts(
    config: GRPOMasterConfig, run: ModelRun, policy: "MegatronPolicy", prepared: PreparedRollouts
) -> RolloutWorker:
    """Start the workers of rewards and tools, and the generation engine, for the rest of the run."""
    reward_function = run.use(running_reward_workers(config, run.console))
    tokenizer = prepared.model.tokenizer
    notices = Notices(run.console.message, run.console.warn)
    environment = prepared.environment
    if prepared.tools is not None:
        workers = run.use(running_tool_workers(config.env, run.console))
        environment = prepared.tools.environment(config.env, workers, notices.warn)
    return RolloutWorker(
        start_engine(config, run, policy, prepared.model),
        reward_function,
        environment,
        tokenizer.decode,
        partial(tokenizer.encode, add_special_tokens=False),
        config.policy.max_total_sequence_length,
        FaultWatch(
            config.grpo.max_consecutive_failed_steps,
            score_truncated=config.env.score_truncated,
            on_failure=config.env.on_failure,
            warn=run.console.warn,
        ).observe,
        config.env.reward_weights,
        RolloutLimits(config.env.rollout_timeout_s, config.env.rollout, run.stop_reason, notices.message, notices.warn),
        num_attempts=2 if config.env.on_failure == "retry" else 1,
        continuation=continuation_of(config, tokenizer),
    )


def sampling_parameters(generation: GenerationConfig, tokenizer: Any, vocabulary_size: int) -> SamplingParameters:
    """Return the sampling parameters of training responses.

    Args:
        tokenizer: Has the end token that ends responses where the user names none.
        vocabulary_size: Token ids that the model can draw are below this.

    Raises:
        ConfigurationError: Nothing would end a response, or a token that is to end it can never be sampled.
    """
    stop_token_ids = generation.stop_token_ids
    if stop_token_ids is None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(
                "policy.generation.stop_token_ids: null means the tokenizer's end token; it has none, so name token ids"
            )
        stop_token_ids = [tokenizer.eos_token_id]
    elif not stop_token_ids and not generation.stop_strings:
        raise ConfigurationError(
            "policy.generation.stop_token_ids: got [], and policy.generation.stop_strings has none either, so that"
            " nothing would end a response; expected token ids, or null for the tokenizer's end token"
        )
    if never_sampled := [token for token in stop_token_ids if token >= vocabulary_size]:
        whose = "null, the tokenizer's end token " if generation.stop_token_ids is None else ""
        raise ConfigurationError(
            f"policy.generation.stop_token_ids: got {whose}{', '.join(map(str, never_sampled))}, expected ids from 0 to"
            f" {vocabulary_size - 1}: the model has {vocabulary_size} tokens"
        )
    return SamplingParameters(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def read_prompts(
    config: GRPOMasterConfig,
    source: PromptSourceConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    training: Iterable[Prompt] = (),
    *,
    image_rule: ImageRule | None,
    is_scored: bool = True,
) -> PromptDataset:
    """Read or sample one set of prompts, without the training prompts; tokenise it, and say what was left out.

    Args:
        image_rule: Rule by which the model takes images; None: it takes text alone.
        is_scored: False: prompts need no answer, and repeated ones stay.

    Raises:
        DataError: A file is missing, a line cannot be used, or no prompt is left.
    """
    longest = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    what = f"reading {source.path}" if source.path else f"sampling {source.num_items} prompts"
    with console.phase(what), load_limit(config.data.load_timeout_s, source.path or "sampled prompts"):
        images = images_of_data(config.data, source.path, tokenizer, image_rule)
        prompts = load_prompts(
            source, data_with_tools(config), tokenizer, longest, config.env if is_scored else None, images
        )
        prompts = without_training_prompts(prompts, training)
    console.message(prompts.report.summary())
    return prompts


def is_same_file(training: PromptSourceConfig, validation: PromptSourceConfig) -> bool:
    """Return True where validation names the training prompts themselves, to see whether a run learns them by heart.

    Otherwise held-out prompts that are training prompts too are an accident, and are left out.
    """
    path = training.path
    if path is None or path != validation.path:
        return False
    return path.endswith(".jsonl") or training.split == validation.split


def _token_ids_and_images(prompts: Iterable[Prompt]) -> Iterator[Any]:
    """Yield the token ids of each prompt, and behind them digests of its images."""
    for prompt in prompts:
        digests = prompt.images.digests() if prompt.images is not None else ()
        yield (*prompt.token_ids, *b"".join(digests))


@contextmanager
def running_reward_workers(config: GRPOMasterConfig, console: ConsoleLogger) -> Iterator[RewardWorkers]:
    """Start the reward workers, and stop them whatever happens."""
    with console.phase(f"starting the reward workers ({config.env.name})"):
        reward_function = RewardWorkers(config.env)
    try:
        yield reward_function
    finally:
        reward_function.shutdown()


@contextmanager
def running_engine(setup: EngineSetup, console: ConsoleLogger) -> Iterator[GenerationEngine]:
    """Start the generation engine, and stop it whatever happens."""
    with console.phase(f"starting the generation engine ({setup.config.policy.generation.backend})"):
        engine = make_engine(setup)
    try:
        yield engine
    finally:
        engine.shutdown()
