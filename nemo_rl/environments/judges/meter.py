"""Count the requests of a judge: latency, tokens, cost, failures."""

from dataclasses import dataclass, field

from nemo_rl.config.schema.judges import LLMJudgeConfig

_MILLION = 1e6


@dataclass
class JudgeMeter:
    """Requests to a judge since the last `metrics`.

    Attributes:
        latencies_s: seconds of each request.
        num_retries: requests after the first one for a text.
        num_failed: texts without a verdict.
        num_from_memory: verdicts that needed no request of their own.
        prompt_tokens: tokens of the requests.
        completion_tokens: tokens of the answers.
    """

    latencies_s: list[float] = field(default_factory=list)
    num_retries: int = 0
    num_failed: int = 0
    num_from_memory: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def metrics(self, config: LLMJudgeConfig) -> dict[str, float | int]:
        """Return the metrics and begin again at 0."""
        counted = JudgeMeter(**vars(self))
        vars(self).update(vars(JudgeMeter()))
        latencies = sorted(counted.latencies_s)
        cost = (
            counted.prompt_tokens * config.price_per_million_prompt_tokens
            + counted.completion_tokens * config.price_per_million_completion_tokens
        ) / _MILLION
        return {
            "num_requests": len(latencies),
            "num_retries": counted.num_retries,
            "num_failed": counted.num_failed,
            "num_from_memory": counted.num_from_memory,
            "prompt_tokens": counted.prompt_tokens,
            "completion_tokens": counted.completion_tokens,
            "cost": cost,
            "latency_s_mean": sum(latencies) / max(len(latencies), 1),
            "latency_s_p95": latencies[int(0.95 * (len(latencies) - 1))] if latencies else 0.0,
            "latency_s_max": latencies[-1] if latencies else 0.0,
        }
