"""Play a sample of an agent environment by running its program, which calls the endpoint.

    play ─► session, key ─► environment.step (runs the program to its end) ─► reward
                 ▲                    │ HTTP
                 └──── endpoint ◄─────┘                session's tree ─► conversations of the sample

Invariant: everything that a program sampled is recorded, however the program ends, and its key is invalid afterwards.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from nemo_rl.agents.endpoint.answers import AnswerReader
from nemo_rl.agents.endpoint.call_tree import Call, CallTree
from nemo_rl.agents.endpoint.server import MODEL, AgentEndpoint
from nemo_rl.agents.endpoint.session import COUNTS, AgentSession, CallParts, CallSeed, SessionSettings, call_id_of
from nemo_rl.agents.programs.interfaces import AGENT, CALL_REWARDS
from nemo_rl.config.schema.agents import AgentEndpointConfig, AgentKeys
from nemo_rl.data.images.messages import inputs_of
from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import TextRules
from nemo_rl.environments.interfaces import StepResult
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.trajectory import Ending, Outcome, RolloutLimits, Trajectory
from nemo_rl.models.generation.interfaces import GenerationInterface, SamplingParams, VersionSpan

type Credit = Literal["all", "last"]


def record(sample: Trajectory, tree: CallTree, credit: Credit, tokenizer: TokenizerType | None = None) -> list[Call]:
    """Write the conversations of a finished program into its sample.

    Args:
        sample: sample with only its prompt. It does not change if nothing was sampled.
        credit: "all" if the reward trains all conversations, or "last" if it trains only the one that ended last.
        tokenizer: tokenizer of the policy, which says how the images of conversations are read. None for texts alone.

    Returns:
        The calls in the order of the response turns of the sample.
    """
    leaves = tree.leaves()
    if not leaves:
        return []
    if credit == "last":
        leaves = [leaves[-1], *leaves[:-1]]
    trained: set[str] = set()
    rows = [_row(leaf, trained) for leaf in leaves]
    first = rows[0]
    sample.message_log, sample.prompt_length = first.message_log, first.prompt_length
    sample.weight_versions = first.weight_versions
    inputs = [None if tokenizer is None else inputs_of(leaf.images, tokenizer) for leaf in leaves]
    sample.row_inputs = inputs[0] or sample.row_inputs
    sample.branches = [
        Branch(row.message_log, row.prompt_length, row.weight_versions, trains=credit == "all", row_inputs=own)
        for row, own in zip(rows[1:], inputs[1:], strict=True)
    ]
    sample.num_turns = len(tree.calls)
    return [call for row in rows for call in row.calls]


def spread_reward(
    sample: Trajectory, calls: Sequence[Call], call_rewards: Mapping[str, float], invalid_patterns: Sequence[str] = ()
) -> None:
    """Divide the reward of a sample among its response turns, and mark turns with calls that were not understood.

    Args:
        sample: sample with its reward.
        calls: the calls that `record` returned.
        call_rewards: rewards of some calls by their ids. The last turn gets the rest of the sample's reward.
        invalid_patterns: texts in an answer that indicate a tool call that was not understood.
    """
    if sample.reward is None or not calls:
        return
    sample.turn_rewards = [float(call_rewards.get(call.id, 0.0)) for call in calls]
    sample.turn_rewards[-1] += sample.reward - sum(sample.turn_rewards)
    texts = [str(call.answer["content"]) for call in calls]
    sample.invalid_tool_call_turns = [any(pattern in text for pattern in invalid_patterns) for text in texts]


@dataclass(frozen=True)
class _Row:
    """One conversation."""

    message_log: list[Message]
    prompt_length: int
    """Number of tokens before the first answer that this conversation trains."""
    weight_versions: list[VersionSpan]
    """Versions of the weights that sampled the trained answers."""
    calls: list[Call]
    """Calls whose answers this conversation trains."""


def _row(leaf: Call, trained: set[str]) -> _Row:
    """Return the conversation that ends with a call. Answers of calls in `trained` are not trained again."""
    log: list[Message] = []
    spans: list[VersionSpan] = []
    own: list[Call] = []
    position, prompt_length = 0, None
    for call in leaf.path:
        log.append(call.added)
        position += call.added["token_ids"].numel()
        answer = call.answer
        if call.id in trained:
            answer = {name: value for name, value in answer.items() if name != "generation_logprobs"}
        else:
            own.append(call)
            prompt_length = position if prompt_length is None else prompt_length
            spans += [VersionSpan(position + span.start, span.version) for span in call.weight_versions]
        log.append(answer)
        position += answer["token_ids"].numel()
    trained.update(call.id for call in own)
    return _Row(log, position if prompt_length is None else prompt_length, spans, own)


@dataclass(frozen=True)
class Played:
    """Result of a finished program."""

    step: StepResult
    """Result of the environment's step."""
    spread_reward: Callable[[], None]
    """Function that divides the reward among the response turns, after the sample got its reward."""


@dataclass(frozen=True)
class _AgentSettings:
    """Settings from an environment's section."""

    session: SessionSettings
    credit: Credit
    invalid_patterns: Sequence[str]


