# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that translate NeMo-RL's settings of GRPO: advantages, lengths, loss, engines and rewards."""

from collections.abc import Callable

from nemo_rl_moe.config.nemo_rl_data import environment_of
from nemo_rl_moe.config.nemo_rl_roles import critic, teacher
from nemo_rl_moe.config.nemo_rl_translation import IMAGE_ENVIRONMENTS, Theirs, Translation
from nemo_rl_moe.rl.estimators import ESTIMATORS

BUILT_IN_REWARD_FUNCTIONS = ("math", "exact", "reasoning_gym", "callable")
NO_BOUND = 1.0e9
"""A bound that no importance-sampling ratio reaches: ratios are at most e^20."""


def estimator(theirs: Theirs, translation: Translation) -> None:
    """Translate the estimator of advantages. Older configurations have the estimator's switches in section `grpo`."""
    section, values = "grpo.adv_estimator", translation.values
    name = theirs.get(f"{section}.name", "grpo")
    normalize, leave_one_out = True, False
    if name == "reinforce_plus_plus":
        chosen = "reinforce_plus_plus_baseline" if theirs.get(f"{section}.minus_baseline", True) else name
    elif name == "raw_reward":
        normalize = theirs.get(f"{section}.normalize_advantages", False)
        chosen = "reinforce_plus_plus" if normalize else "reinforce"
    else:
        chosen = "grpo"
        if name != chosen:
            ours = ESTIMATORS.get(name)
            is_here = ours is not None and ours.reads_named_rewards
            reason = _several_rewards(theirs) if is_here else "no such estimator"
            translation.without.append(f"{section}.name: {name}: {reason}; the translation has grpo")
        places = (section, "grpo")
        normalize = theirs.first(*(f"{place}.normalize_rewards" for place in places)) is not False
        leave_one_out = theirs.first(*(f"{place}.use_leave_one_out_baseline" for place in places)) is not False
    values[f"{section}.name"], values[f"{section}.normalize_rewards"] = chosen, normalize
    values[f"{section}.use_leave_one_out_baseline"] = leave_one_out
    if leave_one_out and normalize:
        translation.changed.append(
            f"{section}: with a leave-one-out baseline, the advantage is divided by the standard deviation of the full"
            " group; NeMo-RL excludes the response from the standard deviation too"
        )
    elif chosen.startswith("reinforce_plus_plus"):
        translation.changed.append(
            f"{section}.name: {chosen}: its means count each response once; NeMo-RL counts each token"
        )


def _several_rewards(theirs: Theirs) -> str:
    """Return advice for an estimator of several rewards: the settings here, with a user's function as the reward."""
    names = ["correctness", "integer", "format"] if theirs.has("env.math_multi_reward") else []
    weights = theirs.get("grpo.adv_estimator.reward_weights", [1.0] * len(names))
    names = names if len(names) == len(weights) else [f"reward_{place}" for place in range(1, len(weights) + 1)]
    weighed = ", ".join(f"{name}: {weight}" for name, weight in zip(names, weights, strict=True)) or "NAME: 1.0"
    return (
        "this package has it too, for named rewards: set it together with env.reward.kind: callable, a function that"
        f" returns the rewards as a dict, and env.reward_weights: {{{weighed}}}"
    )


def dynamic_sampling(theirs: Theirs, translation: Translation) -> None:
    """Translate the limit of dynamic sampling: NeMo-RL counts rounds, and this package groups."""
    section = translation.algorithm
    rounds = theirs.get(f"{section}.dynamic_sampling_max_gen_batches")
    prompts = theirs.get(f"{section}.num_prompts_per_step")
    if rounds is not None and prompts is not None:
        translation.values["grpo.dynamic_sampling_max_groups"] = rounds * prompts


