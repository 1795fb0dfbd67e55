"""What a teacher may be: the same vocabulary, enough of it, and an answer before Ray starts."""

from pathlib import Path

import pytest
import torch
from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint

from nemo_rl.algorithms import distillation, start
from nemo_rl.algorithms.distillation import TeacherScores, check_teacher_fits, check_vocab_equality
from nemo_rl.algorithms.rollout.refit import shared_engines
from nemo_rl.algorithms.runtime.device_sharing import share_memory
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import DistillationMasterConfig, Role, load_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[3] / "examples/configs/distillation_math_cpu.yaml"
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}


def config_with(*overrides: str) -> DistillationMasterConfig:
    return load_config(CONFIG, overrides, schema=DistillationMasterConfig)


@pytest.fixture
def other_words(tmp_path: Path) -> str:
    """A teacher whose tokenizer knows one word that the student's does not."""
    tokenizer = make_char_tokenizer()
    tokenizer.add_tokens(["carry"])
    save_tiny_checkpoint(tmp_path / "other", make_tiny_model(shape=TinyShape(vocab_size=272, **SMALL)), tokenizer)
    return str(tmp_path / "other")


def test_another_vocabulary_is_refused_before_ray_starts(other_words, tmp_path, monkeypatch) -> None:
    config = config_with(f"teacher.model_name={other_words}", f"logger.log_dir={tmp_path}/logs")
    words = r"another vocabulary.*1 of 265 tokens differ, e\.g\. 'carry' is id 264 for the teacher and unknown for the"
    monkeypatch.setattr(start, "init_ray", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match=words):
        distillation.setup(config)
    assert not (tmp_path / "logs").exists()
    tokenizer = get_tokenizer(config.policy.tokenizer)
    with pytest.raises(ConfigError, match="another vocabulary"):
        check_vocab_equality(tokenizer, config.policy.model_name, other_words)
    monkeypatch.setenv("NRL_SKIP_DISTILLATION_TOKENIZER_CHECK", "1")
    # The teacher's head is larger than the student's, so only the student's ids may be asked for.
    assert check_teacher_fits(config, tokenizer) == 264


@pytest.mark.parametrize(
    ("keys", "users"),
    [
        ((), {"generation": "Engines", "policy": "TrainedModel", "teacher": "FrozenModel"}),
        (("teacher.colocated.enabled=false",), {"generation": "Engines", "policy": "TrainedModel"}),
        (("policy.generation.colocated.enabled=false",), {"policy": "TrainedModel", "teacher": "FrozenModel"}),
        (("policy.generation.colocated.enabled=false", "teacher.colocated.enabled=false"), {}),
        (("cluster.device=cpu",), {}),
    ],
)
def test_those_who_share_gpus_with_the_policy_take_turns(keys, users) -> None:
    gpus = ("cluster.device=cuda", "cluster.gpus_per_node=8", "policy.precision=bfloat16")
    apart = [key.replace("enabled=false", f"resources.gpus_per_node={4 // len(keys)}") for key in keys]
    config = config_with(*gpus, *keys, *(key for key in apart if "colocated" in key))
    roles = {"policy": Role(config.policy), "teacher": Role(config.teacher, trains=False)}
    models: dict = dict.fromkeys(roles)
    engines = shared_engines(config.policy, config.cluster, engines=object())  # type: ignore[arg-type]
    groups = share_memory(config.cluster, roles, models, engines)._groups
    found = [{name: type(user).__name__ for name, user in group.items()} for group in groups]
    assert found == [users] * bool(users)


def test_a_head_with_rows_beyond_the_vocabulary_is_cut(tmp_path) -> None:
    model = make_tiny_model(shape=TinyShape(vocab_size=320, **SMALL))
    save_tiny_checkpoint(tmp_path / "padded", model, make_char_tokenizer())
    config = config_with(f"teacher.model_name={tmp_path}/padded")
    assert check_teacher_fits(config, get_tokenizer(config.policy.tokenizer)) == 264


def test_the_shipped_teacher_fits_and_k_is_bounded() -> None:
    tokenizer = get_tokenizer(config_with().policy.tokenizer)
    assert check_teacher_fits(config_with(), tokenizer) is None
    assert check_teacher_fits(config_with("distillation.topk_logits_k=264"), tokenizer) is None
    with pytest.raises(ConfigError, match="topk_logits_k=265 is more than the 264 entries"):
        check_teacher_fits(config_with("distillation.topk_logits_k=265"), tokenizer)


def test_a_teacher_without_files_is_named(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    config = config_with(f"teacher.model_name={tmp_path}/empty")
    with pytest.raises(ConfigError, match=r"teacher\.tokenizer\.name=.*no tokenizer could be loaded"):
        check_teacher_fits(config, get_tokenizer(config.policy.tokenizer))
    config.teacher.tokenizer.name = config.policy.model_name
    with pytest.raises(ConfigError, match=r"teacher\.model_name=.*empty"):
        check_teacher_fits(config, get_tokenizer(config.policy.tokenizer))


def test_the_teacher_writes_its_logits_into_the_batch() -> None:
    class Scores:
        def get_topk_logits(self, data, k, micro_batch_size=None, *, vocab_size=None):
            assert (k, vocab_size) == (3, 50)
            return {"topk_logits": torch.ones(2, 4, 3), "topk_indices": torch.zeros(2, 4, 3, dtype=torch.int64)}

    batch = BatchedDataDict({"input_ids": torch.zeros(2, 4, dtype=torch.int64), "input_lengths": torch.ones(2)})
    TeacherScores(Scores(), k=3, vocab_size=50, temperature=0.5).apply(StepBatch(batch))
    assert batch["teacher_topk_logits"].shape == batch["teacher_topk_indices"].shape == (2, 4, 3)
    assert batch["teacher_topk_logits"].unique().tolist() == [2.0]


def test_the_teacher_has_the_students_temperature(monkeypatch) -> None:
    monkeypatch.setattr(distillation, "start_run", lambda config, recipe, started_at: recipe)
    recipe = distillation.setup(config_with("policy.generation.temperature=0.7"))
    (stage,) = recipe.stages({"teacher": object()})
    assert stage.temperature == 0.7
