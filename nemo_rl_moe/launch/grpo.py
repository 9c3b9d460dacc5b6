# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of GRPO: prepares prompts, environments and generation, then runs the loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.algorithms.capture_writer import CaptureWriter
from nemo_rl_moe.algorithms.custom_estimator import check_estimator
from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo
from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.lag_metrics import LagMetrics
from nemo_rl_moe.algorithms.losses.custom_objective import check_objective
from nemo_rl_moe.algorithms.position_metrics import PositionMetrics
from nemo_rl_moe.algorithms.role_models import NO_ROLES, RoleModels
from nemo_rl_moe.algorithms.routing_measurements import RoutingMeasurements
from nemo_rl_moe.algorithms.run_observers import CaptureVolume, RoutingAnomalyWatch, RunObserver, checked_refits
from nemo_rl_moe.algorithms.step_recorder import StepRecorder, num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.environments.rewards import ExactConfig
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import GenerationConfig, rollouts_in_float32
from nemo_rl_moe.config.schema_mixture import THE_ONLY_ONE, environment_key
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.data.mixture import MixtureLoader
from nemo_rl_moe.data.prompts import Prompt, PromptDataset, PromptLoader
from nemo_rl_moe.data.speech import STOPS_KEY, Speech
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationEngine, SamplingParameters
from nemo_rl_moe.generation.registry import EngineSetup, make_engine
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.environments import (
    check_environments,
    prepare_environments,
    start_environment,
    wait_for_environments,
)
from nemo_rl_moe.launch.prompts import read_held_out_prompts, read_training_prompts
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.launch.reward_model import prepare_reward_model, start_reward_model
from nemo_rl_moe.launch.rollouts import RolloutPlan, plan_rollouts, running_source, runs_ahead, state_at
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.loops import CallersLoop, LoopThread
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutSource
from nemo_rl_moe.rollouts.supervisor import RolloutReports
from nemo_rl_moe.runs.folder.artifacts import TIME_LINE
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER, existing_capture
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


_SAMPLED = "drawn"
"""Stands for the path of sampled prompts in fingerprints. Must not change, since checkpoints of older releases have
it."""


@dataclass(frozen=True)
class PreparedRollouts:
    """The parts of rollouts that are checked before any worker starts: prompts, environments, engine, sampling.

    Attributes:
        environments: Name -> function that starts the environment's driver. Without a mixture, the only name is ''.
        training: Name of an environment -> its prompts to train on.
        held_out: The prompts to validate with. Empty: no validation.
        reward_model: Model that scores trajectories in addition to the environment. None: no reward model.
    """

    model: PreparedModel
    environments: Mapping[str, StartDriver]
    sampling: SamplingParameters
    training: Mapping[str, PromptDataset]
    held_out: Sequence[Prompt]
    reward_model: PreparedModel | None = None

    def loader(self, config: GRPOMasterConfig) -> PromptRounds:
        """Return the loader of the training prompts, which yields the prompts of each step."""
        size, seed, shuffle = config.grpo.num_prompts_per_step, config.grpo.seed, config.data.shuffle
        if not config.env.mixture:
            return PromptLoader(self.training[THE_ONLY_ONE], size, seed, shuffle)
        weights = {name: each.weight for name, each in config.env.mixture.items()}
        return MixtureLoader(self.training, weights, size, seed, shuffle=shuffle)

    def fingerprints(self, config: GRPOMasterConfig) -> dict[str, str]:
        """Return the fingerprint of the training prompts, under the name by which a resumed run compares it."""
        paths = dict.fromkeys(config.data.of(name).train.path or _SAMPLED for name in self.training)
        all_prompts = chain.from_iterable(self.training.values())
        return {TRAINING_DATA: samples_fingerprint(", ".join(paths), _token_ids_and_images(all_prompts))}


class PreparedRoles:
    """Models other than the policy. They are checked before any worker starts. This base class has no models."""

    def start(self, policy: "MegatronPolicy") -> tuple[RoleModels, Sequence[RunObserver]]:
        """Start the models. Return the models as a step uses them, and their observers."""
        return NO_ROLES, ()

    def own_source(self, runner: RolloutRunner, loader: PromptRounds, batches_taken: int) -> RolloutSource | None:
        """Return the source of given responses, or None if the policy samples the responses. The source continues after
        `batches_taken` rounds of prompts."""
        return None


