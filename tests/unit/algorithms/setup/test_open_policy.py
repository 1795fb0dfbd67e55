"""What `open_policy` refuses before it starts a process; the notebook test runs it."""

import subprocess
import sys

import pytest
import torch

import nemo_rl
from nemo_rl.algorithms.setup.open_policy import OpenPolicy
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.utils.errors import ConfigError, DataError

TINY_CHAT = "examples/assets/tiny-chat"


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (
            TINY_CHAT,
            {"learning_rate": 1e-3, "optimizer": {"name": "torch.optim.SGD"}},
            "Both learning_rate and optimizer",
        ),
        (TINY_CHAT, {"train_global_batch_size": 8}, "has no effect here"),
        (TINY_CHAT, {"max_grad_nrm": 1.0}, "max_grad_nrm"),
        (TINY_CHAT, {"device": "tpu"}, "device"),
        ("no/such/model/here", {}, "no tokenizer could be loaded"),
    ],
)
def test_mistakes_are_named_before_anything_starts(model, arguments, message, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        nemo_rl.open_policy(model, **arguments)


def test_missing_gpus_are_counted(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        "nemo_rl.config.runs.devices._DRIVER_GPUS", type("Absent", (), {"is_dir": lambda self: False})()
    )
    monkeypatch.setattr("nemo_rl.config.runs.devices._count_with_tool", lambda: 1)
    with pytest.raises(ConfigError, match=r"device='cuda' with ranks=2 needs as many GPUs, and this machine shows 1"):
        nemo_rl.open_policy(TINY_CHAT, device="cuda", ranks=2)


class NoRanks(OpenPolicy):
    """Has the checks of `train` and no process."""

    def __init__(self) -> None:
        self._places = RayVirtualCluster([1], use_gpus=False)


def test_a_mistake_in_a_loss_is_an_exception_here() -> None:
    batch = BatchedDataDict(
        input_ids=torch.zeros(3, 5, dtype=torch.int64),
        input_lengths=torch.full((3,), 5),
        token_mask=torch.ones(3, 5),
        sample_mask=torch.ones(3),
    )
    with pytest.raises(KeyError, match="weigth"):
        NoRanks().train(batch, nemo_rl.token_loss(lambda logprobs, data: -logprobs * data["weigth"]))
    del batch["token_mask"]
    with pytest.raises(DataError, match="token_mask"):
        NoRanks().train(batch, nemo_rl.token_loss(lambda logprobs, data: -logprobs))


def test_the_door_is_light_and_complete() -> None:
    """`import nemo_rl` loads neither torch nor ray; every name that it lists is there."""
    code = "import sys, nemo_rl; assert not {'torch', 'ray'} & set(sys.modules); dir(nemo_rl); "
    code += "assert not {'torch'} & set(sys.modules); [getattr(nemo_rl, name) for name in nemo_rl.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(nemo_rl.__all__) <= set(dir(nemo_rl))
    with pytest.raises(AttributeError, match="has no attribute 'open_polcy'; it has .*open_policy"):
        nemo_rl.open_polcy  # noqa: B018