def lengths(theirs: Theirs, translation: Translation) -> None:
    """Translate the response length and the penalty of long responses."""
    values, shaping = translation.values, f"{translation.algorithm}.reward_shaping"
    longest = theirs.get("policy.max_total_sequence_length")
    asked = theirs.get("policy.generation.max_new_tokens", longest)
    if longest is None or asked is None:
        return
    of_prompt = theirs.get("data.max_input_seq_length", longest)
    room = max(longest - of_prompt, longest // 2)
    values["policy.generation.max_new_tokens"] = number = min(asked, room)
    if number != asked:
        translation.changed.append(
            f"policy.generation.max_new_tokens: {asked}: {number}, which leaves {longest - number} of"
            f" policy.max_total_sequence_length {longest} to the prompt; longer prompts are left out"
        )
    if of_prompt != longest - number:
        translation.changed.append(
            f"data.max_input_seq_length: {of_prompt}: {longest - number}, what policy.generation.max_new_tokens leaves"
        )
    for name in ("overlong_buffer_length", "overlong_buffer_penalty"):
        if (value := theirs.get(f"{shaping}.{name}")) is not None:
            values[f"grpo.reward_shaping.{name}"] = value
    if theirs.get(f"{shaping}.enabled", False) and (end := theirs.get(f"{shaping}.max_response_length")) != number:
        translation.changed.append(f"{shaping}.max_response_length: {end}: the buffer ends at {number}")


def policy_loss(theirs: Theirs, translation: Translation) -> None:
    """Translate objective, divergence and importance-sampling correction."""
    values, loss = translation.values, "loss_fn"
    if theirs.get(f"{loss}.use_cispo", False):
        values[f"{loss}.objective"] = "cispo"
    elif theirs.get(f"{loss}.disable_ppo_ratio", False):
        values[f"{loss}.objective"] = "reinforce"
    has_divergence = bool(theirs.get(f"{loss}.reference_policy_kl_penalty"))
    in_reward = has_divergence and theirs.get(f"{loss}.use_kl_in_reward", False)
    values[f"{loss}.use_kl_in_reward"] = in_reward
    kind = theirs.get(f"{loss}.reference_policy_kl_type", "k3")
    values[f"{loss}.reference_policy_kl_type"] = "k1" if in_reward else kind
    values[f"{loss}.reference_policy_kl_gradient"] = "estimate" if in_reward else "divergence"
    if in_reward and kind != "k1":
        translation.changed.append(
            f"{loss}.reference_policy_kl_type: {kind}: k1, the only estimator for a divergence in the reward"
        )
    if in_reward:
        translation.changed.append(f"{loss}.use_kl_in_reward: estimated by k1 for each response, before advantages")
    elif has_divergence and theirs.get(f"{loss}.use_on_policy_kl_approximation", False):
        translation.changed.append(
            f"{loss}.use_on_policy_kl_approximation: weighted by the ratio of the policy to the policy before the step,"
            " not to the engine"
        )
    if not theirs.get(f"{loss}.use_importance_sampling_correction", False):
        values[f"{loss}.importance_sampling_correction"] = "none"
        return
    kind = theirs.get(f"{loss}.truncated_importance_sampling_type")
    corrections = {None: "truncated", "tis": "truncated", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
    values[f"{loss}.importance_sampling_correction"] = corrections.get(kind, kind)
    bound = f"{loss}.truncated_importance_sampling_ratio"
    values[f"{loss}.importance_sampling_ratio_max"] = NO_BOUND if kind is None else theirs.get(bound, NO_BOUND)
    values[f"{loss}.importance_sampling_ratio_min"] = None if kind is None else theirs.get(f"{bound}_min")
    if theirs.get(f"{loss}.sequence_level_importance_ratios", False):
        values[f"{loss}.importance_sampling_level"] = "sequence"


def generation(theirs: Theirs, translation: Translation) -> None:
    """Translate the generation engine and its number format."""
    values, key = translation.values, "policy.generation.backend"
    backend = theirs.get(key, "vllm")
    values[key] = backend if backend in ("vllm", "megatron") else "vllm"
    if backend != values[key]:
        translation.changed.append(f"{key}: {backend}: vllm")
    engine = "policy.generation.vllm_cfg"
    if backend == "vllm":
        experts, tensor = (theirs.get(f"{engine}.{name}_parallel_size", 1) for name in ("expert", "tensor"))
        if experts not in (1, tensor):
            translation.changed.append(
                f"{engine}.expert_parallel_size: {experts}: {tensor}, as experts are divided over all GPUs of an engine"
            )
    dtype = theirs.get(f"{engine}.precision")
    if dtype in ("float32", "bfloat16", "float16"):
        values["policy.generation.vllm.dtype"] = dtype
    elif dtype is not None:
        translation.without.append(f"{engine}.precision: {dtype}: engines have no such number format")


def environment(theirs: Theirs, translation: Translation) -> None:
    """Translate scoring by math-verify, and the number of printed samples."""
    name = environment_of(theirs)
    if name == "math":
        translation.values["env.reward.kind"] = "math"
        translation.values["env.reward.num_workers"] = theirs.get("env.math.num_workers", 8)
    elif name not in IMAGE_ENVIRONMENTS:
        translation.obstacles.append(
            f"data.train.env_name: {name}: no such environment; name one of"
            f" {', '.join(BUILT_IN_REWARD_FUNCTIONS)}, or yours, as"
            " env.reward: docs/rewards.md"
        )
    number = theirs.get("logger.num_val_samples_to_print")
    if number is not None:
        translation.values["logger.num_samples_to_print"] = number


_ANSWER = "<answer>"
_REWARDS_OF_IMAGES = {"exact_alnum": "exact", "math_expr": "math"}
"""NeMo-RL's reward function for images with questions -> kind of reward here, for functions with a counterpart."""


def images(theirs: Theirs, translation: Translation) -> None:
    """Translate the rewards of environments for images with questions."""
    values, chosen = translation.values, environment_of(theirs)
    if chosen not in IMAGE_ENVIRONMENTS:
        return
    section = f"env.{chosen}"
    functions = theirs.get(f"{section}.reward_functions", [])
    weights = {function["name"]: function.get("weight", 1.0) for function in functions}
    values["env.reward.num_workers"] = theirs.get(f"{section}.num_workers", 8)
    known = [name for name in weights if name in _REWARDS_OF_IMAGES]
    for name, weight in weights.items():
        if [name] == known:
            ours = _REWARDS_OF_IMAGES[name]
            values |= {"env.reward.kind": ours, "env.reward.answer_after": _ANSWER}
            translation.changed.append(
                f"{section}.reward_functions: {name}: env.reward.kind {ours}, which scores all text after the last"
                f" {_ANSWER}; data.prompt_template must not ask for a closing tag"
            )
        else:
            why = "one such reward a run" if name in known else "no such reward"
            weighed = ", ".join(f"{each}: {weights[each]}" for each in weights)
            translation.without.append(
                f"{section}.reward_functions: {name}: {weight}: {why}; a function of yours that returns a dict"
                f" of rewards: env.reward.kind: callable, env.reward_weights: {{{weighed}}}"
            )


_ROLLOUT_RULES = (lengths, dynamic_sampling, generation, environment, images)
RULES_OF: dict[str, tuple[Callable[[Theirs, Translation], None], ...]] = {
    "grpo": (estimator, policy_loss, *_ROLLOUT_RULES),
    "ppo": (critic, policy_loss, *_ROLLOUT_RULES),
    "distillation": (teacher, *_ROLLOUT_RULES),
}
"""Algorithm -> its rules, for algorithms that generate responses."""
