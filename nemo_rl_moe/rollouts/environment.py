# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments, which drive a trajectory from its prompt to its reward in one turn or several."""

from collections import Counter
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
from nemo_rl_moe.rollouts.turn import SampledResponse, Turn, response_text, seed_of_tokens, seed_of_turn
from nemo_rl_moe.runs.folder.conversations import Outcome, ToolUse

CACHED_TOKENS = "mean_cached_tokens_per_sample"
"""Metric: mean number of prompt tokens of a trajectory that the engine had in its prefix cache."""

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]
Place = TypeVar("Place")

_TAIL_TOKENS = 16
_RESPONSE, _SCORE = "a response", "a score"
_ONE_AT_A_TIME = "a session does one thing at a time: await each before the next"


@dataclass
class Session:
    """A trajectory while it grows, from responses of the model and tokens of the environment.

    Attributes:
        group_id: Id of the group. The trajectories of a group are compared with each other.
        seed: Seed of the first response. Seeds of later ones are derived from it.
        max_tokens: Maximum number of tokens of a sequence.
        trajectory: Makes the requests for sequences and scores.
        encode: Tokenizes text, special tokens in it included.
        reward_weights: Weight of each named reward. None if a score is one number.
        model_inputs: Further inputs of the model. An environment may add some between turns.
        continuation: Renders appended messages. None without a chat template.
        metrics: Further numbers, logged as means over trajectories, failed ones included.
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
        self._num_asked: Counter[TokenIds] = Counter()
        self._kept_mass: list[float] = []
        self._num_cached: int | None = None

    @asynccontextmanager
    async def place(
        self, take: Callable[[], Coroutine[Any, Any, Place]], give_back: Callable[[Place], object]
    ) -> AsyncIterator[Place]:
        """Hold a limited resource, such as a free process, in a context that yields it.

        Args:
            take: Waits for the resource. If this wait is cancelled, no resource is taken.
            give_back: Releases the resource for the next trajectory.
        """
        place = await self.trajectory.wait_aside(take())
        try:
            yield place
        finally:
            give_back(place)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence that grows."""
        return len(self._sequences.last)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages so far: the prompt's, responses as assistant messages, and appended ones."""
        return self._conversation.messages

    @property
    def room(self) -> int:
        """Number of tokens that still fit. 0 after tokens of the environment did not fit."""
        return 0 if self._overlong else max(0, self.max_tokens - self.num_tokens)

    @property
    def has_room(self) -> bool:
        """Whether another token fits."""
        return self.room > 0

    def ends_in(self, text: str, token_ids: Sequence[int] | None = None) -> bool:
        """Return whether tokens (default: the growing sequence) end in a short text, trailing blanks aside."""
        tail = (self._sequences.last.token_ids if token_ids is None else token_ids)[-_TAIL_TOKENS:]
        return self.decode(tail).rstrip().endswith(text)

    async def generate(self) -> Turn:
        """Continue the sequence with a response of the model, and return it. Its tokens are trained on.

        Raises:
            ValueError: The sequence is full (see `has_room`).
            RuntimeError: An earlier request is still pending.
        """
        room = self.room
        if not room:
            why = self._overlong or f"at {self.max_tokens} tokens"
            raise ValueError(f"{self.prompt.sample_id}: the trajectory is full, {why}")
        sequence, asked_s = self._sequences.last, self._transcript.now_s()
        prompt_ids = tuple(sequence.token_ids)
        with self._asking(_RESPONSE):
            request = self._request(prompt_ids, room, seed_of_turn(self.seed, len(self.turns)))
            found = await self.trajectory.generate(request)
        turn = self._turn(found, is_truncated=found.is_truncated)
        self.add_sampled(sequence, SampledResponse(turn, prompt_ids, found, asked_s))
        self._conversation.add_to_turn(turn.token_ids, is_sampled=True)
        return turn

    def begin_sequence(self, token_ids: Sequence[int], messages: Sequence[Message]) -> GrowingSequence:
        """Begin another sequence with tokens that are not trained on, and return it for `add_sampled`.

        The finished trajectory omits the prompt's sequence if the model has sampled only in other sequences.

        Args:
            messages: The messages that the tokens show.
        """
        sequence = self._sequences.begin(token_ids)
        self._transcript.add_messages(messages, sequence, 0)
        return sequence

    def extend_sequence(self, sequence: GrowingSequence, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Add messages after a response in any sequence of the trajectory.

        Args:
            token_ids: Tokens of the messages. They are not trained on.
        """
        first = len(sequence)
        sequence.add_given(token_ids)
        self._transcript.add_messages(messages, sequence, first)

    def begin_conversation(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Begin another sequence with another conversation, such as a history that the environment has rewritten.

        Its tokens are not trained on. If they do not fit, none is added, and the trajectory ends as truncated.

        Raises:
            RuntimeError: A response is still pending, or there is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: A message is malformed.
        """
        self._require_no_response_pending("a conversation was")
        conversation, extension = self._conversation.another(messages)
        if self._fit(len(extension.token_ids), 0):
            self.begin_sequence(extension.token_ids, conversation.messages)
            self._conversation = conversation

    async def sample(self, token_ids: Sequence[int], wanted: int | None = None) -> SampledResponse:
        """Return a response of the model that continues any tokens. `add_sampled` adds it to a sequence.

        Unlike those of `generate`, calls may overlap. The seed of the response depends on the tokens, not on the order
        of the calls.

        Args:
            token_ids: Fewer than `max_tokens`.
            wanted: Maximum number of tokens that the request sets. A response that ends there does not count as
                `is_truncated`.
        """
        asked_s, prompt_ids = self._transcript.now_s(), tuple(token_ids)
        most = min(self.max_tokens - len(prompt_ids), self.sampling.max_new_tokens)
        is_short = wanted is not None and wanted < most
        self._num_asked[prompt_ids] += 1
        seed = seed_of_tokens(self.seed, prompt_ids, self._num_asked[prompt_ids] - 1)
        found = await self.trajectory.generate(self._request(prompt_ids, min(most, wanted or most), seed))
        return SampledResponse(
            self._turn(found, is_truncated=found.is_truncated and not is_short), prompt_ids, found, asked_s
        )

    def add_sampled(self, sequence: GrowingSequence, sampled: SampledResponse) -> None:
        """Add a response to the sequence whose tokens it continues. Its tokens are trained on."""
        found, start = sampled.found, len(sequence)
        sequence.add_sampled(found)
        if found.kept_mass is not None:
            self._kept_mass += found.kept_mass.tolist()
        if found.num_cached_tokens is not None:
            self._num_cached = (self._num_cached or 0) + found.num_cached_tokens
        self.turns.append(sampled.turn)
        self._sequence_of_turn.append(sequence)
        self._transcript.add_response(sampled.turn.text, sequence, start, sampled.asked_s, found.waited_s)

    def _request(self, token_ids: TokenIds, room: int, seed: int) -> GenerationRequest:
        sampling = self.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return GenerationRequest(token_ids, seed, sampling, dict(self.model_inputs))

    def _turn(self, found: GeneratedSequence, *, is_truncated: bool) -> Turn:
        token_ids = tuple(found.token_ids.tolist())
        text = response_text(token_ids, self.sampling, self.decode)
        return Turn(token_ids, text, is_truncated, tuple(found.logprobs.tolist()), is_cut=found.is_truncated)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the environment, such as an observation. They are not trained on.

        If they do not fit, none is added. The trajectory is then full, and ends as truncated.

        Raises:
            RuntimeError: A response is still pending.
        """
        self._append(token_ids, None)

    def append_text(self, text: str) -> None:
        """Add text of the environment, such as an observation. As with `append`, its tokens are not trained on."""
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
        """Add a message after a response, such as the result of a tool, and the next generation prompt.

        The chat template renders it. Sampled tokens never change: if the template would change them, another sequence
        begins with a fresh rendering of the conversation. The message is not trained on. If it does not fit, nothing
        is added, as with `append`.

        Args:
            message: With `role` (tool, user, system or developer), `content`, and further keys for the template.

        Raises:
            RuntimeError: A response is pending, none has been requested yet, or there is no chat template.
            NoExtension: The chat template cannot show the conversation.
            RecordError: The message is malformed.
        """
        self.append_messages([message])

    def append_messages(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Add messages after a response, such as the results of several tools, as with `append_message`."""
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

    def note(self, text: str) -> None:
        """Add a text to the transcript that the model does not read, such as why a request was refused."""
        self._transcript.add_given(text, None)

    def note_call(self, call: ToolUse, seconds: float = 0.0) -> None:
        """Add a tool call of the last response to the transcript for people.

        Args:
            seconds: Time since the call began.
        """
        self._transcript.add_call(call, seconds)

    def note_result(self, call_id: str, outcome: Outcome) -> None:
        """Add the outcome of an earlier tool call to the transcript, as soon as the result of the call has arrived."""
        self._transcript.add_result(call_id, outcome)

    def _require_no_response_pending(self, what: str) -> None:
        if self._asked_for == _RESPONSE:
            raise RuntimeError(f"{what} added while {_RESPONSE} was still waited for; {_ONE_AT_A_TIME}")

    def _may_fit(self, value: object) -> bool:
        """Return whether a text, or all texts of messages, are short enough to be tokenized.

        If they are not, mark the trajectory as full. Nothing fits into a full trajectory.
        """
        if (number := num_characters(value)) > most_characters(self.max_tokens) and not self._overlong:
            self._overlong = (
                f"{number:,} characters of the environment do not fit into a sequence of at most {self.max_tokens:,}"
                " tokens (policy.max_total_sequence_length)"
            )
        return not self._overlong

    def _fit(self, size: int, size_before: int) -> bool:
        """Return whether `size` tokens of the environment fit after `size_before` tokens.

        If they do not, mark the trajectory as full. Nothing fits into a full trajectory.
        """
        if size_before + size > self.max_tokens and not self._overlong:
            where = f"behind {size_before:,} of" if size_before else "into a sequence of"
            self._overlong = (
                f"{size:,} tokens of the environment do not fit {where} at most"
                f" {self.max_tokens:,} (policy.max_total_sequence_length)"
            )
        return not self._overlong

    def cut_short(self, reason: str) -> None:
        """Have the trajectory end as truncated, because tokens of its environment did not fit."""
        self._overlong = self._overlong or reason

    async def score(self, response: str | None = None) -> Score:
        """Return the score of a response by the configured reward function.

        Args:
            response: Text to score. None for the last response of the model.

        Raises:
            RuntimeError: There is no response yet, or an earlier request is still pending.
        """
        if not self.turns:
            raise RuntimeError("a score was asked for before the first response; await session.generate() first")
        last = self.turns[-1]
        text = last.text if response is None else response
        prompt = self.prompt
        item = ScoringItem(
            prompt.sample_id, prompt.text, text, last.is_truncated, prompt.record, environment=prompt.environment
        )
        with self._asking(_SCORE):
            return await self.trajectory.score(item)

    def reward(self, amount: float, turn: int | None = None) -> None:
        """Add a reward for a response. The trajectory's reward is its score plus these rewards.

        Args:
            turn: Index of the response in `turns`. None: the last one.

        Raises:
            RuntimeError: There is no response yet.
            ValueError: The amount is not a number, or too large.
        """
        if not self.turns:
            raise RuntimeError("a reward was given before the first response; await session.generate() first")
        if not -LARGEST_REWARD <= amount <= LARGEST_REWARD:
            raise ValueError(
                f"a turn's reward is {amount}, expected a number from {-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}"
            )
        turn = len(self.turns) - 1 if turn is None else turn
        self._turn_rewards[turn] = self._turn_rewards.get(turn, 0.0) + float(amount)

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
            score: Its score. Rewards of turns are added.
            metrics: Further numbers, logged as means over trajectories, in addition to `metrics` of the session.
            truncated_by: The limit at which it was truncated, if that is not a limit on tokens.

        Raises:
            TypeError: A metric is not a number.
        """
        # Turns are numbered in time. The list is by sequence, which is another order if conversations alternate.
        order = [
            turn for each in self._sequences.kept for turn, owner in enumerate(self._sequence_of_turn) if owner is each
        ]
        turn_rewards = [self._turn_rewards.get(turn, 0.0) for turn in sorted(order)]
        score = checked_score(score, self.reward_weights)  # it may come from user code
        own: Mapping[str, Any] = {**self.metrics, **(metrics or {})}
        if score.fault is not None:  # a wrong metric must not hide the fault
            own = {name: value for name, value in own.items() if _is_number(value)}
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
            metrics={**_checked_metrics(own), **kept, **cached},
            conversation=self._transcript.conversation(self._sequences.kept),
            times=self._transcript.times(),
            environment=self.prompt.environment,
            turn_lengths=tuple(len(self.turns[turn].token_ids) for turn in order),
            turn_order=tuple(order) if order != sorted(order) else (),
            turn_rewards=tuple(turn_rewards) if self._turn_rewards and score.fault is None else (),
            answer=encodable(score.answer),
        )

    def _finish_reason(self, truncated_by: Literal["turns", "time"] | None) -> FinishReason:
        if truncated_by != "time" and (self._overlong or (self.turns and self.turns[-1].is_truncated)):
            return "length"
        return truncated_by or "stop"

    def _response_text(self) -> str:
        """Return the text after the prompt, followed by the full texts of later sequences."""
        if len(self.turns) < 2:
            return "".join(turn.text for turn in self.turns)
        first, *later = self._sequences.kept
        return "\n\n".join(map(self.decode, [first.token_ids[first.num_first :], *(each.token_ids for each in later)]))

    def failed(self, fault: Fault, message: str, *, truncated_by: Literal["time"] | None = None) -> Trajectory:
        """Return the trajectory as it is now, with a fault (`message` in one line) instead of a score."""
        return self.finish(Score(0.0, is_correct=False, fault=fault, message=message), truncated_by=truncated_by)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) or (hasattr(value, "item") and np.shape(value) == ())


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of user code as plain numbers. Raise TypeError for others, such as lists."""
    for name, value in metrics.items():
        if not _is_number(value):
            raise TypeError(f"session.finish: the metric {name!r} is {described(value)}, expected a number")
    return {name: float(value) for name, value in metrics.items()}


class Environment(Protocol):
    """Driver of trajectories. One object drives all of them concurrently, with the state of each in its session."""

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory: generate, optionally answer with further tokens, and end with `session.finish`.

        A session allows one request at a time. An error that this method raises ends the run.
        """
        ...


class SingleTurn:
    """One response to the prompt, scored by the configured reward function."""

    async def rollout(self, session: Session) -> Trajectory:
        await session.generate()
        return session.finish(await session.score())
