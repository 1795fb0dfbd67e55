"""Weights of data sets and the curriculum: what is refused, and with which words; names that are derived."""

from pathlib import Path

import pytest

from nemo_rl.config import DataConfig, DistillationMasterConfig, GRPOMasterConfig, SFTMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

TRAIN = "data.train=[{name: easy, dataset_name: arithmetic}, {name: hard, dataset_name: arithmetic}]"
WEIGHTS = ("data.train.0.weight=3", "data.train.1.weight=1")


def phases(*texts: str) -> str:
    return f"data.curriculum.phases=[{', '.join(f'{{{text}}}' for text in texts)}]"


PHASE = "from_step: 0, weights: {easy: 1, hard: 0}"
LATER = "from_step: 9, weights: {easy: 0, hard: 1}"


def load(*overrides: str, train: str = TRAIN) -> GRPOMasterConfig:
    return load_config("examples/configs/grpo_math_cpu.yaml", [train, *overrides], schema=GRPOMasterConfig)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("data.train.0.weight=0",), r"data\.train\.0\.weight=0 .*greater than 0"),
    (("data.train.0.weight=-1",), r"data\.train\.0\.weight=-1 .*greater than 0"),
    (("data.train.0.weight=.inf",), r"data\.train\.0\.weight"),
    (
        ("data.train.0.weight=1",),
        r"train\.0\.weight: no weight is set for data\.train\.1\. Give all entries one, or no",
    ),
    (("data.default.weight=1",), r"data\.default\.weight=1 is no weight of a data set\. Set data\.train\.<i>\.weight"),
    ((*WEIGHTS, "data.validation.weight=2"), r"data\.validation\.weight=2 has no effect: a validation takes all rows"),
    ((*WEIGHTS, "data.train.1.name=easy"), r"data\.train\.0 and data\.train\.1 have the same name, easy"),
    (
        ("data.curriculum={}",),
        r"data\.curriculum has no rule\. Write data\.curriculum\.phases or data\.curriculum\.acc",
    ),
    ((*WEIGHTS, phases(PHASE, LATER)), r"train\.1\.weight: data\.curriculum\.phases has the weights\. Leave one"),
    ((phases(LATER),), r"phases\.0\.from_step=9: the first phase begins at 0"),
    ((phases(PHASE, LATER, LATER),), r"phases\.2\.from_step=9 does not follow 9, that of the phase before"),
    ((phases(PHASE, "from_step: -1, weights: {easy: 1, hard: 1}"),), r"from_step=-1.*greater than or equal to 0"),
    (
        (phases("from_step: 0, weights: {easy: 1, hrad: 1}"),),
        r"phases\.0\.weights\.hrad: there is no such data set\. Did you mean 'hard'\? Names: easy, hard\.",
    ),
    ((phases("from_step: 0, weights: {easy: 1}"),), r"phases\.0\.weights has no weight for hard\. Give each data set"),
    (
        (phases(PHASE, "from_step: 1, weights: {easy: 0, hard: 0}"),),
        r"phases\.1\.weights: all are 0, so that no prompt",
    ),
    ((phases("from_step: 0, weights: {easy: 1, hard: -2}"),), r"phases\.0\.weights\.hard"),
    ((phases(PHASE),), r"the weight of hard is 0 in all phases\. Remove it from data\.train"),
    ((phases("from_step: 0, weights: {easy: 1, hard: 1}, until: 3"),), "until"),
    (
        ("data.curriculum={interpolation: linear, accuracy: {}}",),
        r"interpolation=linear needs two phases, and .* has 0",
    ),
    (
        ("data.curriculum.accuracy={min_share: 0.6}",),
        r"min_share=0\.6 for each of 2 data sets .*Set it to at most 0\.5",
    ),
    (("data.curriculum.accuracy={target: 1}",), r"target=1 .*less than 1"),
    (("data.curriculum.accuracy={average_over: 0}",), r"average_over=0"),
    (("data.validation.name=math",), r"data\.validation\.name='math' is the name of an environment.* Choose another"),
    (("data.train.0.name=math", "data.train.0.split_validation_size=9"), r"data\.train\.0\.name='math' is the name of"),
    (("data.use_multiple_dataloader=true",), r"for shares of data sets set data\.train\.<i>\.weight"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_values_that_make_no_mixture_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize("key", ["data.train.weight=2", "data.curriculum.accuracy={}"])
def test_one_data_set_has_no_shares(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key.partition('.acc')[0]} needs several data sets, and data\.train has 1"
    ):
        load(key, train="data.train={dataset_name: arithmetic}")


