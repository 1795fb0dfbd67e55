"""Run a plain Hugging Face model as an `Engine`.

`HfEngine` decodes one left-padded batch after another with the cache of `transformers`. When it is idle, all waiting
requests form a batch. Later requests wait for the next batch. The rows of a batch are aligned at the right, and each
step adds a token to every row until all rows are finished. It is simple, small and exact, but slow, and serves every
architecture.

`ContinuousHfEngine` reads one packed row of new tokens in a pass, with the attention of the trainer and a cache of its
own (`continuous.TokenCache`). With `row_invariance`, its log-probabilities have the bits of the trainer's.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, override

import torch
from torch import Tensor
from transformers import DynamicCache

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.data.images.rows import require_images
from nemo_rl.data.model_rows import RowInputs, completed, forward_arguments, has_position_rule, position_ids
from nemo_rl.files.trusted_code import may_run
from nemo_rl.host.row_invariance import linear_in_parts, parts_of_sums, rows_are_alike
from nemo_rl.models.accepted_rows import require_parameters
from nemo_rl.models.adapters.lora_linear import adapter_parameters, apply_lora
from nemo_rl.models.adapters.slots import AdapterSlots, head_update, put_slots
from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.generation.continuous import ContinuousEngine, TokenCache
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest
from nemo_rl.models.generation.rows import RowsEngine, by_adapter
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.models.huggingface.checkpoint_names import converts, in_memory
from nemo_rl.models.huggingface.layers import body, decoder_layers, recorded_outputs
from nemo_rl.models.huggingface.load import attention_of_parts, auto_class, files_of, hold_in_float32, load_model_config
from nemo_rl.models.huggingface.logits import find_transform, last_logits
from nemo_rl.models.huggingface.probe_model import small_probe_model
from nemo_rl.models.huggingface.recurrent import has_states, use_configured_time_steps
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.models.huggingface.tensor_plans import made_without_weights, rows_divided
from nemo_rl.models.training.tensor_checks import ANOTHER_COPY, require_finite
from nemo_rl.utils.errors import ConfigError, DataError, GenerationError


class FurtherInputs(NamedTuple):
    """Rows of a batch with inputs besides the tokens."""

    tokens: list[list[int]]
    """Tokens of prompt and response so far, for each row."""
    column: list[RowInputs]
    """Inputs of each row."""


class BatchedEngine(RowsEngine):
    """A `RowsEngine` with a cache for one batch."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        super().__init__(settings, vocab_size)
        self._next_ids: list[int] | None = None
        """Token ids that the rows read next. If None, the rows read all of their tokens."""

    @property
    def further_inputs(self) -> FurtherInputs | None:
        """Return the inputs of the rows that `read` or `advance` processes, or None if there are none."""
        column = [row.request.row_inputs for row in self._active]
        if all(inputs is None for inputs in column):
            return None
        return FurtherInputs([row.tokens for row in self._active], completed(column))

    @abstractmethod
    def read(self, rows: list[list[int]]) -> Tensor:
        """Free the previous batch, start a batch with these tokens, and return `[b, V]` logits."""

    @abstractmethod
    def advance(self, token_ids: list[int]) -> Tensor:
        """Read one more token of each row, and return `[b, V]` logits for the next tokens."""

    @abstractmethod
    def forget(self) -> None:
        """Free the batch's cache."""

    @override
    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if not self._active:
            self._active, *later = by_adapter(self._waiting)
            self._waiting = list(chain.from_iterable(later))
        with self.computing_with(self._active[0].adapter):
            if self._next_ids is None:
                logits_bV = self.read([row.tokens for row in self._active])
            else:
                logits_bV = self.advance(self._next_ids)
        written = [place for place, row in enumerate(self._active) if row.finish_reason is None]
        rows = [self._active[place] for place in written]
        self.extend(rows, logits_bV[written])
        self._next_ids = [row.last_token for row in self._active]
        return self.take_finished(rows)

    def drop_finished(self) -> None:
        """Keep finished rows in the batch until all rows are finished (`RowsEngine.drop_finished`)."""
        if all(row.finish_reason is not None for row in self._active):
            self._active, self._next_ids = [], None
            self.forget()

    def finish_loading(self, *, changed: bool) -> list[str]:
        """Activate the loaded weights. Unfinished rows are read again (`SteppedEngine.finish_loading`)."""
        unbound = self.put_in_force()
        if changed:
            self._active = [row for row in self._active if row.finish_reason is None]
            self._next_ids = None
        return unbound


