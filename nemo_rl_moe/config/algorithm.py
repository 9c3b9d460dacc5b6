# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of an algorithm, and the registry of algorithms with the built-in ones.

Commands, configuration, checkpoints, reports and memory plans read everything about an algorithm from its record. A
configuration names the record of a custom algorithm by `algorithm: my_module:ALGORITHM`. This module imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl_moe.config.checks_algorithms import DPO_RULES, GRPO_RULES
from nemo_rl_moe.config.checks_distillation import DISTILLATION_RULES
from nemo_rl_moe.config.checks_ppo import PPO_RULES, gae_has_a_critic
from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, MasterConfig, RMMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_policy import RoleModelConfig
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.config.schema_run import CRITIC_ROLE, GENERATION_ROLE, REWARD_MODEL_ROLE
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import described, import_attribute, with_colon
from nemo_rl_moe.errors import ConfigurationError

ALGORITHM_KEY = "algorithm"
"""Top-level key that names the algorithm of a configuration. Without it, the section of a built-in algorithm names
it."""
AUTO_METRIC = "auto"
"""Value of `checkpointing.metric_name` that leaves the choice to the algorithm."""
POSITION_IN_THE_DATA = "the checkpoint stores its position in the data as a number of batches of this size"
ORDER_OF_THE_DATA = "the checkpoint's position in the data only holds for the order that this value gives"


@dataclass(frozen=True)
class Algorithm:
    """Record of an algorithm. The functions in it take a checked instance of `config_class`.

    Attributes:
        name: Name in commands, checkpoints and reports, and of the algorithm's section of the configuration.
        summary: One line for `nemo-rl-moe --help`.
        config_class: Schema with the section `name`, and with `data`, which has `train` and `validation`.
        run: Function of the configuration and the `launch.training_run.TrainingRun`, or `package.module:function`,
            which is imported when a run starts. None: a built-in algorithm's function, from
            `launch.start.entry_point_of`.
        rules: Checks between settings, in addition to the common ones. Each yields one line for each problem.
        resume_keys: Keys that must not change on resume, each with the reason. `*` matches any name.
        loop: Section with `max_num_epochs`, `max_num_steps`, `val_period`, `val_at_start`, `val_at_end` and `seed`.
            Empty: the section `name`.
        sequences_per_sample: Number of sequences in one sample, the unit of batch sizes.
        updates_per_step: Optimizer steps of one step.
        steps_of_critic_alone: Number of first steps in which the policy does not train.
        needs_reference: Whether workers keep the initial weights.
        scores_sequences: Whether the policy is a sequence classifier with one label: it has a value head, and predicts
            no tokens.
        roles: Models other than the policy with separate workers, by role. `cluster.roles` assigns machines to them.
            `roles_of` adds the reward model of rollouts.
        optional_places: Role -> description, for roles other than those in `roles`, such as generation engines, that
            may get separate machines by an entry in `cluster.roles`. Otherwise they share the policy's machines.
        responses_at_a_time: Maximum number of responses that are generated at the same time. None: the algorithm
            generates nothing.
        rollouts_run_ahead: Whether `run` takes its trajectories from `launch.grpo.start_source` and notifies the source
            of each update of the weights. If not, `grpo.rollouts.mode: asynchronous` is refused.
        losses: Loss functions that `run` trains with. Each is called once on three tokens before anything starts, to
            report errors in its loss or metrics early. Errors in a loss that is not listed appear in the first step.
        best_metric: Metric of `checkpointing.metric_name: auto`, of which higher values are better.
        reference: `package.module:ATTRIBUTE` by which configurations name the algorithm, set when it is imported. None
            for a built-in algorithm.
    """

    name: str
    summary: str
    config_class: type[MasterConfig]
    run: str | Callable[[Any, Any], None] | None = None
    rules: tuple[Callable[[Any], Iterator[str]], ...] = ()
    resume_keys: Mapping[str, str] = field(default_factory=dict)
    loop: str = ""
    sequences_per_sample: int = 1
    updates_per_step: Callable[[Any], int] = lambda config: 1
    steps_of_critic_alone: Callable[[Any], int] = lambda config: 0
    needs_reference: Callable[[Any], bool] = lambda config: False
    scores_sequences: bool = False
    roles: Callable[[Any], Mapping[str, RoleModelConfig]] = lambda config: {}
    optional_places: Callable[[Any], Mapping[str, str]] = lambda config: {}
    responses_at_a_time: Callable[[Any], int] | None = None
    rollouts_run_ahead: bool = False
    losses: Callable[[Any], Sequence[Callable[[Any], object]]] = lambda config: ()
    best_metric: Callable[[Any], str] = lambda config: "val:accuracy"
    reference: str | None = None

    @property
    def generates(self) -> bool:
        """Whether the algorithm trains on responses that it generates."""
        return self.responses_at_a_time is not None

    @property
    def loop_name(self) -> str:
        """Name of the section with the run's length and validations."""
        return self.loop or self.name

    def num_updates(self, config: MasterConfig, num_steps: int) -> int:
        """Return the number of optimizer steps in `num_steps` steps, for a role that always trains."""
        return num_steps * self.updates_per_step(config)

    def num_policy_updates(self, config: MasterConfig, num_steps: int) -> int:
        """Return the number of optimizer steps of the policy in `num_steps` steps."""
        return self.num_updates(config, max(num_steps - self.steps_of_critic_alone(config), 0))

    def loop_of(self, config: MasterConfig) -> Any:
        """Return the section with the run's length and validations."""
        return getattr(config, self.loop_name)

    def entry_point(self) -> Callable[[Any, Any], None]:
        """Return the function that runs the algorithm. Import the function if `run` is its name."""
        if not isinstance(self.run, str):
            assert self.run is not None
            return self.run
        function: Callable[[Any, Any], None] = import_attribute(f"{self.name}: run", self.run)
        return function


