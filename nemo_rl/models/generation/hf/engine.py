"""A plain Hugging Face model behind our `Engine` protocol.

Requests waiting when the engine is idle form one left-padded batch that decodes with a key-value cache
until all its rows are done; later requests wait for the next batch. Simple and slow, exact and small.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from nemo_rl.models.generation.hf.sampling import bad_word_ids, banned_tokens, draw
from nemo_rl.models.generation.interfaces import (
    EngineSettings,
    FinishReason,
    GenerationRequest,
)
from nemo_rl.models.generation.stepped import Finished, SteppedEngine
from nemo_rl.models.huggingface.checkpoint_names import converts, in_memory
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.utils.errors import GenerationError


@dataclass
class _Row:
    request_id: str
    request: GenerationRequest
    generator: torch.Generator
    bad_words: list[list[int]]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class HfEngine(SteppedEngine):
    """One Hugging Face model."""

    def __init__(self, settings: EngineSettings):
        super().__init__()
        self._device = torch.device(settings.device)
        self._max_model_len = settings.max_model_len
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model_name, dtype=getattr(torch, settings.precision), **settings.hf_overrides
        )
        fix_rotary_frequencies(model, settings.max_model_len)
        self._model = model.to(self._device).eval()
        self._vocab_size = self._model.get_input_embeddings().weight.shape[0]
        self._tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_name)
        self._waiting: list[_Row] = []
        self._active: list[_Row] = []
        self._cache: DynamicCache | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._received: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """See `Engine.add_request`."""
        ids = request.prompt_token_ids
        if not 0 < len(ids) < self._max_model_len:
            raise GenerationError(f"A prompt of {len(ids)} tokens does not fit the context of {self._max_model_len}.")
        if not all(0 <= token < self._vocab_size for token in ids):
            raise GenerationError(f"A prompt holds token ids outside 0..{self._vocab_size - 1}.")
        generator = torch.Generator().manual_seed(request.seed)
        bad_words = bad_word_ids(request.sampling.bad_words, self._tokenizer)
        self._waiting.append(_Row(request_id, request, generator, bad_words))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """See `SteppedEngine.step`."""
        if not self._active:
            self._active, self._waiting = self._waiting, []
            self._read_all()
        output = self._model(**self._inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        written = [row for row in self._active if row.finish_reason is None]
        next_ids = [
            self._extend(row, logits) if row.finish_reason is None else row.token_ids[-1]
            for row, logits in zip(self._active, output.logits[:, -1], strict=True)
        ]
        self._prepare_next(next_ids)
        return self._take_finished(written)

    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        """See `SteppedEngine.remove_requests`; their rows stay in the batch until it is done."""
        rows = [row for row in (*self._waiting, *self._active) if row.request_id in request_ids]
        self._waiting = [row for row in self._waiting if row.request_id not in request_ids]
        for row in rows:
            row.finish_reason = "abort"
        return self._take_finished(rows)

    def num_tokens(self, request_id: str) -> int:
        """See `SteppedEngine.num_tokens`."""
        return next(len(row.token_ids) for row in (*self._active, *self._waiting) if row.request_id == request_id)

    def _read_all(self) -> None:
        """Start the batch, or start it anew: the next step reads all tokens of its rows."""
        self._cache = DynamicCache(config=self._model.config)
        prompts = [row.request.prompt_token_ids + row.token_ids for row in self._active]
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._inputs = {
            "input_ids": input_ids.to(self._device),
            "attention_mask": mask.to(self._device),
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0).to(self._device),
        }

    def _extend(self, row: _Row, logits_V: torch.Tensor) -> int:
        sampling = row.request.sampling
        token, logprob = draw(logits_V, sampling, row.generator, banned_tokens(row.bad_words, row.token_ids))
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        total = len(row.request.prompt_token_ids) + len(row.token_ids)
        if token in sampling.stop_token_ids or self._hits_stop_string(row):
            row.finish_reason = "stop"
        elif len(row.token_ids) >= sampling.max_new_tokens or total >= self._max_model_len:
            row.finish_reason = "length"
        return token

    def _hits_stop_string(self, row: _Row) -> bool:
        if not row.request.sampling.stop_strings:
            return False
        text = self._tokenizer.decode(row.token_ids)
        return any(stop in text for stop in row.request.sampling.stop_strings)

    def _prepare_next(self, next_ids: list[int]) -> None:
        mask = self._inputs["attention_mask"]
        position_ids = self._inputs["position_ids"]
        self._inputs = {
            "input_ids": torch.tensor(next_ids, device=self._device)[:, None],
            "attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1),
            "position_ids": position_ids[:, -1:] + 1,
        }

    def _take_finished(self, rows: list[_Row]) -> list[Finished]:
        """Those of the rows that are over; the batch ends with the last of its rows."""
        if all(row.finish_reason is not None for row in self._active):
            self._active, self._cache = [], None
        return [
            Finished(row.request_id, row.token_ids, row.logprobs, row.finish_reason)
            for row in rows
            if row.finish_reason is not None
        ]

    def start_loading(self) -> None:
        """See `SteppedEngine.start_loading`."""
        self._received, self._held = set(), {}

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """See `Engine.load_tensors`; tensors that take another shape in the model wait for the last one."""
        if converts(self._model):
            self._held |= {name: tensor.clone() for name, tensor in tensors}
        else:
            self._copy(tensors)

    @torch.no_grad()
    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self._model.state_dict()
        for name, tensor in tensors:
            if name not in own:
                raise GenerationError(f"The engine's model has no tensor named {name}.")
            own[name].copy_(tensor)
            self._received.add(name)

    def finish_loading(self, *, changed: bool) -> list[str]:
        """See `SteppedEngine.finish_loading`; tied parameters count once."""
        self._copy(in_memory(self._model, list(self._held), self._held.pop))
        if changed and self._active:
            self._active = [row for row in self._active if row.finish_reason is None]
            self._read_all()
        expected = {name for name, _ in self._model.named_parameters()}
        return sorted(expected - self._received)

    @torch.inference_mode()
    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """See `Engine.layer_outputs`."""
        with recorded_outputs(decoder_layers(self._model)) as outputs:
            self._model(torch.tensor([token_ids], device=self._device), use_cache=False)
        return outputs

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._model.to("cpu")

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
        self._model.to(self._device)
