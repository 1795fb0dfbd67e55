"""A judge that the run itself serves: a frozen language model on engines with their own CPUs or GPUs.

    requests of samples ──► chat template ──► engine group ──► text
                                                 └─ an engine that dies or hangs is replaced, its requests start again

Invariant: a request ends within `request_timeout_s` with the judge's text or a `JudgeError`. No text of a conversation
is encoded as a control token of the judge.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from nemo_rl.config import PolicyConfig
from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.encoding import encode_text, render_chat, with_bos
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.kits.judges.places import check_processors, places_of
from nemo_rl.kits.judges.questions import JudgeError, JudgeModel, JudgeText
from nemo_rl.models.generation.factory import check_engine_model, engine_settings, make_engines, sampling_params
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import longest_context
from nemo_rl.utils.errors import ConfigError, DataError, NemoRLError

_PLACE = "env.llm_judge.engine"
_RULES = TaskDataSpec("llm_judge", text_rules=TextRules(rows=True, tools=True)).rules


class JudgeEngines(JudgeModel):
    """Engines with the judge's model, for use on one event loop.

    Args:
        config: the section `env.llm_judge`, in which `engine` is set.

    Raises:
        ConfigError: the section, the model or the number of engines cannot be used.
        ResourceInsufficientError, DeadlineExceededError, WorkerDiedError: the engines did not start.
    """

    def __init__(self, config: LLMJudgeConfig) -> None:
        super().__init__(config)
        section = config.engine
        assert section is not None, "a judge without it is at base_url"
        policy, cluster = check_engine(config), section.as_cluster()
        self._tokenizer = get_tokenizer(policy.tokenizer, section=_PLACE)
        self._longest = section.max_model_len - 1
        self._sampling = sampling_params(policy, self._tokenizer.eos_token_id, validation=False)
        self.repeats_itself = config.temperature == 0
        if not section.uses_gpu:
            check_processors(_PLACE, section.resources)
        settings = replace(engine_settings(policy, cluster, 0, load_weights=True), can_sleep=False)
        with ExitStack() as undo:
            places = places_of("llm_judge", section.resources, on_gpus=section.uses_gpu)
            undo.callback(places.shutdown)
            # The engines of an environment that is being replaced may still use their names.
            name = f"llm_judge-{uuid.uuid4().hex[:8]}"
            self._engines = make_engines(settings, places, cluster, name_prefix=name)
            undo.callback(self._engines.shutdown)
            self._started = undo.pop_all()

    async def ask(self, body: Mapping[str, Any], attempt: int = 0) -> JudgeText:
        """Ask the judge (`JudgeModel.ask`). Each attempt has its own seed.

        Raises:
            JudgeError: the request is too long, takes too long, or the engines have ended.
        """
        limit_s = self._config.request_timeout_s
        try:
            request = GenerationRequest(self._tokens(body["messages"]), self._sampling, _seed(body, attempt))
            async with asyncio.timeout(limit_s) as deadline:
                result = await self._engines.generate(request)
        except (NemoRLError, RayError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = f"{self._config.judge_name} gave no answer in {limit_s:g} s (request_timeout_s)"
                raise JudgeError(reason) from None
            raise JudgeError(f"{self._config.judge_name} on the run's engines: {error}", may_pass=False) from None
        is_complete = result.finish_reason != "length"
        return JudgeText(self._text(result), len(request.prompt_token_ids), len(result.token_ids), is_complete)

    def close(self) -> None:
        """Stop the engines and release their CPUs or GPUs."""
        self._started.close()

    def _tokens(self, messages: list[Any]) -> list[int]:
        """Return the tokens of a request."""
        quoted = control_tokens_of(self._tokenizer).quoted_chat(messages, _RULES)
        text = with_bos(render_chat(quoted, self._tokenizer, add_generation_prompt=True), self._tokenizer)
        ids = encode_text(text, self._tokenizer, self._longest).tolist()
        if len(ids) > self._longest:
            raise DataError(
                f"the request has more than {self._longest} tokens. Raise {_PLACE}.max_model_len, or shorten the "
                "template"
            )
        return ids

    def _text(self, result: GenerationResult) -> str:
        return sampled_text(self._tokenizer, result.token_ids) if result.text is None else result.text


def check_engine(config: LLMJudgeConfig) -> PolicyConfig:
    """Check that engines can serve the judge's model, and return the policy section for it.

    Raises:
        ConfigError: a key of `engine`, or the model, cannot be used.
    """
    assert config.engine is not None, "a judge without it is at base_url"
    policy = config.as_policy()
    _check_length(policy)
    try:
        check_engine_model(policy, config.engine.as_cluster())
    except ConfigError as error:
        raise ConfigError(f"{_PLACE}: {error}") from error
    return policy


def _check_length(policy: PolicyConfig) -> None:
    """Refuse a context that is longer than the model supports."""
    most = longest_context(load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config())
    if most is not None and policy.max_total_sequence_length > most:
        raise ConfigError(
            f"{_PLACE}.max_model_len={policy.max_total_sequence_length}, but {policy.model_name} reads {most} tokens "
            f"(max_position_embeddings). Set it to at most {most}."
        )


def _seed(body: Mapping[str, Any], attempt: int) -> int:
    """Return a seed that depends only on the request and the attempt, so that a repeated run gets the same verdicts."""
    text = json.dumps([body, attempt], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
