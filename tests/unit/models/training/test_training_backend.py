"""A training backend named by configuration: the documented one runs through the real policy."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_helpers import VOCAB, WeightedNLL, policy_config, random_batch
from tiny_models import make_char_tokenizer
from transformers import AutoTokenizer

from nemo_rl.config import PolicyConfig, TimeoutsConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.backends import backend_of_checkpoint, training_backend
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.weight_sync.endpoints import WeightReceiver
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.transport import TransportSpec

ROOT = Path(__file__).resolve().parents[4]
RATE = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Make a folder that Python imports from, with the backend of the documentation as `table_backend`."""
    page = (ROOT / "docs/development/adding-things.md").read_text(encoding="utf-8")
    (shown,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M) if "TableRank" in block]
    made = tmp_path_factory.mktemp("my_project")
    (made / "table_backend.py").write_text(shown, encoding="utf-8")
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[RayVirtualCluster]:
    made = RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2, name="backend-test")
    yield made
    made.shutdown()


def own(name: str, **section) -> PolicyConfig:
    return policy_config("unused", dtensor_cfg={"enabled": False}, training_backend={"name": name, **section})


def table_config(folder: Path, **sizes: int) -> PolicyConfig:
    return own(
        "table_backend.TableTraining",
        kwargs={"learning_rate": RATE, "vocab_size": VOCAB},
        env_vars={"PYTHONPATH": str(folder)},
        **sizes,
    )


def open_policy(cluster, config: PolicyConfig, ranks: int, **kwargs) -> Policy:
    return Policy(
        cluster,
        config,
        make_char_tokenizer(),
        name_prefix=f"table{ranks}",
        workers_per_node=ranks,
        timeouts=TimeoutsConfig(setup_s=120, train_s=60, checkpoint_s=60),
        threads_per_rank=1,
        **kwargs,
    )


def expected_logprobs(table: torch.Tensor, data) -> torch.Tensor:
    ids = data["input_ids"]
    scores = table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    real = torch.arange(1, ids.shape[1])[None] < data["input_lengths"][:, None]
    return torch.nn.functional.pad(scores * real, (1, 0))


def synced_weights(policy: Policy) -> dict[str, torch.Tensor]:
    stream = PolicyWeightStream(policy, "float32", 60)
    spec = TransportSpec("shared_memory", "table-test")
    receiver, got = WeightReceiver(spec, 0, "engine 0"), {}
    for call in stream.begin_weight_stream([Lane(spec)]):
        policy.worker_group.get_worker_result(call.ref, call.slot.rank)
    receiver.begin(policy.weight_version)
    with receiver.received(stream.next_weight_buckets()[0]) as tensors:
        got.update({name: tensor.clone() for name, tensor in tensors})
    receiver.close()
    return got


