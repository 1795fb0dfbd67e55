"""Run several decoding steps for one call of vLLM's scheduler, in engines of one process on the CPU.

    vLLM: schedule, with room for a burst ─► execute_model, sample_tokens ─► add the tokens to each request
                                                                │
                              the same requests again, one token further, until one of them ends

Scheduling 64 requests and adding their tokens costs a third of the time that a model of a million parameters takes.
While all requests decode, none waits and none ends, the scheduler would decide the same each time: one token more.

Invariant: the model gets the same batches as with one call of the scheduler for each token, so no bit of an answer
differs.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

_MOST_STEPS = 8
_MOST_S = 0.05
"""Seconds after which a burst ends: new requests, aborts and weights wait for it."""


class BurstExecutor(UniProcExecutor):
    """vLLM's executor of one process, which samples several tokens of each request where possible."""

    _scheduler: Scheduler | None = None
    _scheduled: SchedulerOutput

    def enable_bursts(self, scheduler: Any) -> None:
        """Take bursts from now on, unless the configuration needs the scheduler for each token."""
        # Asynchronous scheduling has another scheduler class; recurrent states are stored at each call of it.
        plain = type(scheduler) is Scheduler and scheduler.connector is None and scheduler.ec_connector is None
        groups = scheduler.kv_cache_config.kv_cache_groups
        attends = all(isinstance(group.kv_cache_spec, AttentionSpec) for group in groups)
        if plain and attends and self.vllm_config.speculative_config is None:
            scheduler.num_lookahead_tokens = _MOST_STEPS - 1
            self._scheduler = scheduler

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """See vLLM."""
        self._began = time.monotonic()
        self._scheduled = scheduler_output
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """See vLLM; the output may hold several tokens of each request."""
        output = super().sample_tokens(grammar_output)
        if self._scheduler is not None and grammar_output is None and isinstance(output, ModelRunnerOutput):
            output = self._burst(self._scheduler, output)
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done

    def _burst(self, scheduler: Scheduler, first: ModelRunnerOutput) -> ModelRunnerOutput:
        requests = [scheduler.requests[request_id] for request_id in first.req_ids]
        most = min(_MOST_STEPS, most_steps(scheduler, self._scheduled, requests))
        outputs = [first]
        while len(outputs) < most and not any_stops(requests, outputs[-1]):
            mean = (time.monotonic() - self._began) / len(outputs)
            if mean * (len(outputs) + 1) > _MOST_S:
                break
            super().execute_model(one_token_further(self._scheduled, requests, len(outputs)))
            output = super().sample_tokens(None)
            assert isinstance(output, ModelRunnerOutput), "one process answers at once"
            outputs.append(output)
        for request in requests:
            request.num_computed_tokens += len(outputs) - 1
        return joined(outputs)


def most_steps(scheduler: Scheduler, scheduled: SchedulerOutput, requests: Sequence[Request]) -> int:
    """Return how many steps these requests can take without the scheduler, with the scheduled one: at least 1."""
    all_decode = len(requests) == len(scheduled.num_scheduled_tokens) == scheduled.total_num_scheduled_tokens
    if not all_decode or scheduler.get_request_counts() != (len(requests), 0) or any(map(_needs_text, requests)):
        return 1
    tokens_left = (
        min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - request.num_tokens)
        for request in requests
    )
    return min(tokens_left, default=1)


def _needs_text(request: Request) -> bool:
    """Return whether the request may end by its text, which vLLM checks when it adds the tokens."""
    return request.sampling_params is None or bool(request.sampling_params.stop)


def any_stops(requests: Sequence[Request], output: ModelRunnerOutput) -> bool:
    """Return whether a request ends with its last token, as vLLM's `check_stop` will decide."""
    for request, tokens in zip(requests, output.sampled_token_ids, strict=True):
        params = request.sampling_params
        if params is None or not tokens or tokens[-1] == params.eos_token_id:
            return True
        if params.stop_token_ids and tokens[-1] in params.stop_token_ids:
            return True
    return False


def one_token_further(scheduled: SchedulerOutput, requests: Sequence[Request], num_steps: int) -> SchedulerOutput:
    """Return what the scheduler would decide next: one more token for each request.

    Args:
        scheduled: its last decision; the requests already count those tokens as computed.
        requests: in the order of the model's rows.
        num_steps: steps since then, whose tokens no request counts as output yet.
    """
    request_ids = [request.request_id for request in requests]
    return replace(
        SchedulerOutput.make_empty(),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=request_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(requests),
            num_computed_tokens=[request.num_computed_tokens + num_steps - 1 for request in requests],
            num_output_tokens=[request.num_output_tokens + num_steps for request in requests],
        ),
        num_scheduled_tokens=dict.fromkeys(scheduled.num_scheduled_tokens, 1),
        total_num_scheduled_tokens=len(requests),
    )


def joined(outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
    """Join the tokens and log-probabilities of all steps, by request.

    Raises:
        RuntimeError: vLLM changed the order of the requests.
    """
    first, *others = outputs
    if not others:
        return first
    if any(output.req_ids != first.req_ids for output in others):
        raise RuntimeError("vLLM changed the order of the requests in a burst of decoding steps.")
    rows = zip(*(output.sampled_token_ids for output in outputs), strict=True)
    return replace(
        first,
        sampled_token_ids=[[token for step in steps for token in step] for steps in rows],
        logprobs=_joined_logprobs([output.logprobs for output in outputs]),
    )


def _joined_logprobs(steps: Sequence[LogprobsLists | None]) -> LogprobsLists | None:
    given = [step for step in steps if step is not None]
    if not given:
        return None
    num_rows = len(given[0].logprobs)

    def by_request(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack(arrays, axis=1).reshape(num_rows * len(arrays), *arrays[0].shape[1:])

    return LogprobsLists(
        by_request([step.logprob_token_ids for step in given]),
        by_request([step.logprobs for step in given]),
        by_request([step.sampled_token_ranks for step in given]),
        [row * len(given) for row in range(num_rows)],
    )
