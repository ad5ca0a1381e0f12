"""Puts together what the site is built from: the pages of docs/, some from outside, and the help of commands.

The invariant: a link is written as it works in the repository, and works on the site as well.
"""

import itertools
import pathlib
import posixpath
import re

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from pymdownx.slugs import slugify

from paceline.cli import command

PROJECT = pathlib.Path(__file__).parents[2]
SOURCES = PROJECT / "docs"
PAGES_OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".json": "json", ".diff": "diff"}

_LINK = re.compile(r"(\]\()([^)\s#:]+)([)#\s])")
_HELP = re.compile(r"^<!-- help: ([a-z ]+) -->$", re.MULTILINE)


@event_priority(100)  # before other plugins look at the folder
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the site be built from a copy of docs/ in which links lead to where their targets are on the site."""
    target = pathlib.Path(config.site_dir).with_name("pages")
    contents: dict[str, bytes] = {}
    pages = {path: path for path in PAGES_OUTSIDE}
    for path in sorted(SOURCES.rglob("*")):
        name = path.relative_to(SOURCES).as_posix()
        if path.suffix == ".md":
            pages[name] = path.relative_to(PROJECT).as_posix()
        elif path.is_file() and path.suffix != ".py":
            contents[name] = path.read_bytes()
    linked: set[str] = set()
    for name, path in pages.items():
        text, files = _page((PROJECT / path).read_text(), path, name)
        contents[name] = text.encode()
        linked |= files
    contents |= {_on_site(path): _as_page(path).encode() for path in linked - set(pages.values())}
    _write(contents, target)
    config.docs_dir = str(target)
    return config


def _page(text: str, path: str, name: str) -> tuple[str, set[str]]:
    """A page with links that lead to places on the site, and the files outside of docs/ that it links to."""
    linked = set()

    def lead(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        if not target.startswith("docs/") and (PROJECT / target).is_file():
            linked.add(target)
        return found[1] + posixpath.relpath(_on_site(target), posixpath.dirname(name) or ".") + found[3]

    text = _HELP.sub(lambda found: _help_of(found[1]), _LINK.sub(lead, text))
    return _with_english_anchors(text, path) if path.endswith(".zh.md") else text, linked


def _with_english_anchors(text: str, path: str) -> str:
    """A page in Chinese whose headings have their names in English too: pages without a twin link to those."""
    english = (PROJECT / path.replace(".zh.md", ".md")).read_text().splitlines()
    lines = text.splitlines()
    slug = slugify(case="lower")
    for number, of_twin in zip(_headings(lines), _headings(english), strict=False):  # a test holds that all are there
        lines[number] += f' <a id="{slug(english[of_twin].strip("# "), "-")}"></a>'
    return "\n".join(lines) + "\n"


def _headings(lines: list[str]) -> list[int]:
    """Which lines are headings; not comments in blocks of code."""
    is_code = list(itertools.accumulate(lines, lambda inside, line: inside ^ line.startswith("```"), initial=False))
    return [number for number, line in enumerate(lines) if line.startswith("#") and not is_code[number]]


def _on_site(path: str) -> str:
    """A file's place on the site, by its path in the repository; a page is linked to by its name in English."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".zh.md", ".md")
    return path if path.endswith(".md") else path.replace(".", "-") + ".md"  # the name's end would be a language


def _as_page(path: str) -> str:
    text = (PROJECT / path).read_text()
    language = LANGUAGES.get(pathlib.PurePath(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n````{language}\n{text}````\n"


def _help_of(name: str) -> str:
    found: click.Command = command
    context = click.Context(command, info_name="paceline")
    for part in name.split()[1:]:
        assert isinstance(found, click.Group)
        found = found.commands[part]
        context = click.Context(found, info_name=part, parent=context)
    return f"```text\n{found.get_help(context)}\n```"


def _write(contents: dict[str, bytes], target: pathlib.Path) -> None:
    """Make the folder hold these files and no others; those that are right stay untouched, for `mkdocs serve`."""
    if target.is_dir():
        for path in target.rglob("*"):
            if path.is_file() and path.relative_to(target).as_posix() not in contents:
                path.unlink()
    for name, content in contents.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
