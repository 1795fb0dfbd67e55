"""Generate whole batches with engines outside of a run, for programs written for NeMo RL.

`EngineGroup` samples the responses. This module converts a batch to requests, and their results to a batch. Invariant:
token ids and log-probabilities are those of the engine, padded.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from nemo_rl.config import ClusterConfig, EvalMasterConfig
from nemo_rl.config.schema.algorithms.evaluation import EvalGenerationConfig
from nemo_rl.data.model_rows import ROW_INPUTS, RowInputs
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.factory import check_engine_model, engine_settings, make_engines, sampling_params
from nemo_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.utils.errors import NotBuiltError
from nemo_rl.utils.seed import derive_seed

VllmConfig = EvalGenerationConfig
"""The section `policy.generation` with its own `model_name`, as NeMo RL's programs pass it to engines."""


class VllmGeneration:
    """Engines that load a model's weights themselves. `refit_policy_generation` replaces these by a policy's weights.

    Args:
        cluster: Cluster on which the engines run, with one worker per bundle.
        config: Section `policy.generation` with `model_name`. `backend` chooses the engine, despite the class name.
        name_prefix: Has no effect, because processes are named after the engine.
        workers_per_node: Must be None, because the bundles decide.
        seed: Seed of the sampling; each call derives other seeds from it.

    Raises:
        ConfigError: A key is wrong, or the model cannot be found.
        NotBuiltError: `workers_per_node` is given.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: EvalGenerationConfig | Mapping[str, Any],
        name_prefix: str = "vllm_policy",
        workers_per_node: int | list[int] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if workers_per_node is not None:
            raise NotBuiltError(
                "VllmGeneration(workers_per_node=...) is not built yet: make a cluster with the bundles."
            )
        self.config = EvalMasterConfig.build(generation=config).policy
        """A `policy` section with the model and its sampling."""
        self._tokenizer = get_tokenizer(self.config.tokenizer)
        self._sampling = sampling_params(self.config, self._tokenizer.eos_token_id, validation=False)
        self._seed, self._num_calls = seed, 0
        machines = cluster_config(cluster)
        check_engine_model(self.config, machines)
        settings = engine_settings(self.config, machines, seed, load_weights=True)
        self.engines = make_engines(settings, cluster, machines)
        """The engines."""

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Continue B prompts.

        Args:
            data: `input_ids [B, T]` right padded and `input_lengths [B]`; optional `stop_strings`, B lists or None, and
                `row_inputs`, B `RowInputs`.
            greedy: Whether to take the most likely token.

        Returns:
            The fields of `GenerationOutputSpec`.
        """
        rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        prompts = [ids[:length].tolist() for ids, length in rows]
        answers = self._answers(prompts, data.get("stop_strings"), greedy, data.get(ROW_INPUTS))
        return padded(prompts, answers, self._tokenizer.pad_token_id)

    def generate_text(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Continue the texts of B `prompts`, up to the optional `stop_strings`, and return `texts`."""
        prompts = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in data["prompts"]]
        answers = self._answers(prompts, data.get("stop_strings"), greedy)
        texts = [
            sampled_text(self._tokenizer, answer.token_ids) if answer.text is None else answer.text
            for answer in answers
        ]
        return BatchedDataDict({"texts": texts})

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Allocate the memory that `finish_generation` freed."""
        return self._on_all("wake_up")

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free memory until `prepare_for_generation` is called, if the engine supports it."""
        return self._on_all("sleep")

    def shutdown(self) -> bool:
        """Stop the engines."""
        self.engines.shutdown()
        return True

    def _on_all(self, method: str) -> bool:
        workers = self.engines.workers
        workers.get_all_worker_results(workers.run_all_workers_single_data(method), None, method)
        return True

    def _answers(
        self,
        prompts: list[list[int]],
        stops: list[list[str] | None] | None,
        greedy: bool,
        inputs: list[RowInputs] | None = None,
    ) -> list[GenerationResult]:
        self._num_calls += 1
        requests = []
        for row, ids in enumerate(prompts):
            more = tuple((stops[row] if stops else None) or ())
            sampling = replace(self._sampling, stop_strings=(*self._sampling.stop_strings, *more))
            if greedy:
                sampling = replace(sampling, temperature=0.0, top_k=None, top_p=1.0)
            seed = derive_seed(self._seed, "generation", self._num_calls, row)
            requests.append(GenerationRequest(ids, sampling, seed, row_inputs=inputs[row] if inputs else None))

        async def ask_all() -> list[GenerationResult]:
            return await asyncio.gather(*(self.engines.generate(request) for request in requests))

        return _finished(ask_all())


def cluster_config(cluster: RayVirtualCluster) -> ClusterConfig:
    """Build the `cluster` section that describes bundles, with default deadlines."""
    counts = cluster.bundle_counts
    kind = {} if cluster.use_gpus else {"device": "cpu"}
    gpus = max(counts) if cluster.use_gpus else 0
    return ClusterConfig.build(num_nodes=len(counts), gpus_per_node=gpus, ranks_per_node=max(counts), **kind)


def padded(
    prompts: list[list[int]], answers: list[GenerationResult], pad_token_id: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """Pad prompts and answers to tensors, as `GenerationOutputSpec` defines them."""
    lengths = [len(prompt) + len(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    shape = (len(lengths), max(lengths, default=0))
    output_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(shape)
    for index, (prompt, answer, length) in enumerate(zip(prompts, answers, lengths, strict=True)):
        output_ids[index, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        output_ids[index, len(prompt) : length] = torch.tensor(answer.token_ids)
        logprobs[index, len(prompt) : length] = torch.tensor(answer.logprobs)
    return BatchedDataDict(
        output_ids=output_ids,
        generation_lengths=torch.tensor([len(answer.token_ids) for answer in answers], dtype=torch.int64),
        unpadded_sequence_lengths=torch.tensor(lengths, dtype=torch.int64),
        logprobs=logprobs,
        truncated=torch.tensor([answer.finish_reason == "length" for answer in answers], dtype=torch.bool),
    )


def _finished[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, even in a thread with a running event loop (notebooks)."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
