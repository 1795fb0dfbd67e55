"""Programs are found in responses of many layouts, in linear time."""

import time

import pytest
from machine_speed import slowness

from nemo_rl.kits.code.blocks import code_to_run, final_code

PROGRAM = "def f(x):\n    return x + 1\n"
FENCE = f"```python\n{PROGRAM}```\n"
BAD = "```python\nbad\n```\n"
LAYOUTS = {
    "another language before": f"Example:\n```text\nf(1) = 2\n```\nSolution:\n{FENCE}",
    "JSON before": f'```json\n{{"a": 1}}\n```\nSo:\n{FENCE}',
    "C++ before": f"```cpp\nint f(int x);\n```\nIn Python:\n{FENCE}",
    "other languages after": f"{FENCE}Output:\n```text\n2\n```\nAnd:\n```bash\npython f.py\n```\n",
    "without a language after": f"{FENCE}Output:\n```\n2\n```\n",
    "a session after": f"{FENCE}```pycon\n>>> f(1)\n2\n```\n",
    "two programs": f"{BAD}Better:\n{FENCE}",
    "a title": f'```python title="f.py"\n{PROGRAM}```\n',
    "attributes": f"```{{.python .numberLines}}\n{PROGRAM}```\n",
    "a version": f"```Python3.11\n{PROGRAM}```\n",
    "a space before the language": f"``` py\n{PROGRAM}```",
    "no language": f"```\n{PROGRAM}```\n",
    "four backticks": f"````python\n{PROGRAM}````\n",
    "tildes": f"~~~python\n{PROGRAM}~~~\n",
    "a longer closing fence": f"```python\n{PROGRAM}``````\n```cpp\nx\n```\n",
    "a fence that is not closed": f"```python\n{PROGRAM}",
    "line breaks of Windows": FENCE.replace("\n", "\r\n"),
    "code in a line": f"Use ```x``` here.\n{FENCE}",
    "a list": "1. Code:\n\n   ```python\n   def f(x):\n       return x + 1\n   ```\nDone.",
    "a list in a list": "- a\n  - b:\n\n    ```python\n    def f(x):\n        return x + 1\n    ```\n",
    "a list item that is a fence": "- ```python\n  def f(x):\n      return x + 1\n  ```\n",
    "a quotation": "> ```python\n> def f(x):\n>     return x + 1\n> ```\n",
    "indented by three": "   ```python\n   def f(x):\n       return x + 1\n   ```",
    "tags around it": f"<answer>\n{FENCE}</answer>",
    "thinking before": f"<think>\n```text\nplan\n```\n{BAD}</think>\n{FENCE}",
    "thinking with an open fence": f"<think>\n```python\nbad\n</think>\n{FENCE}",
    "thinking that the prompt opened": f"{BAD}</think>\n{FENCE}",
    "thinking that the prompt opened, with an open fence": f"plan\n```python\nbad\n</think>\n\n{FENCE}",
    "thinking after": f"{FENCE}\n<think>\n{BAD}</think>\nDone.",
    "only thinking": f"<think>\n{FENCE}</think>\n",
    "code tags before": f"<code>bad</code>\n{FENCE}",
    "a tag that is mentioned": f"The `<code>` tag:\n{FENCE}",
    "a mark of byte order": f"```python\n\ufeff{PROGRAM}```",
}
EXACT = {
    "a fence in a docstring": 'def f(x):\n    """Adds.\n\n    ```\n    f(1) == 2\n    ```\n    """\n    return x + 1\n',
    "tags in a text": 'def f(x):\n    return "<code>a</code></think><think>"\n',
    "another fence in it": "def f(x):\n    return x\n\n~~~\n",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_program_of_a_response_is_found(name):
    assert final_code(LAYOUTS[name]) == PROGRAM


@pytest.mark.parametrize("name", EXACT)
def test_a_program_stays_as_it_is(name):
    assert final_code(f"Here:\n```python\n{EXACT[name]}```\nDone.") == EXACT[name]


def test_a_shorter_fence_does_not_close():
    assert final_code("````python\na\n```\nb\n````\n") == "a\n```\nb\n"
    assert final_code("```python\na\n``` b\nc\n```\n") == "a\n``` b\nc\n"


@pytest.mark.parametrize(
    "text", ["<think>\n```python\nx\n```\n</think>\nI do not know.", "    ```python\n    x\n    ```"]
)
def test_what_is_no_program_is_not_found(text):
    assert final_code(text) is None


def test_code_to_run_is_not_that_of_thinking():
    assert code_to_run("<think><code>1</code></think> no") is None
    assert code_to_run("<think><code>1</code></think> <code>2") == "2"


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "`",
            "```\n",
            "```a`\n",
            "~~~",
            "> ",
            ">",
            "- ",
            "- ```\n",
            "1. ",
            "*\n",
            "\n",
            "\r",
            "<",
            "<code>",
            "<think>",
        ),
        *("</think>\n", "<code></code>", "<think></think>", "```python\n", "``", " \t", "`<", "> ```\n", "</think>"),
    ],
)
def test_the_time_is_linear(unit):
    for text in (unit * (100_000 // len(unit)), "```" + unit * (100_000 // len(unit)) + "`", "```\n" + unit * 20_000):
        for function in (final_code, code_to_run):
            started = time.process_time()
            function(text)
            assert time.process_time() - started < 1.0 * slowness()