def grpo_responses_at_a_time(config: GRPOMasterConfig) -> int:
    """Return the number of responses of a step, or of a validation if that number is known and larger."""
    validation = 0
    if config.data.validation is not None and config.grpo.max_val_samples is not None:
        validation = config.grpo.max_val_samples * config.grpo.val_num_generations
    return max(config.responses_per_step, validation)


def grpo_best_metric(config: GRPOMasterConfig) -> str:
    """Return `val:accuracy` if all rewards are right or wrong, and `val:reward` if rewards may be graded or custom."""
    is_binary = config.reward_model is None and all(map(_has_binary_reward, config.env.environments.values()))
    return "val:accuracy" if is_binary else "val:reward"


def _has_binary_reward(env: EnvironmentConfig) -> bool:
    is_graded = isinstance(env.reward, ReasoningGymConfig) and env.reward.partial_credit
    return env.needs_answers and not is_graded and env.driver.named is None


def places_of_engines(config: GRPOMasterConfig) -> Mapping[str, str]:
    """Return role -> description of the generation engines if they may have separate machines, because they keep a copy
    of the weights. Otherwise, return an empty mapping."""
    return {} if config.policy.generation.engine.shares_weights else {GENERATION_ROLE: "generation engines"}


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="sft",
            summary="supervised fine-tuning",
            config_class=SFTMasterConfig,
            resume_keys={"policy.train_global_batch_size": POSITION_IN_THE_DATA, "sft.seed": ORDER_OF_THE_DATA},
        ),
        Algorithm(
            name="dpo",
            summary="learning from pairs of a chosen and a rejected response (DPO, IPO, APO)",
            config_class=DPOMasterConfig,
            rules=DPO_RULES,
            resume_keys={"policy.train_global_batch_size": POSITION_IN_THE_DATA, "dpo.seed": ORDER_OF_THE_DATA},
            sequences_per_sample=2,
            needs_reference=lambda config: config.dpo.reference_logprobs == "in_step",
        ),
        Algorithm(
            name="rm",
            summary="a reward model from pairs of a chosen and a rejected response (Bradley-Terry)",
            config_class=RMMasterConfig,
            resume_keys={"policy.train_global_batch_size": POSITION_IN_THE_DATA, "rm.seed": ORDER_OF_THE_DATA},
            sequences_per_sample=2,
            scores_sequences=True,
        ),
        Algorithm(
            name="grpo",
            summary="reinforcement learning with verifiable rewards (GRPO, DAPO, GSPO, CISPO, REINFORCE++)",
            config_class=GRPOMasterConfig,
            rules=(*GRPO_RULES, gae_has_a_critic),
            resume_keys={
                "grpo.num_prompts_per_step": POSITION_IN_THE_DATA,
                "grpo.seed": ORDER_OF_THE_DATA,
                "env.mixture.*.weight": ORDER_OF_THE_DATA,
                "reward_model.model_name": "the rewards would be those of another model",
                "reward_model.adapter": "the rewards would be those of another adapter",
            },
            updates_per_step=lambda config: config.updates_per_step,
            needs_reference=lambda config: config.loss_fn.reference_policy_kl_penalty > 0,
            optional_places=places_of_engines,
            responses_at_a_time=grpo_responses_at_a_time,
            rollouts_run_ahead=True,
            best_metric=grpo_best_metric,
        ),
    )
}
"""Name -> algorithm, for the built-in algorithms and custom algorithms that configurations of this process have
named."""
ALGORITHMS["ppo"] = replace(
    ALGORITHMS["grpo"],
    name="ppo",
    summary="reinforcement learning with a critic (PPO): GRPO's loop with advantages of each token",
    config_class=PPOMasterConfig,
    rules=(*GRPO_RULES, *PPO_RULES),
    loop="grpo",
    steps_of_critic_alone=lambda config: config.ppo.policy_training_start_step,
    roles=lambda config: {CRITIC_ROLE: config.value},
)
ALGORITHMS["distillation"] = replace(
    ALGORITHMS["grpo"],
    name="distillation",
    summary="learning from teachers' probabilities of the policy's own responses",
    config_class=DistillationMasterConfig,
    rules=(*ALGORITHMS["grpo"].rules, *DISTILLATION_RULES),
    resume_keys={
        **ALGORITHMS["grpo"].resume_keys,
        "distillation.teachers.*.model_name": "the policy would learn from another teacher",
        "distillation.teachers.*.adapter": "the policy would learn from another teacher",
    },
    loop="grpo",
    roles=lambda config: config.distillation.teachers,
)
BUILT_IN = tuple(ALGORITHMS)