def test_weights_and_curricula_that_are_accepted() -> None:
    assert not load().data.has_shares
    assert load(*WEIGHTS).data.has_shares
    data = load(phases(PHASE, LATER), "data.curriculum.interpolation=linear", "data.curriculum.accuracy={}").data
    assert data.has_shares and data.curriculum is not None and data.curriculum.accuracy is not None
    assert (data.curriculum.accuracy.target, data.curriculum.accuracy.min_share) == (0.5, 0.05)
    assert load(*WEIGHTS, "data.validation.name=easy", "data.train.0.name=math").data.train_names == ["math", "hard"]


@pytest.mark.parametrize("keys", [WEIGHTS, ("data.curriculum.accuracy={}",)])
def test_a_program_that_passes_its_data_has_no_shares(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"weight and data\.curriculum are for the data sets of data\.train, but the"):
        load(*keys).data.with_user_data()


def test_other_algorithms_take_the_same_keys_and_none_without_rewards_a_rule_by_accuracy() -> None:
    rows = "data.train=[{name: a, dataset_name: arithmetic, weight: 1}, {name: b, dataset_name: arithmetic, weight: 2}]"
    sft = "examples/configs/sft_cpu.yaml"
    assert load_config(sft, [rows], schema=SFTMasterConfig).data.has_shares
    with pytest.raises(ConfigError, match=r"data\.curriculum\.accuracy needs rewards, and this run samples no answers"):
        load_config(sft, [rows, "data.curriculum.accuracy={}"], schema=SFTMasterConfig)
    rule = "data.curriculum.accuracy={}"
    path = "examples/configs/distillation_math_cpu.yaml"
    assert load_config(path, [rows, rule], schema=DistillationMasterConfig).data.has_shares


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([{"env_name": "math"}, {"env_name": "my.games.Maze"}], ["math", "Maze"]),
        ([{"dataset_name": "gsm8k"}, {"dataset_name": "my.rows.Own"}], ["gsm8k", "Own"]),
        ([{"data_path": "rows/level 1.jsonl"}, {"data_path": "level.2.jsonl"}], ["level_1", "level_2"]),
        ([{"dataset_name": "gsm8k"}, {"dataset_name": "gsm8k"}], ["train_0", "train_1"]),
        ([{"dataset_name": "gsm8k", "name": "mine"}, {"dataset_name": "gsm8k"}], ["mine", "train_1"]),
        ([{"dataset_name": "gsm8k"}, {"data_path": "a.jsonl"}], ["train_0", "train_1"]),
    ],
)
def test_names_are_derived_from_what_tells_entries_apart(entries: list[dict[str, str]], names: list[str]) -> None:
    assert DataConfig.build(train=entries).train_names == names


def test_a_curriculum_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"defaults: {Path('examples/configs/grpo_math_cpu.yaml').resolve()}\n"
        "data:\n"
        "  train:\n"
        "    - {name: easy, dataset_name: arithmetic, max_operand: 19}\n"
        "    - {name: hard, dataset_name: arithmetic}\n"
        "  curriculum:\n"
        "    phases:\n"
        "      - {from_step: 0, weights: {easy: 1, hard: 0}}\n"
        "      - {from_step: 100, weights: {easy: 0.2, hard: 0.8}}\n"
    )
    curriculum = load_config(tmp_path / "run.yaml").data.curriculum
    assert curriculum is not None
    assert [(phase.from_step, phase.weights) for phase in curriculum.phases] == [
        (0, {"easy": 1.0, "hard": 0.0}),
        (100, {"easy": 0.2, "hard": 0.8}),
    ]