def run_grpo(
    config: GRPOMasterConfig,
    run: TrainingRun,
    prepare_roles: Callable[[PreparedRollouts], PreparedRoles] = lambda prepared: PreparedRoles(),
) -> None:
    """Run GRPO from start to end. `prepare_roles` checks models other than the policy before any worker starts."""
    plan = plan_rollouts(config)  # first, to report problems of a schedule before models and data are read
    prepared = prepare_rollouts(config, run)
    roles = prepare_roles(prepared)
    loader = prepared.loader(config)
    # The environments of a mixture have no common epoch.
    num_prompts = None if config.env.mixture else sum(map(len, prepared.training.values()))
    run.begin(num_training_steps(config.grpo, len(loader)), prepared.fingerprints(config), num_prompts)
    if run.is_complete:
        return
    plan.check(config, loader, run.remaining_steps.start)
    policy = run.start_policy()
    models, observers_of_roles = roles.start(policy)
    run.restore()  # before engines share the GPUs
    runner = start_rollouts(config, run, policy, prepared)
    recorder = run.open()
    failures = failure_rule(config)
    source = roles.own_source(runner, loader, recorder.state.batches_taken)
    if source is None:
        source = start_source(config, run, plan, runner, prepared, recorder)
    held_out = prepared.held_out
    validate = Validator(config.grpo, runner, held_out, prepared.sampling, failures) if held_out else None
    rollouts = Rollouts(runner.engine, source, validate, pad_token_id(prepared.model.tokenizer))
    observers = [
        *make_run_observers(config, policy, runner.engine, prepared.model, run),
        LagMetrics(recorder.record_artifact),
        PositionMetrics(),
        *observers_of_roles,
    ]
    summary = train_grpo(config, policy, rollouts, recorder, observers, models)
    run.end(summary)
    if summary.stopped_for is None and summary.num_steps < run.num_steps:
        what = "prompts of all epochs" if plan.schedule is None else "steps of the schedule"
        run.console.warn(f"the {what} were used up after {summary.num_steps} of {run.num_steps} steps")


def start_source(
    config: GRPOMasterConfig,
    run: TrainingRun,
    plan: RolloutPlan,
    runner: RolloutRunner,
    prepared: PreparedRollouts,
    recorder: StepRecorder,
) -> RolloutSource:
    """Start the source of a run's trajectories for the rest of the run, and return it."""
    loader, sampling = prepared.loader(config), prepared.sampling
    resume = run.saved.resume
    folder, with_optimizer = (None, True) if resume is None else (resume.folder, resume.state.with_optimizer)
    state = state_at(config, recorder.state, folder, loader, with_optimizer=with_optimizer)
    warn, message = run.console.warn, run.console.message
    record = partial(recorder.record_artifact, TIME_LINE.name)
    return run.use(running_source(config, plan, runner, loader, sampling, run.folder, state, warn, message, record))


def prepare_rollouts(config: GRPOMasterConfig, run: ModelRun) -> PreparedRollouts:
    """Check environments, engine and model, and read the prompts, without starting workers. Return all of these."""
    check_environments(config)  # first, to report problems before a worker starts
    check_estimator(config)
    check_objective(config.loss_fn)
    engine = config.policy.generation.engine
    engine.check_installation(config)
    model = run.prepare_model()
    engine.check_model(config, model.hf_config)
    sampling = replace(
        sampling_parameters(config.policy.generation, model.speech, model.hf_config.vocab_size),
        returns_kept_tokens=config.loss_fn.sampling_mask == "replay",
    )
    announce_named_stops(config.policy.generation, model.tokenizer, run.console)
    for line in scored_thinking(config, model.speech):
        run.console.warn(line)
    environments = prepare_environments(config, model.tokenizer, sampling)
    reward_model = prepare_reward_model(config, run, model)
    tokenizer, console, image_rule = model.tokenizer, run.console, model.image_rule
    training = read_training_prompts(config, tokenizer, console, image_rule=image_rule)
    held_out = read_held_out_prompts(config, tokenizer, console, training, image_rule=image_rule)
    return PreparedRollouts(model, environments, sampling, training, held_out, reward_model)


