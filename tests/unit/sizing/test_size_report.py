"""What `nemo_rl size` writes: keys that follow others, files through links, and what is short for a placement."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl.__main__ import main
from nemo_rl.commands.size import proposal, run
from nemo_rl.commands.size.jobs import GpuKind, chosen_gpu
from nemo_rl.commands.size.proposal import Proposal, described
from nemo_rl.commands.size.report import needed_overrides, overrides_of, write_file
from nemo_rl.config import REPOSITORY_ROOT, MasterConfig, SFTMasterConfig, load_config

RECIPES = REPOSITORY_ROOT / "examples/configs/recipes/llm"
SFT = RECIPES / "sft-llama3.1-8b-1n8g-fsdp.yaml"
LLAMA = RECIPES / "grpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
TRAIN, PASSES = "policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.logprob_mb_tokens"


@pytest.fixture
def following(tmp_path: Path) -> Path:
    """A configuration whose tokens of log-prob passes follow those of training."""
    path = tmp_path / "following.yaml"
    keys = f"{{train_mb_tokens: 8192, logprob_mb_tokens: '${{{TRAIN}}}'}}"
    path.write_text(f"defaults: {SFT}\npolicy:\n  sequence_packing: {keys}\n")
    return path


def test_a_proposed_value_that_follows_another_key_is_written(following: Path) -> None:
    def load(overrides: Sequence[str]) -> MasterConfig:
        return load_config(following, overrides, schema=SFTMasterConfig, check=False)

    values = {TRAIN: 16384, PASSES: 8192}
    needed = needed_overrides(load([]), values, load)
    assert needed == values
    packing = load(overrides_of(needed)).policy.sequence_packing
    assert (packing.train_mb_tokens, packing.logprob_mb_tokens) == (16384, 8192)


def test_a_file_in_a_linked_folder_finds_its_parent(following: Path, tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a/b")
    given = ["checkpointing.metric_name=null"]
    write_file(link / "sized.yaml", following, given, {TRAIN: 16384}, SFTMasterConfig)
    written = load_config(tmp_path / "a/b/sized.yaml", schema=SFTMasterConfig)
    assert written.policy.sequence_packing.train_mb_tokens == 16384


def test_missing_data_is_told_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "propose", lambda *arguments: pytest.fail("searched"))
    missing = "data.train=[{dataset_name: ResponseDataset, data_path: /no-such/rows.jsonl}]"
    assert main(["size", str(SFT), missing]) == 2
    assert "/no-such/rows.jsonl" in capsys.readouterr().err


def test_the_shortage_is_that_of_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """With engines on their own GPUs, the policy has 6 of 8."""
    asked = []

    def nothing(config: MasterConfig, gpu: GpuKind, refused: list[str] | None = None) -> Proposal | None:
        asked.append(config.policy.generation.colocated.enabled)  # type: ignore[union-attr]
        return None

    monkeypatch.setattr(proposal, "propose", nothing)
    monkeypatch.setattr(proposal, "_MACHINES", (2,))
    gpu = chosen_gpu(None, 6.0)
    config = described(load_config(LLAMA, check=False), gpu)
    told = run.shortage_lines("separate", config, gpu, [])
    assert "every layout of 6 ranks" in told[0] or "GiB of each GPU" in told[0]
    assert "no cluster" in told[-1]
    assert not any(asked)


def test_the_error_of_a_backend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = chosen_gpu("h200", None)
    monkeypatch.setattr(proposal, "_MACHINES", ())
    config = described(load_config(SFT, schema=SFTMasterConfig), gpu)
    told = run.shortage_lines("as-given", config, gpu, ["the device has no such kernels"])
    assert told[0] == "  the models fit, but a backend refuses them: the device has no such kernels"
    assert "no other model fits" in run.shortage_lines("as-given", config, gpu, [])[0]
