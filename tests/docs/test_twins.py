"""A page and its twin in Chinese say the same, in the same order.

The twin of ``docs/page.md`` is ``docs/page.zh.md``, that of ``README.md`` is ``README.zh-CN.md``.
"""

import ast
import re

import pytest

from support.pages import DOCS, PROJECT, read_page

# Pages that stay in English: what is made of docstrings, and what only those read who change the code.
ENGLISH = {"architecture.md", *(f"reference/{path.name}" for path in (DOCS / "reference").glob("*.md"))}
TWINS = {
    path.relative_to(DOCS).as_posix(): path.with_name(path.name.replace(".md", ".zh.md"))
    for path in sorted(DOCS.rglob("*.md"))
    if ".zh" not in path.name and path.with_name(path.name.replace(".md", ".zh.md")).exists()
}
PAIRS = [(DOCS / name, twin) for name, twin in TWINS.items()] + [(PROJECT / "README.md", PROJECT / "README.zh-CN.md")]


def test_every_page_has_a_twin_or_stays_english():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if ".zh" not in path.name}
    assert pages - TWINS.keys() == ENGLISH
    assert {path.name for path in DOCS.rglob("*.zh.md")} == {twin.name for twin in TWINS.values()}


def test_every_title_of_the_navigation_is_translated():
    settings = (PROJECT / "mkdocs.yml").read_text()
    titles = re.findall(r"(?m)^ +- \"?([^:\"\n]+)\"?:(?: \S+\.md)?$", settings.split("\nnav:\n")[1])
    translated = settings.split("nav_translations:\n")[1]
    assert len(titles) > 20
    for title in titles:
        assert re.search(rf"(?m)^ {{12}}\"?{re.escape(title)}\"?: \S", translated), title


@pytest.mark.parametrize(("path", "twin"), PAIRS, ids=[path.name for path, _ in PAIRS])
def test_a_page_and_its_twin_have_the_same_headings_blocks_tables_and_links(path, twin):
    page, other = read_page(path), read_page(twin)
    assert [level for level, _ in page.headings] == [level for level, _ in other.headings]
    assert [(block.language, block.note) for block in page.blocks] == [
        (block.language, block.note) for block in other.blocks
    ]
    for block, its_twin in zip(page.blocks, other.blocks, strict=True):
        assert essence(block) == essence(its_twin), f"{twin.name}:{its_twin.line}"
    assert rows_of(page) == rows_of(other)
    assert targets_of(page) == targets_of(other)


@pytest.mark.parametrize(("path", "twin"), PAIRS, ids=[path.name for path, _ in PAIRS])
def test_a_page_and_its_twin_have_the_same_figures(path, twin):
    assert figures_of(read_page(path)) == figures_of(read_page(twin))


def figures_of(page):
    """Numbers with a decimal point; small whole ones may be words in one language."""
    return sorted(re.findall(r"\d+\.\d+", page.prose))


def essence(block):
    """Code without its comments; ``...`` for what is only there to be read."""
    if block.language == "python" and not block.text.startswith(">>> "):
        return ast.dump(ast.parse(block.text))
    return re.sub(r"(?m)\s+# .*$", "", block.text)


def rows_of(page):
    return sum(line.startswith("|") for line in page.prose.splitlines())


def targets_of(page):
    """Where its links lead: to which pages, in whichever language, and elsewhere; headings have other names."""
    to_languages = {"README.md", "README.zh-CN.md"}
    links = [link.partition("#")[0].replace(".zh.md", ".md") for link in page.links]
    return sorted(set(links) - to_languages)
