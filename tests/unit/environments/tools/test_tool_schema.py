"""The schema of a tool follows from its function, and arguments are checked against it."""

import pytest
import tools_for_tests

from nemo_rl.kits.tools.found import find_tools
from nemo_rl.kits.tools.interfaces import spec_of
from nemo_rl.utils.errors import ConfigError

DIVIDE = spec_of(tools_for_tests.divide, "divide")


@pytest.mark.fast
def test_the_schema_has_types_texts_and_required_arguments() -> None:
    function = DIVIDE.schema["function"]
    assert DIVIDE.schema["type"] == "function"
    assert function["name"] == "divide"
    assert function["description"] == "Divide two numbers."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "dividend": {"type": "number", "description": "the number above, which is divided."},
            "divisor": {"type": "number", "description": "the number below."},
            "rounding": {
                "type": "string",
                "enum": ["down", "none"],
                "default": "none",
                "description": '"down" rounds.',
            },
        },
        "required": ["dividend", "divisor"],
        "additionalProperties": False,
    }


@pytest.mark.fast
def test_arguments_are_converted_and_defaults_are_left_to_the_function() -> None:
    assert DIVIDE.checked({"dividend": "7", "divisor": 2}) == {"dividend": 7.0, "divisor": 2.0}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dividend": 1}, "divisor: Field required"),
        ({"dividend": 1, "divisor": "x"}, "divisor: Input should be a valid number"),
        ({"dividend": 1, "divisor": 1, "other": 1}, "other: Extra inputs are not permitted"),
        ({"dividend": 1, "divisor": 1, "rounding": "up"}, "rounding: Input should be 'down' or 'none'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match="Field required|should be|Extra") as caught:
        DIVIDE.checked(arguments)
    assert complaint in str(caught.value)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tools_for_tests.no_docstring", "has no docstring"),
        ("tools_for_tests.no_hint", "parameter 'value' has no type hint"),
        ("tools_for_tests.many", "parameter 'values' cannot be passed by name"),
        ("tools_for_tests.missing", "cannot be imported"),
        ("tools_for_tests.os", "is a module"),
        ("calculatr", "is unknown. Did you mean"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="env.tools.tools.0.name") as caught:
        find_tools(name, {}, f"env.tools.tools.0.name={name!r}")
    assert complaint in str(caught.value)


@pytest.mark.fast
def test_arguments_of_a_class_are_checked() -> None:
    assert set(find_tools("tools_for_tests.Counter", {"start": 3}, "it").specs) == {"add"}
    with pytest.raises(ConfigError, match="unexpected keyword argument 'begin'"):
        find_tools("tools_for_tests.Counter", {"begin": 3}, "it")
    with pytest.raises(ConfigError, match="takes no kwargs"):
        find_tools("calculator", {"begin": 3}, "it")
