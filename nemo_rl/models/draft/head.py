"""Define the draft model as a module (an EAGLE-3 head), and read and write its files.

    hidden states of tapped layers of the policy  ─► fc ─┐
    embedding of the next token                   ───────┴► decoder layers ─► norm ─► lm_head

At position t the draft model reads the policy's hidden states at t and the token t + 1, and predicts token t + 2.
Parameters have the names of published heads, which vLLM loads. Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

Files in a checkpoint (W = weights folder, O = optimizer folder):

    W/draft/            config.json and model.safetensors, with the names of published heads
    O/draft.pt          moments of the draft model's optimizer, by parameter name

One rank writes whole tensors and every rank reads its part, so a checkpoint can be read on any number of ranks.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.attention import AttentionPlan, Scoring, attend
from nemo_rl.models.draft.shape import DraftShape, in_module, published
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.models.training.torch_backend import Write
from nemo_rl.utils.errors import CheckpointError

EMBEDDING = "embed_tokens.weight"
"""Name of the embedding in the files of some heads. The policy's embedding is used instead."""
TO_TARGET = "d2t"
"""Name of the tensor with the difference between policy id and draft id of each token that can be proposed."""


class _Attention(nn.Module):
    def __init__(self, shape: DraftShape, input_size: int) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor, plan: AttentionPlan) -> Tensor:
        query, key, value = (
            projection(hidden_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, cos_BTE, sin_BTE), _rotated(key, cos_BTE, sin_BTE)
        out: Tensor = self.o_proj(attend(query, key, value, plan, Scoring()).transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return out


class _Layer(nn.Module):
    """A decoder layer. The first one also reads the embedding of the next token."""

    def __init__(self, shape: DraftShape, *, first: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.first, self.norm_before_residual = first, shape.norm_before_residual
        if first:
            self.hidden_norm = nn.RMSNorm(width, eps)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(shape, 2 * width if first else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = _FeedForward(shape)

    def forward(
        self, hidden_BTD: Tensor, embeds_BTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor, plan: AttentionPlan
    ) -> Tensor:
        residual = hidden_BTD
        if self.first:
            hidden_BTD = self.hidden_norm(hidden_BTD)
            residual = hidden_BTD if self.norm_before_residual else residual
            hidden_BTD = torch.cat([self.input_layernorm(embeds_BTD), hidden_BTD], -1)
        else:
            hidden_BTD = self.input_layernorm(hidden_BTD)
        residual = residual + self.self_attn(hidden_BTD, cos_BTE, sin_BTE, plan)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class DraftHead(nn.Module):
    """The draft model, without the policy's embedding and without a loss."""

    d2t: Tensor | None
    """`[draft_vocab_size]` int64: policy's id minus own id of each token that can be proposed. None if all can be."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.target_hidden_size * len(shape.tapped_layers), shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(_Layer(shape, first=number == 0) for number in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        own = None if shape.proposes_all else torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
        self.register_buffer(TO_TARGET, own)

    def forward(
        self,
        tapped_BTD: Tensor,
        embeds_BTD: Tensor,
        position_ids_BT: Tensor,
        plan: AttentionPlan,
        places_K: Tensor,
    ) -> Tensor:
        """Return the normalized hidden states `[K, D]` that `lm_head` turns into logits.

        Args:
            tapped_BTD: hidden states of the tapped layers at each position, concatenated along the last dimension.
            embeds_BTD: embedding of the token after each position.
            position_ids_BT: position of each token in its sequence.
            plan: the tokens of a row that each token sees.
            places_K: indices into the flattened `[B * T]` positions for which hidden states are returned.
        """
        cos, sin = self._rotation(position_ids_BT, tapped_BTD.dtype)
        hidden = self.fc(tapped_BTD)
        for layer in self.layers:
            hidden = layer(hidden, embeds_BTD, cos, sin, plan)
        out: Tensor = self.norm(hidden.flatten(0, 1).index_select(0, places_K))
        return out

    def _rotation(self, position_ids_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B, T, head_dim]` of the rotary position embedding."""
        dim = self.shape.head_dim
        steps = torch.arange(0, dim, 2, device=position_ids_BT.device, dtype=torch.float32) / dim
        angles = position_ids_BT[..., None].float() * self.shape.rope_theta**-steps
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def target_ids(self) -> Tensor | None:
        """Return the policy's ids `[draft_vocab_size]` of the tokens that can be proposed, or None for all tokens."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def draw(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Initialize the weights as in a Llama model: projections from a normal distribution, norms with 1."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _rotated(states_BHTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    first, second = states_BHTE.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return states_BHTE * cos_BTE[:, None] + turned * sin_BTE[:, None]


logger = logging.getLogger(__name__)

FOLDER, MOMENTS = "draft", "draft.pt"
_NOT_READ = ("t2d",)
"""Names of tensors that are not read. `t2d` marks the tokens that can be proposed, which `d2t` also defines."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def read_weights(head: DraftHead, folder: Path) -> None:
    """Read the weights of a folder into a draft model in place. The call is collective.

    Raises:
        CheckpointError: the folder lacks a tensor or has an unknown one, or a tensor has another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    tensors = TensorFiles(files)
    stored = {in_module(name): name for name in tensors if name not in _NOT_READ}
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    stored.pop(EMBEDDING, None)
    if head.shape.proposes_all:
        stored.pop(TO_TARGET, None)
    lacking = wanted.keys() - stored.keys()
    if not files or lacking:
        raise CheckpointError(
            f"{folder} is not a draft model of this kind: it lacks {', '.join(sorted(lacking)[:5]) or '*.safetensors'}."
        )
    unknown = stored.keys() - wanted.keys()
    if unknown:
        raise CheckpointError(f"{folder} has tensors that the draft model lacks: {', '.join(sorted(unknown)[:5])}.")
    for name, source in stored.items():
        shape = tuple(tensors.like(source).shape)
        if shape != wanted[name]:
            raise CheckpointError(f"{folder}: {source} has shape {shape}, not {wanted[name]}.")
    read: dict[str, Any] = {name: tensors.read(source) for name, source in stored.items()}
    set_model_state_dict(head, read, options=StateDictOptions(full_state_dict=True, strict=False))


def prepared_draft(head: DraftHead, optimizer: Optimizer, paths: CheckpointPaths) -> Iterator[Write]:
    """Yield functions that write the draft model's files from copies of its state. The call is collective.

    Args:
        paths: folders of the checkpoint; without an optimizer folder only the weights are written.
    """
    yield partial(_write_weights, head, _copies(get_model_state_dict(head, options=_WHOLE)), paths.weights / FOLDER)
    if paths.optimizer is not None:
        state = _copies(get_optimizer_state_dict(head, optimizer, options=_WHOLE)) if optimizer.state else {}
        yield partial(_write_moments, state, paths.optimizer / MOMENTS)


def load_draft(head: DraftHead, optimizer: Optimizer, paths: CheckpointPaths) -> None:
    """Read the files of `prepared_draft`, if the checkpoint has a draft model. The call is collective.

    Raises:
        CheckpointError: the draft model in the checkpoint has another shape.
    """
    folder = paths.weights / FOLDER
    if not folder.is_dir():
        logger.warning("%s has no draft model (policy.draft): it starts with its first weights.", paths.weights)
        return
    read_weights(head, folder)
    if paths.optimizer is not None and (paths.optimizer / MOMENTS).exists():
        state = load_plain(paths.optimizer / MOMENTS)
        if state:
            set_optimizer_state_dict(head, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _copies(value: Any) -> Any:
    """Copy dicts, lists and tensors, so that later updates do not change them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copies(below) for key, below in value.items()}
    return [_copies(below) for below in value] if isinstance(value, list) else value


def _write_weights(
    head: DraftHead, tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    shape = head.shape
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            shape.save_config(folder)
            named = {published(name, shape.num_layers): tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _write_moments(state: dict[str, Any], file: Path, group: dist.ProcessGroup | None = None) -> None:
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
