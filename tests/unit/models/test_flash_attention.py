"""When torch's varlen flash kernel is called, and with what; the kernel itself runs in `tests/gpu`."""

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_rl.models.dtensor import attention
from nemo_rl.models.dtensor.attention import varlen_attention

BOUNDS = torch.tensor([0, 5, 7, 16], dtype=torch.int32)


def reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size) -> Tensor:
    """What the kernel computes, in plain float64: `[T, H, D]` of each segment, key heads shared."""
    assert max_q == max_k == 9 and window_size[1] == 0
    parts = []
    for start, stop in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (x[start:stop].transpose(0, 1).double() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        allowed = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(~allowed, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def of_torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa or query.size(1) == key.size(1), "what torch 2.13 refuses"
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


@pytest.mark.parametrize("kernel", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize(("key_heads", "window"), [(2, None), (4, None), (1, 3)])
def test_the_kernel_is_called_as_each_version_of_torch_has_it(kernel, key_heads, window, monkeypatch) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 16, 8) for heads in (4, key_heads, key_heads))
    mask = None if window is None else torch.tensor(window)
    want, _ = varlen_attention(nn.Identity(), query, key, value, mask, cu_seq_lens_q=BOUNDS)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_flash_can_run", lambda *_: True)
    got, _ = varlen_attention(nn.Identity(), query, key, value, mask, cu_seq_lens_q=BOUNDS, max_length_q=9)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"capability": (7, 5)}, False),
        ({"capability": (12, 0)}, True),
        ({"head_dim": 20}, False),
        ({"head_dim": 256}, True),
        ({"head_dim": 264}, False),
        ({"dtype": torch.float32}, False),
        ({"dropout": 0.1}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_the_kernel_only_gets_what_it_takes(changes, runs, monkeypatch) -> None:
    case = {"capability": (8, 0), "head_dim": 64, "dtype": torch.bfloat16, "dropout": 0.0, "device": "cuda"} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    with FakeTensorMode():
        tensor = torch.empty(1, 2, 16, case["head_dim"], dtype=case["dtype"], device=case["device"])
    assert attention._flash_can_run(tensor, tensor, tensor, case["dropout"]) is runs
