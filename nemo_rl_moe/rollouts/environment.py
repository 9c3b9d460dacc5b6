# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments: they drive a trajectory from its prompt to its reward, in one turn or several."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from nemo_rl_moe.config.user_code import described
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.control_tokens import too_many_tokens
from nemo_rl_moe.data.encoding import most_characters, num_characters
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import encodable
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters, TokenIds
from nemo_rl_moe.rewards.interface import (
    LARGEST_REWARD,
    Fault,
    Score,
    ScoringItem,
    checked_score,
    with_turn_rewards,
)
from nemo_rl_moe.rollouts.conversation import Conversation
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence, GrowingSequences
from nemo_rl_moe.rollouts.running import RunningTrajectory
from nemo_rl_moe.rollouts.trajectory import KEPT_MASS, FinishReason, Trajectory
from nemo_rl_moe.rollouts.transcript import Transcript
from nemo_rl_moe.runs.folder.conversations import Outcome, ToolUse

CACHED_TOKENS = "mean_cached_tokens_per_sample"
"""Metric of tokens that an engine did not have to compute."""

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]
Place = TypeVar("Place")

_TAIL_TOKENS = 16
_RESPONSE, _SCORE = "a response", "a score"
_ONE_AT_A_TIME = "a session does one thing at a time: await each before the next"


@dataclass(frozen=True)
class Turn:
    """One response of the model.

    Attributes:
        token_ids: Its sampled tokens, the end token included where there is one.
        text: The same as text, without the end token.
        is_truncated: It was truncated at the run's limit on its tokens.
        is_cut: It was truncated at that limit, or at the one of who asked for it.
        logprobs: Log-probability of each of its tokens, in nats.
    """

    token_ids: TokenIds
    text: str
    is_truncated: bool
    logprobs: tuple[float, ...] = ()
    is_cut: bool = False


