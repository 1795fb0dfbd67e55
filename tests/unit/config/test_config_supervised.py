"""Rules between the keys of DPO, KTO and reward-model runs."""

import pytest

from nemo_rl.config import DPOMasterConfig, SFTMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

KTO = "dpo.preference_loss=kto"
REFUSED: list[tuple[list[str], str]] = [
    (["policy.precision=float16"], "policy.precision=float16 loses gradients"),
    (["dpo.preference_loss=robust"], "robust needs dpo.label_smoothing"),
    (["dpo.preference_loss=rpo"], "set dpo.sft_loss_weight, for example 1.0"),
    (["dpo.preference_loss=ipo", "dpo.label_smoothing=0.1"], "no meaning with dpo.preference_loss=ipo"),
    (["data.validation.name=easy"], r"metric_name=val:loss is not reported: .*=val:validation-easy_loss\."),
    (["data.validation.name=a b"], r"data\.validation\.name"),
    (["dpo.preference_loss=ipo", "data.train.margin_key=m"], r"data\.train\.margin_key=m has no meaning"),
    (["dpo.desirable_weight=1.3"], "belong to dpo.preference_loss=kto, not to sigmoid"),
    ([KTO, "dpo.sft_loss_weight=0.1"], r"dpo\.sft_loss_weight=0\.1 has no meaning .* Leave it at 0\.0\."),
    ([KTO, "dpo.preference_average_log_probs=true"], "preference_average_log_probs=true has no meaning"),
    ([KTO, "dpo.preference_loss_weight=2"], "preference_loss_weight=2.0 has no meaning"),
    ([KTO, "dpo.label_smoothing=0.1"], "label_smoothing=0.1 has no meaning"),
    (
        ["data.train={dataset_name: BinaryFeedbackDataset, data_path: LICENSE}"],
        "single answers; .*sigmoid compares",
    ),
    ([KTO, "data.train.dataset_name=BinaryFeedbackDataset"], r"needs data\.train\.data_path"),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpointing.metric_name=val:loss"], r"val:loss is not .* mean 'val:val_loss'\? There are val:val_"),
        (["checkpointing.metric_name=val:accuracy"], r"val:accuracy is not reported by validation\."),
        (
            ["checkpointing.metric_name=val:val_loss", "data.validation.name=easy"],
            r"val:val_loss is not reported: .*metric_name=val:validation-easy_val_loss\.",
        ),
    ],
)
def test_a_metric_that_no_validation_of_sft_reports_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("examples/configs/sft_cpu.yaml", overrides, schema=SFTMasterConfig)
    for name in ("val:val_loss", "val:num_valid_samples", "train:loss", "null"):
        load_config("examples/configs/sft_cpu.yaml", [f"checkpointing.metric_name={name}"], schema=SFTMasterConfig)
    named = ["data.validation.name=easy", "checkpointing.metric_name=val:validation-easy_num_valid_samples"]
    load_config("examples/configs/sft_cpu.yaml", named, schema=SFTMasterConfig)
    load_config("examples/configs/sft_cpu.yaml", [*overrides, "checkpointing.enabled=false"], schema=SFTMasterConfig)


def load(*overrides: str) -> DPOMasterConfig:
    return load_config("examples/configs/dpo_cpu.yaml", overrides, schema=DPOMasterConfig)


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictory_supervised_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_kto_takes_pairs_and_labelled_answers() -> None:
    assert load(KTO, "dpo.desirable_weight=1.3").dpo.desirable_weight == 1.3
    load(KTO, "data.train={dataset_name: BinaryFeedbackDataset, data_path: LICENSE}")


def test_validation_data_may_be_named() -> None:
    load("data.validation.name=easy", "checkpointing.metric_name=val:validation-easy_loss")
    load("data.validation.name=easy", "checkpointing.enabled=false")
    sets = "data.validation=[{dataset_name: arithmetic_preference, name: easy}, {dataset_name: arithmetic_preference}]"
    load(sets)
