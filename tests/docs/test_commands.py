"""Commands in the pages are ones that the command line takes."""

import itertools
import re
import shlex

import click
import pytest

from paceline.cli import command
from support.pages import PROJECT, all_pages

PAGES = {page.name: page for page in all_pages()}
_SHELLS = ("console", "bash", "sh")


def commands_of(page):
    """Each `paceline ...` of the page, in shells and between backquotes."""
    for block in page.blocks:
        if block.language in _SHELLS:
            text = re.sub(r"\\\n\s*", "", block.text)
            for line in text.splitlines():
                prompt = re.match(r"(\w+)?[$#] ", line)
                if prompt:
                    yield from _calls(line[prompt.end() :])
    for code in page.inline_code:
        if re.match(r"([A-Z_]+=\S+ )*(paceline|python -m paceline(\.launch)?) [a-z-]", code):
            yield from _calls(code.replace("\n", " "))


def _calls(line):
    words = shlex.split(line, comments=True)
    for index, word in enumerate(words):
        before = words[:index]
        is_launch = word == "paceline.launch" and before[-2:] == ["python", "-m"]
        if is_launch or (word == "paceline" and (not before or before[-1] not in ("install", "import"))):
            stop = next((at for at in range(index, len(words)) if words[at] in ("|", ";", "&&", "&", ">")), len(words))
            yield (["run"] if is_launch else []) + words[index + 1 : stop]
            return


@pytest.mark.parametrize("name", PAGES)
def test_the_command_line_takes_every_command_of_the_page(name):
    for words in commands_of(PAGES[name]):
        for choice in itertools.product(*(word.replace("\\|", "|").split("|") for word in words)):
            if choice and choice[-1] != "...":
                _parse(choice, name)


def _parse(words, name):
    found = command
    rest = list(words)
    while isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{name}: paceline {' '.join(words)}"
        found = found.commands[rest.pop(0)]
    if isinstance(found, click.Group) or not rest:
        return  # the command is only named
    script = next((word for word in rest if word.endswith(".py") or word == "..."), None)
    try:
        found.make_context(words[0], [*rest, *([] if script or found.name != "run" else ["script.py"])])
    except click.exceptions.Exit:
        return  # --help
    except click.ClickException as error:
        raise AssertionError(f"{name}: paceline {' '.join(words)}: {error.format_message()}") from None
    if script and script.startswith(("examples/", "benchmarks/")):
        assert (PROJECT / script).is_file(), f"{name}: {script}"


def test_scripts_that_pages_name_are_there():
    for page in PAGES.values():
        texts = [page.prose, *(block.text for block in page.blocks)]
        for path in re.findall(r"\b((?:examples|benchmarks|tests)/[\w/]+\.(?:py|sbatch|json))\b", "\n".join(texts)):
            assert (PROJECT / path).is_file(), f"{page.name}: {path}"


def test_every_command_is_in_the_reference():
    visible = [name for name, found in command.commands.items() if not found.hidden]
    page = PAGES["docs/reference/command.md"]
    for name in visible:
        assert f"<!-- help: paceline {name} -->" in page.prose
        assert (2, f"paceline {name}") in page.headings