def algorithm_of(config: MasterConfig) -> Algorithm:
    for kind in type(config).__mro__:
        for algorithm in ALGORITHMS.values():
            if algorithm.config_class is kind:
                return algorithm
    raise LookupError(f"no registered algorithm has a configuration of the class {type(config).__name__}")


def roles_of(config: MasterConfig) -> Mapping[str, RoleModelConfig]:
    """Role -> model, for models other than the policy that have separate workers."""
    roles = dict(algorithm_of(config).roles(config))
    if isinstance(config, GRPOMasterConfig) and config.reward_model is not None:
        roles[REWARD_MODEL_ROLE] = config.reward_model
    return roles


def metric_in_force(config: MasterConfig) -> str | None:
    """Return the metric that selects the best checkpoints, with `auto` resolved. None: the newest checkpoints are
    kept."""
    name = config.checkpointing.metric_name
    return algorithm_of(config).best_metric(config) if name == AUTO_METRIC else name


def find_algorithm(name: str) -> Algorithm:
    """Return the built-in algorithm `name`, or import and register the algorithm that `package.module:ATTRIBUTE` names.

    Modules are also searched in the working folder.
    """
    if name in BUILT_IN:
        return ALGORITHMS[name]
    if ":" not in name:
        raise ConfigurationError(
            f"{ALGORITHM_KEY}: got {name!r}, expected {', '.join(BUILT_IN)}, or package.module:ALGORITHM"
            f"{did_you_mean(with_colon(name) or nearest(name, BUILT_IN))}"
        )
    found = import_attribute(ALGORITHM_KEY, name, form="package.module:ALGORITHM")
    if not isinstance(found, Algorithm):
        raise ConfigurationError(f"{ALGORITHM_KEY}: {name} is {described(found)}, expected an Algorithm")
    if (problem := next(_problems(found), None)) is not None:
        raise ConfigurationError(f"{ALGORITHM_KEY}: {name}: {problem}")
    algorithm = replace(found, reference=name)
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def _problems(algorithm: Algorithm) -> Iterator[str]:
    fields = algorithm.config_class.model_fields
    if algorithm.name in BUILT_IN:
        yield f"its name {algorithm.name} is that of a built-in algorithm"
    if algorithm.config_class in [other.config_class for other in ALGORITHMS.values() if other.name in BUILT_IN]:
        yield f"its config_class {algorithm.config_class.__name__} is that of a built-in algorithm; derive from it"
    if algorithm.run is None:
        yield "its attribute run is None, expected a function of the configuration and the training run"
    for name in dict.fromkeys((algorithm.name, algorithm.loop_name, "data")):
        if name not in fields:
            yield f"its config_class {algorithm.config_class.__name__} has no section {name}"