class HfWeights:
    """A Hugging Face model that receives weights.

    Args:
        settings: Settings of the engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._device = torch.device(settings.device)
        kind: Any = auto_class(load_model_config(settings.model_name))
        files = files_of(settings.model_name)
        model: Any = kind.from_pretrained(
            files,
            dtype=getattr(torch, settings.precision),
            trust_remote_code=may_run(files),
            **settings.hf_overrides,
        )
        hold_in_float32(model, model.dtype)
        fix_rotary_frequencies(model, settings.max_model_len)
        use_configured_time_steps(model)
        self._model = model.to(self._device).eval()
        require_finite(dict(model.named_parameters()), f"the model {settings.model_name}", ANOTHER_COPY)
        self._slots = put_slots(model) if settings.holds_adapters else AdapterSlots({})
        if settings.lora is not None:
            apply_lora(model, settings.lora, settings.seed)
        self._synced = frozenset(adapter_parameters(model))
        """Names of the parameters that a sync sends. Empty if it sends all."""
        self._adapters: dict[str, AdapterTensors] = {}
        self._received: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        size: int = self._model.get_input_embeddings().weight.shape[0]
        return size

    def add_adapter(self, name: str, adapter: AdapterTensors) -> None:
        """Hold an adapter for requests that name it (`Engine`)."""
        self._adapters[name] = adapter.copied(self._device)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter (`Engine`)."""
        self._adapters.pop(name, None)

    def adapter_of(self, request: GenerationRequest) -> AdapterTensors | None:
        """Return the adapter of a request (`RowsEngine.adapter_of`)."""
        if request.adapter is not None and request.adapter not in self._adapters:
            raise GenerationError(f"The engine has no adapter {request.adapter!r}.")
        return None if request.adapter is None else self._adapters[request.adapter]

    def computing_with(self, adapter: AdapterTensors | None) -> AbstractContextManager[None]:
        """Compute with an adapter in a block (`RowsEngine.computing_with`)."""
        return self._slots.using(adapter)

    def start_loading(self) -> None:
        """Prepare to receive every tensor (`SteppedEngine.start_loading`)."""
        self._received, self._held = set(), {}

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the new tensors. Those that are converted together are kept until all have arrived."""
        if converts(self._model) and not self._synced:
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

    def put_in_force(self) -> list[str]:
        """Complete the loaded weights, where tied parameters count once (`RowsEngine.put_in_force`)."""
        self._copy(in_memory(self._model, list(self._held), self._held.pop))
        expected = self._synced or {name for name, _ in self._model.named_parameters()}
        return sorted(expected - self._received)

    @torch.inference_mode()
    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return a prompt's hidden states after each layer (`Engine.layer_outputs`)."""
        with recorded_outputs(decoder_layers(self._model)) as outputs:
            self._model(torch.tensor([token_ids], device=self._device), use_cache=False)
        return outputs

    async def sleep(self) -> None:
        """Move the weights to the host (`Engine.sleep`)."""
        self._model.to("cpu")

    async def wake_up(self) -> None:
        """Move the weights to the device (`Engine.wake_up`)."""
        self._model.to(self._device)


