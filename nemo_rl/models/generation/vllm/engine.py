"""Adapt vLLM's in-process engine to the `Engine` protocol, for the CPU and GPU builds.

Other modules contain the arguments (`arguments`), weight loading (`running_model`), the other ranks of an engine
(`ranks`, `replicas`) and responses with a grammar (`grammars`). Invariant: unless `logprobs_mode` is changed,
log-probabilities are those of the sampled distribution, so they agree with a trainer that divides logits by the same
temperature. With a grammar, they are those of the distribution without the grammar.
"""

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, override

import torch
from transformers import PreTrainedTokenizerBase
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import uniproc_executor

from nemo_rl.data.images.rows import RowImages, require_images
from nemo_rl.data.routed_experts import Experts
from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import (
    EngineSettings,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    engine_of,
)
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.models.generation.stepped import Finished, SteppedEngine
from nemo_rl.models.generation.vllm.adapters.check import adapted_layers
from nemo_rl.models.generation.vllm.adapters.held import (
    HeldAdapters,
    SentAdapter,
    clear_new_blocks,
    require_layers,
)
from nemo_rl.models.generation.vllm.adapters.products import compute_own_products
from nemo_rl.models.generation.vllm.arguments import engine_arguments, sampling_params, warn_of_weights_only
from nemo_rl.models.generation.vllm.concurrency import CacheWatch
from nemo_rl.models.generation.vllm.cpu_build import (
    repair_speculation,
    rotate_each_head,
    round_activations,
    serve_experts_without_gate,
)
from nemo_rl.models.generation.vllm.drafting import (
    SpeculationWatch,
    described,
    keep_own_heads,
    models_of,
    propose_to_the_end,
)
from nemo_rl.models.generation.vllm.experts import ExpertReports, with_experts
from nemo_rl.models.generation.vllm.grammars import REFUSED, ResponseScoring, is_scored, of_tokens, reading
from nemo_rl.models.generation.vllm.prompts import prompt_of
from nemo_rl.models.generation.vllm.recurrent import clear_states
from nemo_rl.models.generation.vllm.running_model import (
    altered_weights,
    begin_reload,
    finish_reload,
    load_tensors,
    non_finite_parameters,
    record_reads,
    refusing_non_finite,
    start_recording,
    stop_recording,
    take_reads,
)
from nemo_rl.models.generation.vllm.speculation import proposes_with_latent_attention, speculation_of
from nemo_rl.models.generation.vllm.zero_mismatch.operations import compute_as_the_trainer
from nemo_rl.models.generation.vllm.zero_mismatch.trainer_modules import CLASSES
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.optimizations.switch import is_on
from nemo_rl.optimizations.vllm import ThreadChoice, cores_of_each, inspect_here, packing_threads, start_threads
from nemo_rl.utils.errors import DataError, GenerationError, NonFiniteError
from nemo_rl.weight_sync.parts import BlocksByName

logger = logging.getLogger(__name__)


