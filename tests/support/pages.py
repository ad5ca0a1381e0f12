"""The project's pages of Markdown, taken apart: headings, links, blocks of code."""

import dataclasses
import pathlib
import re

PROJECT = pathlib.Path(__file__).parents[2]
DOCS = PROJECT / "docs"

_FENCE = re.compile(r"^(`{3,})(\w*)")
_NOTE = re.compile(r"^<!-- snippet: (.+) -->$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; ``note`` is the comment ``<!-- snippet: NOTE -->`` before it, ``line`` that of its first line."""

    language: str
    text: str
    line: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """A page; ``prose`` is what is outside of its blocks."""

    path: pathlib.Path
    prose: str
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return self.path.relative_to(PROJECT).as_posix()

    @property
    def headings(self) -> list[tuple[int, str]]:
        """Level and text of each."""
        found = re.findall(r"(?m)^(#{1,6}) (.+)$", self.prose)
        return [(len(marks), text.strip()) for marks, text in found]

    @property
    def links(self) -> list[str]:
        return _LINK.findall(_CODE.sub("", self.prose))

    @property
    def inline_code(self) -> list[str]:
        return _CODE.findall(self.prose)

    def section(self, heading: str) -> str:
        """The prose from that heading to the next of its level, or of one above."""
        level = next(level for level, text in self.headings if text == heading)
        after = self.prose.split(f"\n{'#' * level} {heading}\n", 1)[1]
        return re.split(rf"(?m)^#{{1,{level}}} ", after)[0]

    @property
    def anchors(self) -> set[str]:
        """As code hosts name them."""
        seen: dict[str, int] = {}
        anchors = set()
        for _, text in self.headings:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
            anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            count = seen[anchor] = seen.get(anchor, -1) + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
        return anchors


def read_page(path: pathlib.Path) -> Page:
    """Take a page apart."""
    prose, blocks = [], []
    fence, note, body, start = "", "", [], 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        opening = _FENCE.match(line)
        if fence and line == fence[: fence.rindex("`") + 1]:
            blocks.append(Block(fence.strip("`"), "\n".join(body) + "\n", start, note))
            fence, note = "", ""
        elif fence:
            body.append(line)
        elif opening:
            fence, body, start = opening[0], [], number + 1
        else:
            found = _NOTE.match(line)
            note = found[1] if found else note if not line.strip() else ""
            prose.append(line)
    assert not fence, f"{path}: a block is not closed"
    return Page(path, "\n".join(prose) + "\n", tuple(blocks))


def all_pages() -> list[Page]:
    """All that the project ships, in all languages."""
    return [read_page(path) for path in sorted([*PROJECT.glob("*.md"), *DOCS.rglob("*.md")])]