class HfEngine(HfWeights, BatchedEngine):
    """One Hugging Face model, which reads left-padded batches."""

    accepts_inputs = True

    def __init__(self, settings: EngineSettings) -> None:
        HfWeights.__init__(self, settings)
        BatchedEngine.__init__(self, settings, self.vocab_size)
        self._cache: DynamicCache | None = None
        self._mask = self._position_ids = torch.empty(0)

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """Queue a request. The model's body must have parameters for all inputs of the row."""
        try:
            require_images(request.prompt_token_ids, request.row_inputs, self._media_tokens)
            if request.row_inputs is not None:
                require_parameters(body(self._model), request.row_inputs.argument_names)
        except (ConfigError, DataError) as error:
            raise GenerationError(str(error)) from error
        super().add_request(request_id, request)

    @override
    def read(self, rows: list[list[int]]) -> torch.Tensor:
        self._cache = DynamicCache(config=self._model.config)
        width = max(len(row) for row in rows)
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for number, row in enumerate(rows):
            input_ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        self._mask = mask.to(self._device)
        self._position_ids = (mask.cumsum(-1) - 1).clamp(min=0).to(self._device)
        further = self.further_inputs
        if further is None:
            return self._logits(input_ids)
        self._place(further, width)
        arguments = forward_arguments(further.column)
        return self._logits(input_ids, **{name: values.to(self._device) for name, values in arguments.items()})

    @override
    def advance(self, token_ids: list[int]) -> torch.Tensor:
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._position_ids = self._position_ids[..., -1:] + 1
        if (further := self.further_inputs) is not None:
            self._place(further, self._mask.shape[1])
        return self._logits(torch.tensor(token_ids)[:, None])

    def _place(self, further: FurtherInputs, width: int) -> None:
        """Set the positions of the tokens that are read next, if a row has a position rule."""
        if has_position_rule(further.column):
            rows = [torch.tensor(tokens) for tokens in further.tokens]
            num_read = self._position_ids.shape[-1]
            self._position_ids = position_ids(rows, further.column, width, "left")[..., -num_read:].to(self._device)

    def _logits(self, input_ids: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=self._mask,
            position_ids=self._position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **further,
        )
        logits_bV: torch.Tensor = output.logits[:, -1]
        return logits_bV

    @override
    def forget(self) -> None:
        self._cache = None


class ContinuousHfEngine(HfWeights, ContinuousEngine):
    """One Hugging Face model, which reads packed rows with the attention of the trainer.

    Raises:
        GenerationError: The cache has less room than the longest row needs.
    """

    def __init__(self, settings: EngineSettings) -> None:
        HfWeights.__init__(self, settings)
        self.batch_invariant = rows_are_alike()
        """Whether answers do not depend on other requests (`Engine`)."""
        self._transform = find_transform(small_probe_model(self._model))
        if parts_of_sums() > 1:
            for module in rows_divided(self._model):
                module.forward = partial(_add_parts, module)
        self._model.set_attn_implementation(attention_of_parts(self._model.config, register_varlen_attention()))
        size = settings.kv_cache_bytes
        assert size is not None, "the configuration allows this engine on CPUs only"
        cache = TokenCache(size // self._token_bytes(), self._device)
        ContinuousEngine.__init__(self, settings, self.vocab_size, cache)

    @torch.inference_mode()
    def _token_bytes(self) -> int:
        """Return the bytes of one token in the cache, which a pass with one token shows."""
        cache = TokenCache(1, self._device)
        cache.enter("a", [0])
        self._logits(cache.read({"a": []}))
        return cache.num_bytes

    def _logits(self, step: CachedPass) -> Tensor:
        row = {"input_ids": step.token_ids[None], "position_ids": step.positions[None], "cached_pass": step}
        return last_logits(self._model, row, step.last, self._transform, head_update)

    @override
    def read(self, rows: Mapping[str, Sequence[int]]) -> Tensor:
        return self._logits(self._cache.read(rows))


def _add_parts(module: Any, x: Tensor) -> Tensor:
    return linear_in_parts(x, module.weight, module.bias)


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Check that the engine can serve the model (`registry.EngineKind.check`)."""
    if not policy.zero_mismatch:
        return
    model = load_model_config(policy.model_name, policy.hf_config_overrides)
    if has_states(model):
        raise ConfigError(
            f"policy.zero_mismatch=true is for models whose tokens interact in attention only, and {policy.model_name} "
            "has layers with states. Set it to false."
        )
    if policy.dtensor_cfg.enabled and policy.dtensor_cfg.tensor_parallel_size > 1:
        rows_divided(made_without_weights(model))