@dataclass
class AgentPlayer:
    """Play any number of samples of agent environments concurrently on one event loop."""

    generation: GenerationInterface
    tokenizer: TokenizerType
    """Tokenizer of the policy."""
    limits: RolloutLimits
    """Limits of a sample."""
    text_rules: TextRules
    """Rules for control tokens in texts, as in `RolloutRunner`."""
    config: AgentEndpointConfig
    """The endpoint's section."""
    _endpoint: AgentEndpoint | None = field(default=None, init=False)
    _settings: dict[str, _AgentSettings] = field(default_factory=dict, init=False)
    """Settings by the name of the environment."""

    async def play(
        self,
        sample: Trajectory,
        section: Mapping[str, Any],
        step_of: Callable[[list[Message], Any], Awaitable[StepResult]],
        sampling: SamplingParams,
        seed_of: CallSeed,
        *,
        trains: bool = True,
    ) -> Played:
        """Run the program of a sample to its end, and write the program's answers into the sample.

        Args:
            sample: sample with only its prompt.
            step_of: the method `step` of the sample's environment.
            seed_of: function that returns the seeds of answers.
            trains: `CallParts.trains`.

        Raises:
            Exception: the engines can no longer answer, or the environment cannot be kept running.
        """
        endpoint = await self._started()
        settings = await self._settings_of(sample.task_name, section)
        parts = CallParts(
            self.generation, self.tokenizer, self.text_rules, self.limits, sampling, trains, sample.row_inputs
        )
        session = AgentSession(parts, settings.session, seed_of)
        key = endpoint.open(session)
        started = asyncio.get_running_loop().time()
        try:
            step = await _unless_failed(
                step_of(sample.conversation, _metadata(sample, endpoint, key, seed_of("program"))), session
            )
        finally:
            endpoint.close(key)
            await session.close()
        sample.generation_s += session.generation_s
        sample.environment_s += max(asyncio.get_running_loop().time() - started - session.generation_s, 0.0)
        calls = record(sample, session.tree, settings.credit, self.tokenizer)
        _note(sample, session)
        step, rewards = _without_key(step)
        unknown = sorted(rewards.keys() - {call.id for call in calls})
        if unknown:
            reason = f"the program rewards calls that it has not made: {', '.join(unknown)}"
            step = StepResult.failed(reason, step.metadata)
        if session.unanswered is not None:  # the model's server has failed, not the program
            step = StepResult.failed(session.unanswered, step.metadata)
        return Played(step, partial(spread_reward, sample, calls, rewards, settings.invalid_patterns))

    async def _started(self) -> AgentEndpoint:
        """Return the endpoint, after starting it for the first sample."""
        if self._endpoint is None:
            self._endpoint = AgentEndpoint(self.config)
        await self._endpoint.start()
        return self._endpoint

    async def _settings_of(self, name: str, section: Mapping[str, Any]) -> _AgentSettings:
        if name not in self._settings:
            keys = AgentKeys.build(**{each: section[each] for each in AgentKeys.model_fields if each in section})
            # Another server parses the answers of its model, and renders histories in its own way.
            is_own = not self.generation.reads_chats
            names = (keys.tool_parser, keys.reasoning_parser) if is_own else (None, None)
            plugins = [file for file in (keys.tool_parser_plugin, keys.reasoning_parser_plugin) if file is not None]
            session = SessionSettings(
                await asyncio.to_thread(AnswerReader, self.tokenizer, *names, plugins if is_own else []),
                max_calls=keys.max_calls,
                max_concurrent_calls=self.config.max_concurrent_calls,
                sampling=keys.sampling,
                history=keys.history if is_own else "keep",
                template_kwargs=keys.chat_template_kwargs or {},
            )
            self._settings[name] = _AgentSettings(session, keys.credit, keys.invalid_tool_call_patterns)
        return self._settings[name]


def _metadata(sample: Trajectory, endpoint: AgentEndpoint, key: str, seed: int) -> dict[str, Any]:
    """Return the metadata of a sample, extended by the data that its program needs."""
    chat = sample.chat
    task = {
        "base_url": f"{endpoint.address}/v1",
        "api_key": key,
        "start_secret": endpoint.secret_of(key),
        "model": MODEL,
        "messages": sample.conversation if chat is None else list(chat["messages"]),
        "tools": None if chat is None else chat["tools"],
        "seed": seed,
    }
    return {**(sample.extra_env_info or {}), AGENT: task}


def _without_key(step: StepResult) -> tuple[StepResult, Mapping[str, float]]:
    """Return the result of a step without the sample's key, and the rewards of single calls.

    The result has the key if the environment was too slow or died, because it then has the metadata that was sent.
    """
    if not isinstance(step.metadata, dict):
        return step, {}
    metadata = {name: value for name, value in step.metadata.items() if name not in (AGENT, CALL_REWARDS)}
    rewards = step.metadata.get(CALL_REWARDS) or {}
    return replace(step, metadata=metadata), {call_id_of(name): value for name, value in rewards.items()}


async def _unless_failed(step: Awaitable[StepResult], session: AgentSession) -> StepResult:
    """Wait for the end of a program. If its session fails before, raise the session's error."""
    running = asyncio.ensure_future(step)
    ends: set[asyncio.Future[Any]] = {running, session.failure}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if session.failure.done():
            session.failure.result()
        return await running
    finally:
        running.cancel()


def _note(sample: Trajectory, session: AgentSession) -> None:
    """Store the counts of a session in its sample, and the limit that ended the sample."""
    sample.num_prefix_hits = session.counts["prefix_hits"]
    sample.agent_counts = {name: float(session.counts[name]) for name in COUNTS}
    bound = session.bound
    if bound is not None:
        sample.ended_by = bound
        sample.outcome = sample.outcome if bound is Ending.MAX_TURNS else Outcome.TRUNCATED
