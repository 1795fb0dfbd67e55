"""`defaults:` inheritance against hand-merged results."""

import time
from pathlib import Path

import pytest
from config_helpers import with_values
from omegaconf import OmegaConf

from nemo_rl.config import load_config as load_checked
from nemo_rl.utils.config import (
    load_config,
    load_config_with_inheritance,
    merge_with_override,
    register_omegaconf_resolvers,
    resolve_path,
)
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast


def plain(config: object, resolve: bool = True) -> object:
    return OmegaConf.to_container(config, resolve=resolve)  # type: ignore[arg-type]


def test_parents_merge_left_to_right_and_the_child_wins(write_yaml) -> None:
    write_yaml("a.yaml", {"x": {"from_a": 1, "both": "a"}, "l": [1, 2, 3], "only_a": 1})
    write_yaml("b.yaml", {"x": {"both": "b", "from_b": 2}, "l": [4]})
    child = write_yaml("c.yaml", {"defaults": ["a.yaml", "b.yaml"], "x": {"mine": 3}, "only_a": 9})
    assert plain(load_config(child)) == {
        "x": {"from_a": 1, "both": "b", "from_b": 2, "mine": 3},
        "l": [4],
        "only_a": 9,
    }


def test_a_list_and_a_mapping_replace_each_other(write_yaml) -> None:
    write_yaml("a.yaml", {"policy": {"scheduler": [{"name": "x"}], "one": {"k": 1}}})
    child = write_yaml("c.yaml", {"defaults": "a.yaml", "policy": {"scheduler": {"name": "y"}, "one": [2]}})
    assert plain(load_config(child)) == {"policy": {"scheduler": {"name": "y"}, "one": [2]}}