@dataclass
class Session:
    """A trajectory while it grows: what an environment asks to generate, and the tokens that it adds itself.

    Attributes:
        prompt: What the trajectory begins with.
        group_id: Trajectories of one group are compared with each other.
        sampling: How tokens are sampled.
        seed: Of the first response; later ones have seeds that follow from it.
        max_tokens: Most tokens of the whole sequence.
        trajectory: Has sequences continued and responses scored.
        decode: From token ids to text.
        encode: From text to token ids, special tokens in the text included.
        reward_weights: Of each named reward; None where a score is one number.
        model_inputs: Further inputs of the model; an environment may add some between turns.
        continuation: Renders messages that are appended; None: there is no chat template.
        metrics: Further numbers, logged as means over trajectories; they stay where the trajectory fails.
    """

    prompt: Prompt
    group_id: str
    sampling: SamplingParameters
    seed: int
    max_tokens: int
    trajectory: RunningTrajectory
    decode: Decode
    encode: Encode
    reward_weights: Mapping[str, float] | None = None
    model_inputs: dict[str, ModelInput] = field(default_factory=dict)
    continuation: Continuation | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns: list[Turn] = []
        self._sequence_of_turn: list[GrowingSequence] = []
        self._sequences = GrowingSequences(self.prompt.token_ids)
        prompt = self.prompt
        self._conversation = Conversation(
            prompt.messages,
            prompt.inputs,
            len(prompt.messages),
            self.sampling.stop_token_ids,
            self.decode,
            self.continuation,
        )
        self._transcript = Transcript(prompt, self._sequences.last, self.decode)
        self._asked_for: str | None = None
        self._overlong = ""
        self._turn_rewards: dict[int, float] = {}
        self._kept_mass: list[float] = []
        self._num_cached: int | None = None

    @asynccontextmanager
    async def place(
        self, take: Callable[[], Coroutine[Any, Any, Place]], give_back: Callable[[Place], object]
    ) -> AsyncIterator[Place]:
        """Hold one of few places inside, such as a free process, for which trajectories wait.

        Args:
            take: Waits for one; cancelled, it has none.
            give_back: Gives it to the next.
        """
        place = await self.trajectory.wait_aside(take())
        try:
            yield place
        finally:
            give_back(place)

    @property
    def num_tokens(self) -> int:
        """Tokens so far of the sequence that grows."""
        return len(self._sequences.last)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages so far: the prompt's, what the model wrote as assistant's, and those that were appended."""
        return self._conversation.messages

    @property
    def room(self) -> int:
        """Tokens that still fit; 0 from the first tokens of the environment on that did not."""
        return 0 if self._overlong else max(0, self.max_tokens - self.num_tokens)

    @property
    def has_room(self) -> bool:
        """True when another token fits."""
        return self.room > 0

    def ends_in(self, text: str) -> bool:
        """Return whether the sequence ends in a short text; blanks behind it do not count."""
        return self.decode(self._sequences.last.token_ids[-_TAIL_TOKENS:]).rstrip().endswith(text)

    async def generate(self) -> Turn:
        """Continue the sequence by a response of the model; its tokens are trained on.

        Raises:
            ValueError: The sequence is full; see `has_room`.
            RuntimeError: An earlier response or score is still waited for.
        """
        room = self.room
        if not room:
            why = self._overlong or f"at {self.max_tokens} tokens"
            raise ValueError(f"{self.prompt.sample_id}: the trajectory is full, {why}")
        sequence, asked_s = self._sequences.last, self._transcript.now_s()
        with self._asking(_RESPONSE):
            found = await self.trajectory.generate(self._request(sequence, room))
        turn = self._add_response(sequence, found, asked_s, is_truncated=found.is_truncated)
        self._conversation.add_to_turn(turn.token_ids, is_sampled=True)
        return turn

    def begin_sequence(self, token_ids: Sequence[int], messages: Sequence[Message]) -> GrowingSequence:
        """Begin another sequence of the trajectory, with tokens that are not trained on; for `continue_sequence`.

        The prompt's own sequence is no part of the trajectory where nothing of it was sampled and others were.

        Args:
            messages: What the tokens say.
        """
        sequence = self._sequences.begin(token_ids)
        self._transcript.add_messages(messages, sequence, 0)
        return sequence

    def extend_sequence(self, sequence: GrowingSequence, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Add messages behind a response in any sequence of the trajectory; they are not trained on."""
        first = len(sequence)
        sequence.add_given(token_ids)
        self._transcript.add_messages(messages, sequence, first)

    def begin_conversation(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Begin another sequence with a conversation of its own, such as a history that its environment has rewritten.

        Its tokens are not trained on; where they do not fit, the trajectory is full, as with `append`.

        Raises:
            RuntimeError: A response is still waited for, or there is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: A message is malformed.
        """
        self._require_no_response_pending("a conversation was")
        conversation, extension = self._conversation.another(messages)
        if self._fit(len(extension.token_ids), 0):
            self.begin_sequence(extension.token_ids, conversation.messages)
            self._conversation = conversation

    async def continue_sequence(self, sequence: GrowingSequence, room: int, wanted: int | None = None) -> Turn:
        """Continue any sequence of the trajectory by a response of the model; its tokens are trained on.

        Args:
            room: Most tokens of the response, where it is below the run's.
            wanted: Most tokens that who asks wants. A response that ends there is not truncated; None: any number.

        Raises:
            RuntimeError: An earlier response or score is still waited for.
        """
        asked_s, most = self._transcript.now_s(), min(room, self.sampling.max_new_tokens)
        is_short = wanted is not None and wanted < most
        with self._asking(_RESPONSE):
            found = await self.trajectory.generate(self._request(sequence, min(most, wanted or most)))
        return self._add_response(sequence, found, asked_s, is_truncated=found.is_truncated and not is_short)

    def _request(self, sequence: GrowingSequence, room: int) -> GenerationRequest:
        sampling = self.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return GenerationRequest(
            token_ids=tuple(sequence.token_ids),
            seed=_seed_of_turn(self.seed, len(self.turns)),
            sampling=sampling,
            model_inputs=dict(self.model_inputs),
        )

    def _add_response(
        self, sequence: GrowingSequence, found: GeneratedSequence, asked_s: float, *, is_truncated: bool
    ) -> Turn:
        token_ids, start = tuple(found.token_ids.tolist()), len(sequence)
        sequence.add_sampled(found)
        if found.kept_mass is not None:
            self._kept_mass += found.kept_mass.tolist()
        if found.num_cached_tokens is not None:
            self._num_cached = (self._num_cached or 0) + found.num_cached_tokens
        text = response_text(token_ids, self.sampling, self.decode)
        turn = Turn(token_ids, text, is_truncated, tuple(found.logprobs.tolist()), is_cut=found.is_truncated)
        self.turns.append(turn)
        self._sequence_of_turn.append(sequence)
        self._transcript.add_response(text, sequence, start, asked_s, found.waited_s)
        return turn

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the environment, such as an observation; they are not trained on.

        Where they do not fit, none is added: the trajectory is full from then on, and ends as one that was cut.

        Raises:
            RuntimeError: A response is still waited for, behind which they would stand.
        """
        self._append(token_ids, None)

    def append_text(self, text: str) -> None:
        """Add text of the environment; it is not trained on."""
        self._require_no_response_pending("tokens were")
        if self._may_fit(text):
            too_many = too_many_tokens(text, self.max_tokens, self.encode)
            self._append(self.encode(text) if too_many is None else too_many, text)
        else:
            self._transcript.add_given(text[: most_characters(self.max_tokens)], None)

    def _append(self, token_ids: Sequence[int], text: str | None) -> None:
        self._require_no_response_pending("tokens were")
        if not len(token_ids):
            return
        shown, sequence = self.decode(token_ids) if text is None else text, self._sequences.last
        if self._fit(len(token_ids), len(sequence)):
            sequence.add_given(token_ids)
            self._conversation.add_to_turn(token_ids, is_sampled=False)
            self._transcript.add_given(shown, sequence)
        else:
            self._transcript.add_given(shown, None)

    def append_message(self, message: Mapping[str, object]) -> None:
        """Add a message behind a response, such as the result of a tool, and the next generation prompt.

        The chat template renders it; sampled tokens stay as they are. Where the template would change them, another
        sequence begins with a fresh rendering of the conversation. Tokens of messages are not trained on, and where
        they do not fit none is added, as with `append`.

        Args:
            message: With `role` (tool, user, system or developer), `content`, and further keys for the template.

        Raises:
            RuntimeError: A response is still waited for, or none was asked for yet, or there is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: The message is malformed.
        """
        self.append_messages([message])

    def append_messages(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Add messages behind a response, such as the results of several tools; see `append_message`."""
        self._require_no_response_pending("a message was")
        if not self._may_fit(messages):
            self._transcript.add_unread(messages)
            return
        try:
            answer = self._conversation.answer(messages)
        except NoExtension:
            self._transcript.add_unread(messages)
            raise
        size_before = self._sequences.size_before(answer.extension, answer.replaced)
        if self._fit(len(answer.extension.token_ids), size_before):
            self._sequences.extend(answer.extension, answer.replaced)
            self._conversation.accept(answer)
            self._transcript.answer(answer.messages, self._sequences.last, size_before)
        else:
            self._transcript.add_unread(messages)

    def note_call(self, call: ToolUse, seconds: float = 0.0) -> None:
        """Note a call of a tool in the last response, for those who read the trajectory.

        Args:
            call: What was called, and what came of it.
            seconds: How long it took; it is over now.
        """
        self._transcript.add_call(call, seconds)

    def note_result(self, call_id: str, outcome: Outcome) -> None:
        """Note what came of a call that was noted before; its result is there now."""
        self._transcript.add_result(call_id, outcome)

    def _require_no_response_pending(self, what: str) -> None:
        if self._asked_for == _RESPONSE:
            raise RuntimeError(f"{what} added while {_RESPONSE} was still waited for; {_ONE_AT_A_TIME}")

    def _may_fit(self, value: object) -> bool:
        """Return False for texts that are far too long to be tokenized; the trajectory is full from then on."""
        if (number := num_characters(value)) > most_characters(self.max_tokens) and not self._overlong:
            self._overlong = (
                f"{number:,} characters of the environment do not fit into a sequence of at most {self.max_tokens:,}"
                " tokens (policy.max_total_sequence_length)"
            )
        return not self._overlong

    def _fit(self, size: int, size_before: int) -> bool:
        """Return whether so many tokens of the environment fit; where not, the trajectory is full from then on."""
        if size_before + size > self.max_tokens and not self._overlong:
            where = f"behind {size_before:,} of" if size_before else "into a sequence of"
            self._overlong = (
                f"{size:,} tokens of the environment do not fit {where} at most"
                f" {self.max_tokens:,} (policy.max_total_sequence_length)"
            )
        return not self._overlong

    def cut_short(self, reason: str) -> None:
        """Have the trajectory end as one that was cut, as its environment's tokens did not fit."""
        self._overlong = self._overlong or reason

    async def score(self, response: str | None = None) -> Score:
        """Ask the reward function that the configuration names.

        Args:
            response: What is scored; None: the last response of the model.

        Raises:
            RuntimeError: There is no response yet, or an earlier request is still waited for.
        """
        if not self.turns:
            raise RuntimeError("a score was asked for before the first response; await session.generate() before")
        last = self.turns[-1]
        text = last.text if response is None else response
        prompt = self.prompt
        item = ScoringItem(
            prompt.sample_id, prompt.text, text, last.is_truncated, prompt.record, environment=prompt.environment
        )
        with self._asking(_SCORE):
            return await self.trajectory.score(item)

    def reward(self, amount: float) -> None:
        """Give a reward for the last response; several add up. The trajectory's reward is their sum and its score.

        Raises:
            RuntimeError: There is no response yet.
            ValueError: It is no number, or too large.
        """
        if not self.turns:
            raise RuntimeError("a reward was given before the first response; await session.generate() before")
        if not -LARGEST_REWARD <= amount <= LARGEST_REWARD:
            raise ValueError(
                f"a turn's reward is {amount}, expected a number from {-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}"
            )
        place = len(self.turns) - 1
        self._turn_rewards[place] = self._turn_rewards.get(place, 0.0) + float(amount)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        if self._asked_for is not None:
            raise RuntimeError(f"{what} was asked for while {self._asked_for} was still waited for; {_ONE_AT_A_TIME}")
        self._asked_for = what
        try:
            yield
        finally:
            self._asked_for = None

    def finish(
        self,
        score: Score,
        metrics: Mapping[str, float] | None = None,
        *,
        truncated_by: Literal["turns", "time"] | None = None,
    ) -> Trajectory:
        """Return the trajectory as it is now.

        Args:
            score: What it is worth, beside the rewards of its turns.
            metrics: Further numbers, logged as means over trajectories, beside those in `metrics` of the session.
            truncated_by: Limit at which it was truncated, beside those on tokens, which are known; None: none.

        Raises:
            TypeError: A metric is not a number.
        """
        # Conversations that alternate add turns to one sequence and to another: in time the turns are 0, 1, 2.
        order = [
            turn for each in self._sequences.kept for turn, place in enumerate(self._sequence_of_turn) if place is each
        ]
        turn_rewards = [self._turn_rewards.get(turn, 0.0) for turn in sorted(order)]
        score = checked_score(score, self.reward_weights)  # a function of the user's own may have made it
        own = {**self.metrics, **(metrics or {})}
        # Of one that has failed, those that are numbers tell something.
        own = _checked_metrics(own if score.fault is None else dict(filter(_is_metric, own.items())))
        score = with_turn_rewards(score, turn_rewards if self._turn_rewards else [])
        kept = {KEPT_MASS: float(np.mean(self._kept_mass))} if self._kept_mass else {}
        cached = {} if self._num_cached is None else {CACHED_TOKENS: float(self._num_cached)}
        return Trajectory(
            sample_id=self.prompt.sample_id,
            group_id=self.group_id,
            sequences=self._sequences.finished(self.model_inputs),
            reward=score.reward,
            is_correct=score.is_correct,
            finish_reason=self._finish_reason(truncated_by),
            num_turns=len(self.turns),
            prompt_text=self.prompt.text,
            response_text=self._response_text(),
            fault=score.fault,
            fault_message=encodable(score.message),
            overlong=self._overlong,
            rewards=dict(score.rewards),
            metrics={**own, **kept, **cached},
            conversation=self._transcript.conversation(self._sequences.kept),
            times=self._transcript.times(),
            environment=self.prompt.environment,
            turn_lengths=tuple(len(self.turns[turn].token_ids) for turn in order),
            turn_order=tuple(order) if order != sorted(order) else (),
            turn_rewards=tuple(turn_rewards) if self._turn_rewards and score.fault is None else (),
        )

    def _finish_reason(self, truncated_by: Literal["turns", "time"] | None) -> FinishReason:
        if truncated_by != "time" and (self._overlong or (self.turns and self.turns[-1].is_truncated)):
            return "length"
        return truncated_by or "stop"

    def _response_text(self) -> str:
        """Return what follows the prompt; later sequences stand there as a whole."""
        if len(self.turns) < 2:
            return "".join(turn.text for turn in self.turns)
        first, *later = self._sequences.kept
        return "\n\n".join(map(self.decode, [first.token_ids[first.num_first :], *(each.token_ids for each in later)]))

    def failed(self, fault: Fault, message: str, *, truncated_by: Literal["time"] | None = None) -> Trajectory:
        """Return the trajectory as it is now, with the reason why it has no score.

        Args:
            fault: Kind of the failure.
            message: What went wrong, in one line.
            truncated_by: Limit at which it was truncated, beside those on tokens; None: none.
        """
        return self.finish(Score(0.0, is_correct=False, fault=fault, message=message), truncated_by=truncated_by)


def _is_metric(named: tuple[str, Any]) -> bool:
    value = named[1]
    return isinstance(value, Real | np.bool_) or (hasattr(value, "item") and np.shape(value) == ())


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a user's own as plain numbers."""
    # Of a list, a mean over all trajectories would pass for one.
    for name, value in metrics.items():
        if not _is_metric((name, value)):
            raise TypeError(f"session.finish: the metric {name!r} is {described(value)}, expected a number")
    return {name: float(value) for name, value in metrics.items()}


def response_text(token_ids: TokenIds, sampling: SamplingParameters, decode: Decode) -> str:
    """Return a response as text, without the token that ended it."""
    if token_ids and token_ids[-1] in sampling.stop_token_ids:
        token_ids = token_ids[:-1]
    return decode(token_ids)


class Environment(Protocol):
    """Driver of trajectories. One object serves all of them at a time; what belongs to one is in its session."""

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory: generate, answer with further tokens or not, and end with `session.finish`.

        It asks the session for one thing at a time. An error ends the run.
        """
        ...


class SingleTurn:
    """One response to the prompt, scored by the reward function that the configuration names."""

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory."""
        await session.generate()
        return session.finish(await session.score())


def _seed_of_turn(seed: int, turn: int) -> int:
    """Return the trajectory's own seed for its first response; for later ones, numbers that no other trajectory has."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0])