class VllmEngine(SteppedEngine):
    """A whole vLLM engine, worker 0 of an engine with several workers, or the first worker of a replica."""

    accepts_grammars = True

    def __init__(self, settings: EngineSettings):
        super().__init__()
        self._can_sleep, self._sleep_level = settings.can_sleep, settings.sleep_level
        self._recomputes_cache, self._num_updates = settings.recomputes_cache, 0
        self._max_model_len = settings.max_model_len
        self._tensor_parallel_size = settings.tensor_parallel_size
        self._place = engine_of(int(os.environ["RANK"]), settings.num_workers)[1] if settings.num_workers > 1 else 0
        self._vllm_ids: dict[str, str] = {}
        self._scoring = ResponseScoring()
        self.batch_invariant = settings.zero_mismatch or (settings.device != "cpu" and envs.VLLM_BATCH_INVARIANT)
        """Whether answers do not depend on other requests (`Engine`)."""
        adapted = list(adapted_layers(settings))
        with described(settings.draft) as draft_folder:
            self._build(settings, engine_arguments(settings, draft_folder, adapted))
        require_layers(self._engine, adapted)
        self._held = HeldAdapters(self._engine) if settings.holds_adapters else None
        self._sent = None if settings.lora is None else SentAdapter(self._engine, settings.lora, adapted)
        if settings.quantization is not None and settings.quantization.simulated:
            self._engine.collective_rpc(partial(round_activations, quantization=settings.quantization))
        on_cpu = settings.device == "cpu"
        if settings.quantization is not None and not on_cpu:
            warn_of_weights_only(settings.quantization, torch.cuda.get_device_capability())
        self._experts = ExpertReports(self._engine, on_cpu=on_cpu) if settings.reports_experts else None
        self._cache = CacheWatch(self._scheduler)
        self._media_tokens = settings.media_tokens
        tokenizer: Any = self._engine.renderer.tokenizer
        self._never: list[str] = tokenizer.convert_ids_to_tokens(settings.media_tokens) if settings.media_tokens else []
        self._speculation = self._watch_speculation(settings)
        self._threads = self._start_threads(settings)

    def _build(self, settings: EngineSettings, arguments: EngineArgs) -> None:
        """Build vLLM's engine."""
        keep_own_heads()
        if settings.holds_adapters:
            clear_new_blocks()
        if settings.device == "cpu":
            if is_on("model_inspection", settings.optimizations):
                own = load_model_config(settings.model_name, settings.hf_overrides).architectures or ()
                inspect_here(CLASSES if arguments.model_impl == "transformers" else own)
            repair_speculation()
            rotate_each_head()
            serve_experts_without_gate()
            compute_own_products()
            if settings.zero_mismatch:
                compute_as_the_trainer()
            _fit_to_cpu(arguments)
        if hasattr(os, "memfd_create"):
            # # Without this, vLLM would leave a file in the temporary folder.
            uniproc_executor.get_file_store_init_method = _nameless_file
        # This usage context sets the batch limits that the arguments do not set. They are those of offline generation.
        with packing_threads(), refusing_non_finite(settings.model_name):
            self._engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)

    @override
    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        prompt_length, will_be_scored = len(request.prompt_token_ids), is_scored(request.sampling)
        # When vLLM reads prompt and response again to score them, it draws one more token.
        room = self._max_model_len - prompt_length - will_be_scored
        if room < 1:
            more = ", of which an answer of a demanded form needs 2" if will_be_scored else ""
            raise GenerationError(
                f"A prompt of {prompt_length} tokens leaves no room in the context of "
                f"{self._max_model_len}{more} (policy.generation.engine.max_model_len)."
            )
        images = None if request.row_inputs is None else request.row_inputs.images
        adapter = self._adapter_of(request)
        try:
            require_images(request.prompt_token_ids, request.row_inputs, self._media_tokens)
            params = self._sampling_params(request, room)
            self._submit(request_id, request.prompt_token_ids, params, images=images, adapter=adapter)
        except (VLLMValidationError, ValueError, DataError) as refusal:
            what = "vLLM refused a prompt" if request.sampling.grammar is None else REFUSED
            raise GenerationError(f"{what}: {refusal}") from refusal
        if self._held is not None and adapter is not None:
            self._held.note_start(request_id, adapter)
        if will_be_scored:
            self._scoring.prompts[request_id] = request.prompt_token_ids
            if images is not None:
                self._scoring.images[request_id] = images

    def try_request(self, request_id: str, request: GenerationRequest) -> str | None:
        """Call `add_request`, and return why it refuses the request, or None."""
        try:
            self.add_request(request_id, request)
        except GenerationError as refusal:
            return str(refusal)
        return None

    def add_adapter(self, name: str, adapter: AdapterTensors) -> None:
        """Hold an adapter for requests that name it (`Engine`)."""
        assert self._held is not None, "EngineSettings.holds_adapters"
        self._held.add(name, adapter)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter (`Engine`)."""
        assert self._held is not None, "EngineSettings.holds_adapters"
        self._held.drop(name)

    def _adapter_of(self, request: GenerationRequest) -> LoRARequest | None:
        """Return the adapter that answers a request.

        Raises:
            GenerationError: The engine does not have it, or cannot score a response with it.
        """
        if self._held is None and request.adapter is not None:
            raise GenerationError(f"This engine has no adapters, and the request names {request.adapter!r}.")
        if self._held is not None and is_scored(request.sampling):
            raise GenerationError("vLLM cannot score responses of a demanded form in an engine with adapters.")
        if self._held is not None and request.adapter is not None:
            return self._held.of_name(request.adapter)
        return None if self._sent is None else self._sent.request

    def _submit(
        self,
        request_id: str,
        token_ids: list[int],
        params: VllmSamplingParams,
        priority: int = 0,
        images: RowImages | None = None,
        adapter: LoRARequest | None = None,
    ) -> None:
        """Add a request. vLLM starts it before waiting requests with a larger `priority`."""
        salt = None if self._recomputes_cache else str(self._num_updates)  # share keys and values within one version
        prompt = prompt_of(token_ids, images, salt)
        add = partial(self._engine.add_request, lora_request=adapter, priority=priority)
        self._vllm_ids[request_id] = add(request_id, prompt, params)

    def _read(self, request_id: str) -> None:
        """Let vLLM read a drawn response before waiting requests, because a caller waits for the complete response."""
        images = self._scoring.images.get(request_id)
        tokens, adapter = self._scoring.tokens_to_read(request_id), None if self._sent is None else self._sent.request
        self._submit(request_id, tokens, reading(), priority=-1, images=images, adapter=adapter)

    def _sampling_params(self, request: GenerationRequest, room: int) -> VllmSamplingParams:
        eos: int | None = getattr(self._engine.renderer.tokenizer, "eos_token_id", None)
        return sampling_params(request.sampling, request.seed, room, eos, self._never)

    @override
    def step(self) -> list[Finished]:
        self._cache.begin_step()
        if self._threads is not None:
            self._threads.begin_step(reads_prompts=self._scheduler.get_request_counts()[1] > 0)
        outputs = [each for each in self._engine.step() if isinstance(each, RequestOutput) and each.finished]
        experts = {} if self._experts is None else self._experts.of_outputs(outputs, self._vllm_ids)
        finished = []
        for output in outputs:
            finished += self._taken(output, experts.get(output.request_id))
        if self._threads is not None:
            self._threads.end_step(has_more=bool(self._vllm_ids))
        self._cache.end_step(len(finished))
        return finished

    def finish_steps(self) -> list[Finished]:
        """Finish the batch that vLLM still computes after a step with async scheduling."""
        client: Any = self._engine.engine_core
        core = client.engine_core
        finished, step = list[Finished](), core.step_fn
        core.step_fn = partial(_finished_batch, core)
        try:
            while core.batch_queue:
                finished += self.step()
        finally:
            core.step_fn = step
        return finished

    def step_with_others(self) -> list[Finished]:
        """Step as one of several replicas, with exactly one forward pass (`replicas`)."""
        executor: Any = self._engine.model_executor
        before = executor.num_passes
        finished = self.step()
        if executor.num_passes == before:
            self._engine.collective_rpc("execute_dummy_batch")
        return finished

    def _taken(self, output: RequestOutput, experts: Experts | None) -> list[Finished]:
        """Return the response of an output. If it must be scored first, begin this and return None."""
        request_id = output.request_id
        del self._vllm_ids[request_id]
        if request_id in self._scoring.drawn:
            drawn = None if experts is None else experts[:-1]  # scoring draws another token
            return [with_experts(self._scoring.scored(output), drawn)]
        response = with_experts(self._finished(output), experts)
        if self._held is not None:
            self._held.note_end(request_id)
        if request_id not in self._scoring.prompts:
            return [response]
        if response.error is not None:
            self._scoring.forget(request_id)
            return [response]
        self._scoring.drawn[request_id] = response
        self._read(request_id)
        return []

    def _finished(self, output: RequestOutput) -> Finished:
        """Return the response of an output. If an adapter overflows, only its own requests fail."""
        try:
            return _finished(output)
        except NonFiniteError:
            failed = None if self._held is None else self._held.overflowed(output.request_id)
            if failed is None:
                raise
            return failed

    @override
    def take_load(self) -> EngineLoad:
        counts = None if self._speculation is None else self._speculation.take()
        return self._cache.take_load()._replace(speculation=counts)

    @override
    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        removed = []
        for request_id in request_ids:
            token_ids, logprobs = self.sampled_so_far(request_id)
            experts = self._experts_so_far(request_id, len(token_ids))
            removed.append(with_experts(Finished(request_id, token_ids, logprobs, "abort"), experts))
            self._scoring.forget(request_id)
            if self._held is not None:
                self._held.note_end(request_id)
        self._engine.abort_request([self._vllm_ids.pop(request_id) for request_id in request_ids], internal=True)
        return removed

    def _experts_so_far(self, request_id: str, num_sampled: int) -> Experts | None:
        """Return the experts of a running request, or None if they are not recorded."""
        vllm_id = self._vllm_ids[request_id]
        running = self._scheduler.requests.get(vllm_id)
        if self._experts is None or running is None or not num_sampled:
            return None
        num_tokens = running.num_prompt_tokens + num_sampled
        return self._experts.of_running(vllm_id, running.num_computed_tokens, num_tokens)

    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        """Return a request's tokens so far, or no tokens for a response that is scored at its end."""
        if request_id in self._scoring.prompts:
            return [], []
        state = self._state(request_id)
        token_ids = list(state.detokenizer.output_token_ids)
        try:
            return token_ids, of_tokens(token_ids, state.logprobs_processor.logprobs)
        except NonFiniteError:
            if self._held is None or self._held.overflowed(request_id) is None:
                raise
            return [], []

    @override
    def num_tokens(self, request_id: str) -> int:
        if request_id in self._scoring.drawn:
            return len(self._scoring.drawn[request_id].token_ids)
        num_tokens: int = self._state(request_id).detokenizer.num_output_tokens()
        return num_tokens

    def weights_not_finite(self) -> list[str]:
        """Return vLLM's names of weights that are not finite. Packed weights are not checked."""
        of_ranks = self._engine.collective_rpc(non_finite_parameters)
        found = [name for names in of_ranks for name in names]
        return list(dict.fromkeys([*found, *(self._sent.spoilt if self._sent is not None else [])]))

    def _start_threads(self, settings: EngineSettings) -> ThreadChoice | None:
        """Choose the number of threads of a one-process engine on CPUs, unless the run configures it."""
        if settings.device != "cpu" or settings.num_workers > 1 or "OMP_NUM_THREADS" in settings.env_vars:
            return None
        worker = self._engine.model_executor.driver_worker
        return start_threads(
            models_of(worker),
            worker.model_runner.model_config,
            cores_of_each(settings.workers_on_machine),
            adapts=is_on("engine_threads", settings.optimizations) and not settings.zero_mismatch,
        )

    def _watch_speculation(self, settings: EngineSettings) -> SpeculationWatch | None:
        """Count proposed and accepted tokens if the engine uses speculation."""
        if speculation_of(settings.engine_kwargs) is None:
            return None
        if settings.device == "cpu":
            self._engine.collective_rpc(propose_to_the_end)
        return SpeculationWatch(self._scheduler)

    @property
    def _scheduler(self) -> Any:
        client: Any = self._engine.engine_core
        return client.engine_core.scheduler

    def decode(self, token_ids: list[int]) -> str | None:
        """Decode tokens. Return None for other libraries' tokenizers, which may decode differently."""
        tokenizer = self._engine.renderer.tokenizer
        return sampled_text(tokenizer, token_ids) if isinstance(tokenizer, PreTrainedTokenizerBase) else None

    def _state(self, request_id: str) -> Any:
        """Return vLLM's state of a running request."""
        return self._engine.output_processor.request_states[self._vllm_ids[request_id]]

    @override
    def start_loading(self) -> None:
        if self._sent is not None:
            self._sent.begin()
            return
        with packing_threads():
            self._engine.collective_rpc(begin_reload)

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the new tensors. All other ranks load the tensors that they receive."""
        if self._sent is not None:
            self._sent.receive(tensors)
            return
        with packing_threads():
            load_tensors(self._engine.model_executor.driver_worker, tensors)

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        record_reads(self._engine.model_executor.driver_worker)

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        return take_reads(self._engine.model_executor.driver_worker)

    def finish_loading(self, *, changed: bool) -> list[str]:
        """Activate the weights. With `recomputes_cache`, vLLM computes running requests again."""
        with packing_threads():
            sent = self._sent
            of_ranks = self._engine.collective_rpc(finish_reload) if sent is None else [sent.finish()]
        if changed:
            self._num_updates += 1
            if self._recomputes_cache:
                self._engine.reset_prefix_cache(reset_running_requests=True)
                self._engine.collective_rpc(clear_states)
            if self._never:  # features of images are kept by the image's hash alone
                self._engine.reset_encoder_cache()
            for request_id in self._scoring.drawn:  # all tokens are scored by one version
                self._engine.abort_request([self._vllm_ids[request_id]], internal=True)
                self._read(request_id)
        return self._of_workers(of_ranks)

    def weights_not_as_sent(self) -> list[str]:
        """Return vLLM's names of weights that differ from what the last update sent (`recurrent`)."""
        if self._sent is not None:
            return []
        return self._of_workers(self._engine.collective_rpc(altered_weights))

    def _of_workers(self, of_ranks: list[list[str]]) -> list[str]:
        """Return the names of all ranks' weights, with the number of the worker unless it is 0."""
        named = [(name, place) for place, names in enumerate(of_ranks, start=self._place) for name in names]
        return [f"{name} of worker {place}" if place else name for name, place in named]

    @override
    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        return self.recorded_layers(token_ids, self.step)

    def recorded_layers(self, token_ids: list[int], step: Callable[[], list[Finished]]) -> list[torch.Tensor]:
        """Implement `layer_outputs`. The function `step` advances the engine."""
        self._engine.reset_prefix_cache()
        self._engine.collective_rpc(start_recording)
        try:
            self.add_request("layer_outputs", GenerationRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0))
            while not step():
                pass
        finally:
            of_ranks = self._engine.collective_rpc(stop_recording)
        # All ranks of a stage have the same hidden states.
        stages = of_ranks[:: self._tensor_parallel_size]
        if not all(stages):
            return []
        return [output[: len(token_ids)] for stage in stages for output in stage]

    @override
    async def sleep(self) -> None:
        self.fall_asleep()

    def fall_asleep(self) -> None:
        """Free memory. Weights go to host memory or, at level 2, are dropped like the cache."""
        if self._can_sleep and not self._engine.is_sleeping():
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=self._sleep_level)

    @override
    async def wake_up(self) -> None:
        self.awake()

    def awake(self) -> None:
        """Allocate memory again."""
        if self._can_sleep and self._engine.is_sleeping():
            self._engine.wake_up()
            self._engine.collective_rpc(clear_states)