def bomb(levels: int) -> str:
    lines = ["policy:", "  hf_config_overrides:", "    a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bomb(12), "stands for more than 1,000,000 values"),
        ("a: &a [*a]", "stands for more than 1,000,000 values"),
        ("a: " + "{a: " * 3000 + "1" + "}" * 3000, "nests mappings or lists too deeply"),
        ("a: " + "9" * 5000, "is not valid YAML"),
    ],
    ids=["anchors of anchors", "an anchor of itself", "3,000 levels", "5,000 digits"],
)
def test_a_file_that_expands_or_nests_too_far_is_refused(write_yaml, content: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        load_config(write_yaml("bomb.yaml", content))
    assert time.monotonic() - started < 20


def test_anchors_are_read(write_yaml) -> None:
    assert (
        plain(load_config(write_yaml("a.yaml", bomb(3))))["policy"]["hf_config_overrides"]["a2"]
        == [  # type: ignore[index]
            [["x"] * 10] * 10
        ]
        * 10
    )


def test_nesting_too_deep_for_recursion_is_refused(minimal) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_checked(minimal, ["policy.hf_config_overrides=" + "{a:" * 100 + "1" + "}" * 100])
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_checked(minimal, ["policy.hf_config_overrides=" + "{a:" * 1200 + "1" + "}" * 1200])


def test_an_empty_section_inherits_and_null_stays_where_it_means_something(write_yaml) -> None:
    write_yaml("parent.yaml", with_values(grpo={"max_num_steps": 80}, policy={"optimizer": {"kwargs": {"lr": 1.0}}}))
    child = "defaults: parent.yaml\ngrpo:\n  # max_num_steps: 3\npolicy:\n  dtensor_cfg:\nenv:\n  math:\nloss_fn:\n"
    config = load_checked(write_yaml("child.yaml", child))
    assert config == load_checked(write_yaml("same.yaml", "defaults: parent.yaml"))
    assert (config.grpo.max_num_steps, config.env["math"].num_workers) == (80, 1)
    path = write_yaml("null.yaml", {"defaults": "parent.yaml", "policy": {"hf_config_overrides": None}})
    assert load_checked(path).policy.hf_config_overrides is None


def test_keys_that_a_later_file_drops_give_no_message(write_yaml, caplog: pytest.LogCaptureFixture) -> None:
    write_yaml("parent.yaml", with_values(data={"train": {"dataset_name": "arithmetic", "num_samples": 7}}))
    dropped = {"defaults": "parent.yaml", "data": {"train": {"_override_": True, "data_path": "README.md"}}}
    kept = {"defaults": "parent.yaml", "data": {"train": {"dataset_name": None, "data_path": "README.md"}}}
    listed = {"defaults": "parent.yaml", "data": {"train": [{"data_path": "README.md"}]}}
    with caplog.at_level("INFO", "nemo_rl.config"):
        for content in (dropped, listed, kept):  # the parent wrote num_samples for its own data set
            load_checked(write_yaml("child.yaml", content))
        assert caplog.messages == []
        kept["data"]["train"]["num_samples"] = 5
        load_checked(write_yaml("child.yaml", kept))
    assert "data.train.num_samples (only arithmetic" in caplog.text


def test_parent_paths_are_relative_to_the_file_that_names_them(write_yaml) -> None:
    write_yaml("base/deep/root.yaml", {"v": "root", "w": 1})
    write_yaml("base/mid.yaml", {"defaults": "deep/root.yaml", "v": "mid"})
    child = write_yaml("runs/child.yaml", {"defaults": "../base/mid.yaml"})
    assert plain(load_config(child)) == {"v": "mid", "w": 1}


def test_a_parent_may_be_an_absolute_path(write_yaml) -> None:
    parent = write_yaml("elsewhere/p.yaml", {"v": 1})
    assert plain(load_config(write_yaml("c.yaml", {"defaults": str(parent)}))) == {"v": 1}


def test_override_marker_replaces_a_mapping_at_any_depth(write_yaml) -> None:
    write_yaml("a.yaml", {"top": {"old": 1}, "deep": {"in": {"old": 1}, "kept": 2}})
    child = write_yaml(
        "c.yaml",
        {
            "defaults": "a.yaml",
            "top": {"_override_": True, "new": 5},
            "deep": {"in": {"_override_": True, "new": 6}},
        },
    )
    assert plain(load_config(child)) == {"top": {"new": 5}, "deep": {"in": {"new": 6}, "kept": 2}}


def test_interpolations_of_a_parent_see_the_childs_value(write_yaml) -> None:
    register_omegaconf_resolvers()
    register_omegaconf_resolvers()
    write_yaml(
        "a.yaml",
        {"n": 2, "m": "${mul:${n},3}", "s": {"k": "${n}", "r": "${.k}"}, "d": "${div:${n},4}",
         "p": "${add:${n},1,1}", "x": "${max:${n},7}"},
    )  # fmt: skip
    child = write_yaml("c.yaml", {"defaults": "a.yaml", "n": 5})
    assert plain(load_config(child)) == {
        "n": 5, "m": 15, "s": {"k": 5, "r": 5}, "d": 1.25, "p": 7, "x": 7,
    }  # fmt: skip


def test_environment_variables_are_interpolated(write_yaml, monkeypatch) -> None:
    monkeypatch.setenv("NEMO_TEST_NAME", "abc")
    assert plain(load_config(write_yaml("c.yaml", {"v": "${oc.env:NEMO_TEST_NAME}"}))) == {"v": "abc"}


def test_an_inheritance_cycle_is_refused_and_named(write_yaml) -> None:
    write_yaml("a.yaml", {"defaults": "b.yaml"})
    write_yaml("b.yaml", {"defaults": "a.yaml"})
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(write_yaml("a.yaml", {"defaults": "b.yaml"}))


def test_a_shared_grandparent_is_not_a_cycle(write_yaml) -> None:
    write_yaml("root.yaml", {"v": 1})
    write_yaml("l.yaml", {"defaults": "root.yaml"})
    write_yaml("r.yaml", {"defaults": "root.yaml"})
    assert plain(load_config(write_yaml("c.yaml", {"defaults": ["l.yaml", "r.yaml"]}))) == {"v": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"defaults": "nowhere.yaml"}, r"inherits from 'nowhere.yaml', but there is no file"),
        ({"defaults": {"a": 1}}, r"must be a path or a list of paths"),
        ("a: [1, 2", r"not valid YAML"),
        ("- a\n- b\n", r"must hold keys with values"),
        ("a: 1\na: 2\n", r"not valid YAML.*duplicate"),
    ],
)
def test_files_that_cannot_be_loaded_are_refused(write_yaml, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(write_yaml("c.yaml", content))


def test_a_missing_file_error_names_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"no config file 'no\.yaml' \(current folder: {tmp_path}\)"):
        load_config("no.yaml")


def test_helpers_resolve_load_and_merge_without_side_effects(write_yaml, tmp_path: Path) -> None:
    assert resolve_path(tmp_path, "a/b.yaml") == tmp_path / "a" / "b.yaml"
    assert resolve_path(tmp_path, "/x.yaml") == Path("/x.yaml")
    write_yaml("sub/c.yaml", {"v": 1})
    assert plain(load_config_with_inheritance("c.yaml", tmp_path / "sub")) == {"v": 1}
    base = OmegaConf.create({"a": {"x": 1}, "b": 2})
    merged = merge_with_override(base, OmegaConf.create({"a": {"_override_": True, "y": 2}}))
    assert plain(merged) == {"a": {"y": 2}, "b": 2}
    assert plain(base) == {"a": {"x": 1}, "b": 2}
