"""Count the requests of a judge: latency, tokens, cost, failures."""

from dataclasses import dataclass, field

from nemo_rl.config.schema.judges import LLMJudgeConfig

_MILLION = 1e6


@dataclass
class JudgeMeter:
    """Requests to a judge since the last `metrics`."""

    latencies_s: list[float] = field(default_factory=list)
    """Seconds of each request."""
    num_retries: int = 0
    """Requests after the first one for a text."""
    num_failed: int = 0
    """Texts without a verdict."""
    num_from_memory: int = 0
    """Verdicts that needed no request of their own."""
    prompt_tokens: int = 0
    """Tokens of the requests."""
    completion_tokens: int = 0
    """Tokens of the answers."""

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