@pytest.mark.ray
def test_a_backend_named_by_dotted_path_trains_on_two_by_two_ranks_and_resumes(cluster, folder, tmp_path) -> None:
    data, probe = random_batch(rows=12, seed=1), random_batch(rows=5, seed=2)
    policy = open_policy(cluster, table_config(folder, tensor_parallel_size=2), 4)
    assert policy.layout.shape == (1, 1, 2, 1, 2) and policy.data_parallel_size == 2
    initial = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)).double()

    result = policy.train(data, WeightedNLL())

    table, losses, norms = initial.clone().requires_grad_(), [], []
    for rows in (slice(0, 6), slice(6, 12)):  # in one process and float64
        mask = data["token_mask"][rows, 1:] * data["sample_mask"][rows, None]
        scores = expected_logprobs(table, data)[rows, 1:]
        loss = -(scores * mask * data["advantages"][rows, 1:]).sum() / mask.sum()
        (gradient,) = torch.autograd.grad(loss, table)
        losses.append(loss.item())
        norms.append(gradient.norm().item())
        table = (table - RATE * gradient).detach().requires_grad_()
    assert result["loss"].tolist() == pytest.approx(losses, rel=1e-5), "each row counts once, whatever ranks share it"
    assert result["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert result["metrics"]["lr"] == RATE
    got = policy.get_logprobs(probe)["logprobs"]
    torch.testing.assert_close(got.double(), expected_logprobs(table.detach(), probe), rtol=0, atol=1e-5)
    reference = policy.get_reference_policy_logprobs(probe)["reference_logprobs"]
    torch.testing.assert_close(reference.double(), expected_logprobs(initial, probe), rtol=0, atol=1e-5)
    torch.testing.assert_close(synced_weights(policy)["weight"].double(), table.detach(), rtol=0, atol=1e-6)

    step = tmp_path / "step_1"
    policy.save_checkpoint(step / "policy/weights")
    (step / "config.yaml").write_text(
        "policy:\n  model_name: m\n  training_backend: {name: table_backend.TableTraining}\n"
    )
    again = policy.train(data, WeightedNLL())
    assert policy.shutdown()
    resumed = open_policy(cluster, table_config(folder), 1, weights_path=step / "policy/weights")
    assert torch.equal(resumed.get_logprobs(probe)["logprobs"], got)
    torch.testing.assert_close(resumed.train(data, WeightedNLL())["loss"], again["loss"], rtol=1e-5, atol=0)
    assert resumed.shutdown()

    spec = importlib.util.spec_from_file_location("converter", ROOT / "examples/converters/convert_dcp_to_hf.py")
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    arguments = ["--dcp-ckpt-path", str(step), "--hf-ckpt-path", str(tmp_path / "out"), "--verify"]
    assert converter.main(arguments) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == make_char_tokenizer().get_vocab()


def test_the_configuration_chooses_the_backend(folder, tmp_path) -> None:
    assert isinstance(training_backend(policy_config("m")), DTensorTraining)
    chosen = training_backend(table_config(folder))
    assert type(chosen).__name__ == "TableTraining"
    with pytest.raises(ConfigError, match=r"kwargs lacks \['learning_rate', 'vocab_size'\]"):
        chosen.check(own("table_backend.TableTraining"), 1)
    for name, words in (
        ("table_backend.Missing", "cannot be imported .*has no attribute 'Missing'"),
        ("table_backend.TableRank", "is not a training backend: derive it from"),
    ):
        with pytest.raises(ConfigError, match=rf"policy\.training_backend\.name='{name}' {words}"):
            training_backend(own(name))
    with pytest.raises(ConfigError, match=r"training_backend\.name: no such name"):
        own("TableTraining")
    with pytest.raises(ConfigError, match=r"set policy\.dtensor_cfg\.enabled=true"):
        training_backend(policy_config("m", dtensor_cfg={"enabled": False}))


def test_a_checkpoint_names_the_backend_that_wrote_it(folder, tmp_path) -> None:
    weights = tmp_path / "a/b/c/step_3/policy/weights"
    weights.mkdir(parents=True)
    assert isinstance(backend_of_checkpoint(weights), DTensorTraining)
    file = weights.parents[1] / "config.yaml"
    for text, name in (
        ("policy: {model_name: m}", "DTensorTraining"),
        ("policy: {dtensor_cfg: {enabled: true}, training_backend: null}", "DTensorTraining"),
        (
            "policy: {dtensor_cfg: {enabled: false}, training_backend: {name: table_backend.TableTraining}}",
            "TableTraining",
        ),
    ):
        file.write_text(text)
        assert type(backend_of_checkpoint(weights)).__name__ == name
    file.rename(tmp_path / "mine.yaml")
    assert type(backend_of_checkpoint(weights, tmp_path / "mine.yaml")).__name__ == "TableTraining"
    file.write_text("a list: 1")
    with pytest.raises(CheckpointError, match=r"no policy\.model_name"):
        backend_of_checkpoint(weights)


def test_a_stage_without_scores_returns_none() -> None:
    """The first stages of a pipeline do this: their backend never calls the forward step."""

    class FirstStage:
        device = torch.device("cpu")
        shares_prompts = False

        def run(self, microbatches, forward_step, *, backward):
            self.seen = len(microbatches)

        def learning_rate(self):
            return 0.1

        def clip_and_step(self):
            return 2.0, True

        def update_metrics(self):
            return {}

        def advance_schedule(self):
            pass

    data = random_batch(rows=4)
    worker = PolicyWorker(FirstStage(), policy_config("m"), gives_scores=False)
    assert worker.get_logprobs(data, [2, 2]).numel() == 0
    assert [part.numel() for part in worker.get_topk_logits(data, [2, 2], k=3)] == [0, 0]
    result = worker.train(data, [2, 2], WeightedNLL(), (4.0, 40.0))
    assert (result.loss, result.metrics, result.grad_norm, worker.backend.seen) == (0, {}, 2.0, 2)
