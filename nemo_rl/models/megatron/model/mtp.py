"""Train multi-token-prediction (MTP) layers, which predict the tokens after the next token.

    GPTModel ─► hidden states ─► policy's scores
                     └─► MTP layers, with the embeddings of the following tokens ─► loss ─► gradients

    loss = factor / D * sum_d mean_k( -log q_d(token_k) )          d = 1 ... D

The policy scores token k from position k - 1, and the layer of depth d predicts it from position k - 1 - d. Speculative
decoding proposes tokens with these layers. Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Invariant: the means are over all microbatches and ranks of an update, so gradients do not depend on how rows are
divided. The policy's own scores do not depend on these layers.
"""

from collections.abc import Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.distributed.parallel_logprobs import TopK, token_logprobs, topk_logits
from nemo_rl.models.megatron.inputs import FurtherTokens, RankInputs


class MTPModel(GPTModel):
    """A GPTModel that passes the hidden states of its MTP layers to the output processor if these layers are trained.

    Megatron Core's own MTP loss is not used: its scale depends on the microbatches, and it needs all logits at once.
    """

    @override
    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        rotary_pos_emb: Tensor | None,
        *ignored: Any,
        output_processor: Any,
        output_processor_context: RankInputs,
        attention_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Any:
        if not self.post_process:
            return hidden_states
        shares = self.share_embeddings_and_output_weights
        further: tuple[Tensor, ...] = ()
        if self.training and self.config.mtp_loss_scaling_factor:
            joined = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                padding_mask=padding_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
            )
            hidden_states, *rest = joined.chunk(1 + self.config.mtp_num_layers)
            further = tuple(rest)
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if shares else None,
            context=output_processor_context,
            further_states=further,
        )


class MTPLoss:
    """Loss and metrics of the MTP layers of one optimizer update.

    Args:
        section: `policy.megatron_cfg`, with MTP layers.
        head_options: as in `RowScorer`.
    """

    def __init__(self, section: MegatronConfig, head_options: dict[str, Any], device: torch.device) -> None:
        self.num_depths = section.mtp_num_layers
        """Number D of MTP layers."""
        self._factor, self._detached = section.mtp_loss_scaling_factor, section.mtp_detach_heads
        self._head_options = head_options
        self._tokens = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._counts_D = torch.zeros(self.num_depths, dtype=torch.float64, device=device)
        self._sums_D2 = torch.zeros(self.num_depths, 2, dtype=torch.float64, device=device)

    def begin(self, microbatches: Sequence[RankInputs]) -> None:
        """Count the tokens of all microbatches of an update, in a collective call of ranks with different tokens."""
        counts = [[len(tokens.targets_n) for tokens in inputs.further] for inputs in microbatches]
        self._counts_D = torch.tensor(counts, dtype=torch.float64, device=self._counts_D.device).sum(0)
        dist.all_reduce(self._counts_D, group=self._tokens)
        self._sums_D2.zero_()

    def attached(
        self, hidden_kD: Tensor, states: Sequence[Tensor], weight_VD: Tensor, further: Sequence[FurtherTokens]
    ) -> Tensor:
        """Compute the MTP loss. Return the policy's hidden states, with the loss attached to their backward pass.

        Args:
            hidden_kD: the policy's hidden states at the scored positions.
            states: for each depth, the hidden states `[n, D]` from which the layer makes predictions.
            weight_VD: weight of the output head, or this rank's rows of it.
            further: the tokens of each depth.
        """
        weight = weight_VD.detach() if self._detached else weight_VD
        losses = [self._loss(depth, states[depth], weight, tokens.targets_n) for depth, tokens in enumerate(further)]
        scaled = torch.stack(losses).sum() * (self._factor / self.num_depths)
        return MTPLossAutoScaler.apply(hidden_kD, scaled)

    def _loss(self, depth: int, hidden_nD: Tensor, weight: Tensor, targets_n: Tensor) -> Tensor:
        logprobs_n, _ = token_logprobs(hidden_nD, weight, targets_n, **self._head_options)
        _, ids_n1 = topk_logits(hidden_nD.detach(), weight.detach(), TopK(1), **self._head_options)
        loss = -logprobs_n.sum()
        self._sums_D2[depth] += torch.stack([loss.detach().double(), (ids_n1[:, 0] == targets_n).sum()])
        return loss / self._counts_D[depth].clamp(min=1).to(loss.dtype)

    def end_update(self) -> dict[str, float]:
        """Return the metrics of the update, equal on all ranks. The call is collective."""
        sums = self._sums_D2.clone()
        for group in (self._tokens, self._stages):
            dist.all_reduce(sums, group=group)
        loss_D, agreeing_D = (sums / self._counts_D.clamp(min=1)[:, None]).T.tolist()
        metrics = {"mtp_loss": sum(loss_D) / self.num_depths}
        for depth, agreement in enumerate(agreeing_D, start=1):
            name = "mtp_agreement" if self.num_depths == 1 else f"mtp_agreement_{depth}"
            metrics[name] = agreement
        return metrics
