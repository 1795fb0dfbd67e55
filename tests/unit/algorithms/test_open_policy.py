"""What `open_policy` refuses before it starts a process; the notebook test runs it."""

import subprocess
import sys

import pytest

import nemo_rl
from nemo_rl.utils.errors import ConfigError

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
        "nemo_rl.config.device_check._DRIVER_GPUS", type("Absent", (), {"is_dir": lambda self: False})()
    )
    monkeypatch.setattr("nemo_rl.config.device_check._count_with_tool", lambda: 1)
    with pytest.raises(ConfigError, match=r"device='cuda' with ranks=2 needs as many GPUs, and this machine shows 1"):
        nemo_rl.open_policy(TINY_CHAT, device="cuda", ranks=2)


def test_the_door_is_light_and_complete() -> None:
    """`import nemo_rl` loads neither torch nor ray; every name that it lists is there."""
    code = "import sys, nemo_rl; assert not {'torch', 'ray'} & set(sys.modules); dir(nemo_rl); "
    code += "assert not {'torch'} & set(sys.modules); [getattr(nemo_rl, name) for name in nemo_rl.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(nemo_rl.__all__) <= set(dir(nemo_rl))
    with pytest.raises(AttributeError, match="has no attribute 'open_polcy'; it has .*open_policy"):
        nemo_rl.open_polcy  # noqa: B018
