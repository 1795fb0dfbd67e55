"""Count proposed and accepted tokens, and keep proposals of a request independent of other requests."""

from typing import Any

from torch import nn

from nemo_rl.models.generation.reports.load import SpeculationCounts


class SpeculationWatch:
    """Counts in the steps of an engine.

    Args:
        scheduler: vLLM's scheduler.
    """

    def __init__(self, scheduler: Any):
        self._counts = SpeculationCounts()
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._counted

    def _counted(self, scheduled: Any, output: Any) -> Any:
        proposals = scheduled.scheduled_spec_decode_tokens
        rows = [
            (len(tokens), len(proposals.get(request_id, ())))
            for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False)
            if tokens
        ]
        verified = [(sampled, proposed) for sampled, proposed in rows if proposed]
        self._counts = self._counts.plus(
            SpeculationCounts(
                len(rows),
                sum(sampled for sampled, _ in rows),
                len(verified),
                sum(proposed for _, proposed in verified),
                sum(sampled - 1 for sampled, _ in verified),
            )
        )
        return self._update(scheduled, output)

    def take(self) -> SpeculationCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, SpeculationCounts()
        return counts


def propose_to_the_end(worker: Any) -> None:
    """Propose tokens for every request that has room for them; runs inside vLLM's worker on CPUs.

    vLLM proposes for no request as soon as one is near the end of the context, so tokens of the others would depend on
    it. Both proposers stop at the end of the context by themselves.
    """
    runner = worker.model_runner
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def models_of(worker: Any) -> nn.ModuleList:
    """Return the model of a worker and, if it has one, the draft model."""
    models = (worker.get_model(), worker.get_draft_model())
    return nn.ModuleList([model for model in models if isinstance(model, nn.Module)])