def _finished_batch(core: Any) -> tuple[Any, bool]:
    """Take the results of the oldest running batch without scheduling another one, as a step of vLLM's core does."""
    sampled, scheduled, executed = core.batch_queue.pop()
    output = sampled.result()
    if output is None:
        executed.result()  # raises the error of a failure
        raise GenerationError("vLLM returned no tokens of a batch.")
    core._process_aborts_queue()
    return core.scheduler.update_from_output(scheduled, output), False


def _finished(output: RequestOutput) -> Finished:
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        return Finished(output.request_id, [], [], "abort", f"{REFUSED}; its log has the reason.")
    token_ids = list(completion.token_ids)
    reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
    return Finished(output.request_id, token_ids, of_tokens(token_ids, completion.logprobs), reason)


def _nameless_file() -> str:
    """Return the address of the store of a one-process engine: an unnamed file that ends with this process."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('vllm-store')}"


_TOKENS_PER_BLOCK = 32
"""Number of tokens in a block of keys and values on CPUs. Requests share only complete blocks of a prompt. Many prompts
are shorter than vLLM's default block of 128 tokens, so each of their samples would compute the prompt again."""


def _fit_to_cpu(arguments: EngineArgs) -> None:
    """Choose the size of blocks, and for latent attention the kernel. Recurrent layers share no prompts.

    The kernel supports float32 and weight updates. With AMX, vLLM would choose a kernel for bfloat16 only. vLLM chooses
    the kernel of the layers that propose tokens separately. Latent attention, and models with other layers than
    attention, keep vLLM's block size. Kernels for CPUs return no states within a prompt, so prompts with recurrent
    states cannot be shared.
    """
    model = arguments.create_model_config()
    kernel, is_latent = AttentionBackendEnum.CPU_MLA, model.use_mla
    if arguments.enable_prefix_caching is None and model.is_hybrid:
        logger.info("The model has recurrent layers: on CPUs, each sample computes its prompt (no prefix caching).")
        arguments.enable_prefix_caching = False
    if arguments.block_size is None and not is_latent and not model.is_hybrid:
        arguments.block_size = _TOKENS_PER_BLOCK
    if is_latent:
        arguments.attention_backend = kernel
    speculation = speculation_of({"speculative_config": arguments.speculative_config})
    if speculation is not None and proposes_with_latent_attention(speculation, is_latent):
        arguments.speculative_config = {**speculation.values, "attention_backend": kernel.name}
