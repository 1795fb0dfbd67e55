"""The site of the documentation: every page is in its navigation, every redirect and anchor leads somewhere.

What needs Sphinx itself is built by `.ci/run`, where each warning is an error.
"""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from check_site import Site

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "site"))

from page_tables import names, sections  # noqa: E402
from redirects import MARK, find_redirects, moved_pages  # noqa: E402

REDIRECTS = moved_pages() | find_redirects(ROOT)
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.read_text(encoding="utf-8").startswith(MARK))
API = sorted(path for path in (DOCS / "reference/api").glob("*.md") if path.name != "README.md")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def listed(index: Path) -> list[str]:
    """Return the pages that an index lists, within docs/, and those that the indexes among them list."""
    found = []
    for _, pages in sections(text_of(index)):
        for page in pages:
            target = (index.parent / f"{page}.md").resolve()
            found.append(target.relative_to(DOCS).as_posix())
            if target.name == "README.md" or target.with_suffix("").is_dir():
                found += listed(target)
    return found


def test_every_page_is_in_the_navigation_once():
    assert sorted(listed(DOCS / "README.md")) == sorted(
        path.relative_to(DOCS).as_posix() for path in PAGES if path != DOCS / "README.md"
    )


def test_a_page_of_another_column_follows_its_row():
    text = "# A\n\n## One\n\n| page | for |\n|---|---|\n| [B](b.md) | see [C](c.md#x), [D](d/d.md) |\n\n"
    text += "## Two\n\nwords [E](e.md)\n\n## Three\n\n| [D](d/d.md) | and [B](b.md) |\n"
    assert list(sections(text)) == [("One", ["b", "c"]), ("Three", ["d/d"])]


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    found: dict[str, int] = {}
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    anchors = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)|[`*\[\]]", "", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = found.get(slug, 0)
        found[slug] = number + 1
        anchors.add(f"{slug}-{number}" if number else slug)
    return anchors


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")]), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_anchors_of_links_exist(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s:#]*\.md|)#([\w-]+)\)", text)
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in slugs((page.parent / target).resolve() if target else page)
    ]
    assert missing == []


def test_redirects_lead_to_pages_of_the_site():
    assert len(REDIRECTS) > 60
    for page, target in REDIRECTS.items():
        goal = (ROOT / PurePosixPath(page).parent / target.split("#")[0].replace(".html", ".md")).resolve()
        assert goal in [*PAGES, *ROOT.glob("*.md")], f"{page} leads to {target}, which is no page of the site"


def test_pages_that_programs_name_exist():
    programs = [path for folder in ("nemo_rl", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in programs for name in re.findall(r"\bdocs/[\w/-]+\.md", text_of(path))}
    assert len(named) > 10
    assert [name for name in named if (ROOT / name) not in PAGES] == []


def test_moved_pages_leave_no_file():
    assert [page for page in moved_pages() if (ROOT / f"{page}.md").exists()] == []


@pytest.mark.parametrize("folder", sorted({page.parent for page in DOCS.rglob("*.md")}), ids=lambda path: path.name)
def test_a_folder_has_few_pages(folder):
    assert len(list(folder.glob("*.md"))) <= 17


@pytest.mark.parametrize(
    "path",
    [
        *("docker", "cluster", "local-workstation", "testing", "documentation", "adding-new-models", "debugging"),
        *("nsys-profiling", "fp8", "model-quirks", "design-docs/checkpointing", "guides/grpo-deepscaler"),
        *("guides/async-grpo", "guides/grpo", "guides/dpo", "guides/sft", "guides/rm", "guides/eval"),
        *("guides/environments", "design-docs/fsdp2-parallel-plan", "design-docs/training-backends"),
    ],
)
def test_paths_of_nemo_rls_documentation_exist(path):
    assert (DOCS / f"{path}.md").is_file()


def test_a_redirect_without_its_one_link_is_refused(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/old.md"
    page.write_text(f"{MARK}\n\n# Old\n\nSee [A](a/b.md#c).\n")
    assert find_redirects(tmp_path) == {"docs/old": "a/b.html#c"}
    page.write_text(f"{MARK}\n\n# Old\n\nSee [A](a.md) or [B](b.md).\n")
    with pytest.raises(ValueError, match="2 links to pages; write exactly one"):
        find_redirects(tmp_path)


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_names_of_the_api_exist_and_have_a_docstring(page):
    found = names(text_of(page))
    assert len(found) == len(set(found)) >= 7
    for name in found:
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert value.__doc__, name


def test_the_api_has_the_names_that_the_package_exports():
    exported = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text_of(ROOT / "nemo_rl/__init__.py"), re.S)[1])
    assert set(names(text_of(DOCS / "reference/api/notebook.md"))) == {f"nemo_rl.{name}" for name in exported}


def test_the_api_has_the_interfaces_that_a_user_implements():
    """Those of the table of "A class of your own", under the name of their file."""
    table = text_of(DOCS / "development/adding-things.md").partition("\n## An environment\n")[0]
    places = re.findall(r"`(nemo_rl/[\w/]+)\.py::(\w+)` \|", table)
    assert len(places) == 8
    described = set(names(text_of(DOCS / "reference/api/extending.md")))
    assert {f"{file.replace('/', '.')}.{name}" for file, name in places} - described == set()


def test_the_page_of_commands_is_current():
    command = [sys.executable, "tools/generate_command_reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


HEAD = '<html><head><link rel="stylesheet" href="style.css"></head><body>'


@pytest.fixture
def site(tmp_path) -> Path:
    """A site of three pages and a redirect, without mistakes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "style.css").touch()
    (tmp_path / "index.html").write_text('<meta http-equiv="refresh" content="0; url=main.html" />')
    (tmp_path / "main.html").write_text(f'{HEAD}<a href="a/one.html#here">1</a><a href="https://example.com/x">x</a>')
    (tmp_path / "a/one.html").write_text('<h1 id="here">One</h1><a href="#here">up</a><a href="../main.html">back</a>')
    return tmp_path


def test_a_site_without_mistakes_has_no_findings(site):
    assert list(Site(site).findings()) == []


@pytest.mark.parametrize(
    ("file", "content", "finding"),
    [
        ("a/one.html", '<h1 id="there">One</h1>', "main.html links a/one.html#here, whose anchor does not exist."),
        ("a/one.html", '<p id="here"><a href="b.html">', "a/one.html links b.html, which is no file of the site."),
        ("a/two.html", "<p>", "a/two.html is not reached from index.html."),
        ("a/one.html", '<p id="here"><script src="https://x.org/y.js">', "a/one.html loads https://x.org/y.js from a"),
        ("old.html", '<meta http-equiv="refresh" content="0; url=gone.html" />', "old.html links gone.html, which is"),
    ],
)
def test_mistakes_of_a_site_are_found(site, file, content, finding):
    (site / file).write_text(content)
    (found,) = Site(site).findings()
    assert found.startswith(finding)
