"""`defaults:` inheritance against hand-merged results."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl.utils.config import (
    load_config,
    load_config_with_inheritance,
    merge_with_override,
    register_omegaconf_resolvers,
    resolve_path,
)
from nemo_rl.utils.errors import ConfigError


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


def test_each_level_is_relative_to_its_own_folder(write_yaml) -> None:
    write_yaml("base/deep/root.yaml", {"v": "root", "w": 1})
    write_yaml("base/mid.yaml", {"defaults": "deep/root.yaml", "v": "mid"})
    child = write_yaml("runs/child.yaml", {"defaults": "../base/mid.yaml"})
    assert plain(load_config(child)) == {"v": "mid", "w": 1}


def test_absolute_parent(write_yaml) -> None:
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


def test_environment_variables(write_yaml, monkeypatch) -> None:
    monkeypatch.setenv("NEMO_TEST_NAME", "abc")
    assert plain(load_config(write_yaml("c.yaml", {"v": "${oc.env:NEMO_TEST_NAME}"}))) == {"v": "abc"}


def test_a_circle_is_an_error_that_names_it(write_yaml) -> None:
    write_yaml("a.yaml", {"defaults": "b.yaml"})
    write_yaml("b.yaml", {"defaults": "a.yaml"})
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(write_yaml("a.yaml", {"defaults": "b.yaml"}))


def test_a_diamond_is_no_circle(write_yaml) -> None:
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
def test_bad_files(write_yaml, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(write_yaml("c.yaml", content))


def test_missing_file_names_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"no config file 'no\.yaml' \(current folder: {tmp_path}\)"):
        load_config("no.yaml")


def test_small_helpers(write_yaml, tmp_path: Path) -> None:
    assert resolve_path(tmp_path, "a/b.yaml") == tmp_path / "a" / "b.yaml"
    assert resolve_path(tmp_path, "/x.yaml") == Path("/x.yaml")
    write_yaml("sub/c.yaml", {"v": 1})
    assert plain(load_config_with_inheritance("c.yaml", tmp_path / "sub")) == {"v": 1}
    base = OmegaConf.create({"a": {"x": 1}, "b": 2})
    merged = merge_with_override(base, OmegaConf.create({"a": {"_override_": True, "y": 2}}))
    assert plain(merged) == {"a": {"y": 2}, "b": 2}
    assert plain(base) == {"a": {"x": 1}, "b": 2}