def start_engine(
    config: GRPOMasterConfig, run: ModelRun, policy: "MegatronPolicy", model: PreparedModel
) -> GenerationEngine:
    """Start the generation engine for the rest of the run, and return it. An engine that keeps a copy has no weights
    yet.

    An engine needs its full share of a GPU to start, so the policy frees memory before. The engine then sleeps until it
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
    """Return the observers of the steps, in the order in which they are called."""
    megatron = config.policy.megatron_cfg
    replays = megatron.routing_replay != "none" or megatron.indexer_replay != "none"
    watches = [RoutingAnomalyWatch()] if replays and megatron.routing_replay_on_anomaly == "stop" else []
    check = make_refit_check(config, policy, engine, model.hf_config, run.console)
    measurements = make_routing_measurements(config, policy, engine, run)
    further = [] if measurements is None else [measurements]
    return [CaptureVolume(), *watches, *checked_refits(check, engine), *further]


def make_routing_measurements(
    config: GRPOMasterConfig, policy: "MegatronPolicy", engine: GenerationEngine, run: TrainingRun
) -> RoutingMeasurements | None:
    """Return the routing measurements, or None if the routers' choices are not captured."""
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
) -> RolloutRunner:
    """Start the workers of rewards, tools and reward model, and the generation engine, for the rest of the run. Return
    the runner that uses them."""
    tokenizer = prepared.model.tokenizer
    notices = Notices(run.console.message, run.console.warn)
    environments = {
        name: start_environment(DriverSetup(config, tokenizer, prepared.sampling, name), run, each, notices)
        for name, each in prepared.environments.items()
    }
    reward_model = start_reward_model(config, run, prepared.reward_model)
    engine = start_engine(config, run, policy, prepared.model)
    wait_for_environments(environments, run.console)
    runner = RolloutRunner(
        engine,
        environments,
        tokenizer.decode,
        partial(tokenizer.encode, add_special_tokens=False),
        config.policy.max_total_sequence_length,
        LoopThread() if runs_ahead(config) else CallersLoop(),
        reports=RolloutReports(run.stop_reason, notices.message, notices.warn),
        add_rewards=None if reward_model is None else reward_model.add_rewards,
    )
    return run.use(closing(runner))


def announce_named_stops(generation: GenerationConfig, tokenizer: Any, console: ConsoleLogger) -> None:
    """Show the stop tokens of the configuration if they replace the model's stop tokens."""
    if (named := generation.stop_token_ids) is not None:
        shown = ", ".join(f"{tokenizer.decode([token])!r} {token}" for token in named)
        console.message(f"{STOPS_KEY}: {shown or 'none: the length ends a response'}, in place of the model's")


def scored_thinking(config: GRPOMasterConfig, speech: Speech) -> Iterator[str]:
    """Yield a warning for each environment that compares full responses, including the model's thinking, with an
    answer."""
    if speech.thinking is None:
        return
    mark = speech.thinking.before_answer
    for name, env in config.env.environments.items():
        if isinstance(env.reward, ExactConfig) and env.reward.answer_after is None:
            key = f"{environment_key(name)}.reward"
            yield (
                f"{key}.answer_after: null, and the chat template knows thinking: {key}.kind exact compares whole"
                f" responses with the answer; {key}.answer_after={mark} compares only the text after it"
            )


def sampling_parameters(generation: GenerationConfig, speech: Speech, vocabulary_size: int) -> SamplingParameters:
    """Return the sampling parameters for training. The stop tokens come from `speech` if the configuration has none."""
    stop_token_ids: Sequence[int] | None = generation.stop_token_ids
    if stop_token_ids is None:
        stop_token_ids = speech.stop_token_ids
        if not stop_token_ids:
            raise ConfigurationError(
                f"{STOPS_KEY}: null means the end tokens that the tokenizer, generation_config.json and config.json"
                " name; these files name none; expected a list of token ids ([]: only the length ends a response)"
            )
    if never_sampled := [token for token in stop_token_ids if token >= vocabulary_size]:
        whose = "null, the model's end token " if generation.stop_token_ids is None else ""
        raise ConfigurationError(
            f"{STOPS_KEY}: got {whose}{', '.join(map(str, never_sampled))}, expected ids from 0 to"
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


def _token_ids_and_images(prompts: Iterable[Prompt]) -> Iterator[Any]:
    """Yield the token ids of each prompt, followed by digests of its images."""
    for prompt in prompts:
        digests = prompt.images.digests() if prompt.images is not None else ()
        yield (*prompt.token_ids, *b"".join(digests))


@contextmanager
def running_engine(setup: EngineSetup, console: ConsoleLogger) -> Iterator[GenerationEngine]:
    """Run the generation engine within this context, and yield it."""
    with console.phase(f"starting the generation engine ({setup.config.policy.generation.backend})"):
        engine = make_engine(setup)
    try:
        yield engine
    finally:
        engine.shutdown()
