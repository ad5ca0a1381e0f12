"""Drawings as SVG: words stay words, colours are classes, and what cannot be seen is told."""

from html import escape

from paceline.bench.report import palette
from paceline.bench.report.drawing import TEXT, Drawing, Line, Mark, Part, Rect, Text, moved, shortened

STYLE = f"text {{ font: {TEXT:g}px system-ui, sans-serif }} .bold {{ font-weight: 600 }}"


def to_svg(drawing: Drawing, name: str, title: str, describes: str) -> str:
    """An ``svg`` element for a page that has the palette's classes.

    Args:
        name: unique in the page.
        title, describes: what it is, and what is to be seen in it, for who does not see it.
    """
    size = f'viewBox="0 0 {_number(drawing.width)} {_number(drawing.height)}" width="{_number(drawing.width)}"'
    told = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(describes)}</desc>'
    head = f'<svg {size} height="{_number(drawing.height)}" role="img" aria-labelledby="{name}-t {name}-d">'
    return "\n".join((head, told, *map(_element, drawing.parts), "</svg>"))


def to_file(drawing: Drawing, title: str, describes: str) -> str:
    """An SVG that stands alone, with its title above it, in light and dark."""
    whole = moved(drawing, 34)
    whole.add(Text(0, 14, shortened(title, drawing.width, is_bold=True), is_bold=True))
    body = to_svg(whole, "figure", title, describes)
    style = f"<style>\n{STYLE}\n{palette.of_file()}\n</style>"
    return body.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace("\n", f"\n{style}\n", 1) + "\n"


def _element(part: Part) -> str:
    match part:
        case Line():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in part.points)
            dash = ' stroke-dasharray="4 4"' if part.is_dashed else ""
            return f'<polyline class="{part.colour}" points="{points}" stroke-width="{_number(part.width)}"{dash}/>'
        case Rect():
            place = f'x="{_number(part.x)}" y="{_number(part.y)}" width="{part.width:.2f}"'
            shape = f'{place} height="{_number(part.height)}" rx="{_number(part.radius)}"'
            return _said(f'rect class="{part.colour}" {shape}', "rect", part.says)
        case Mark(shape="circle"):
            shape = f'cx="{_number(part.x)}" cy="{_number(part.y)}" r="{_number(part.radius)}"'
            return _said(f'circle class="{part.colour}" {shape}', "circle", part.says)
        case Mark():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in part.corners)
            return _said(f'polygon class="{part.colour}" points="{points}"', "polygon", part.says)
        case Text():
            anchor = "" if part.anchor == "start" else f' text-anchor="{part.anchor}"'
            kind = f"{part.colour} bold" if part.is_bold else part.colour
            place = f'x="{_number(part.x)}" y="{_number(part.y)}"'
            return f'<text class="{kind}" {place}{anchor}>{escape(part.words)}</text>'


def _said(element: str, tag: str, says: str) -> str:
    return f"<{element}><title>{escape(says)}</title></{tag}>" if says else f"<{element}/>"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
