"""The colours, by what they stand for, in light and in dark.

They stay apart for readers who see no red or no green: those that meet in a figure differ in lightness too, and lines
differ in their marks. Words in any of `WORDS` have a contrast of at least 4.5 to 1 with what they stand on.
"""

from collections.abc import Mapping

LIGHT_AND_DARK: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#57606a", "#9aa4af"),
    "grid": ("#dfe3e8", "#30363d"),
    "page": ("#f6f7f9", "#0d1117"),
    "surface": ("#ffffff", "#161b22"),
    "ours": ("#1f6fd0", "#5aa2f7"),
    "torch": ("#c2410c", "#f08c4f"),
    "parallel": ("#86198f", "#f0b6f5"),
    "alone": ("#6a737d", "#8b949e"),
    "forward": ("#a5b0bc", "#8b96a2"),
    "backward": ("#6e7781", "#656d76"),
    "optimizer": ("#2f3a45", "#c9d1d9"),
    "rest": ("#d0d7de", "#3d444d"),
    "hidden": ("#2a78d6", "#3987e5"),
    "exposed": ("#d9572b", "#e8703f"),
}

WORDS = ("ink", "quiet", "ours", "torch", "parallel", "alone")


def rules(colours: Mapping[str, str]) -> str:
    """What a class of each colour's name means, in CSS; lines are drawn in it, all else is filled with it."""
    return "\n".join(
        f".{name} {{ fill: {colour} }} polyline.{name} {{ fill: none; stroke: {colour} }}"
        for name, colour in colours.items()
    )


def of_page() -> str:
    """The colours as variables that follow ``color-scheme``, and the classes that use them."""
    light = " ".join(f"--{name}: {light};" for name, (light, _) in LIGHT_AND_DARK.items())
    both = " ".join(f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in LIGHT_AND_DARK.items())
    classes = rules({name: f"var(--{name})" for name in LIGHT_AND_DARK})
    return f":root {{ {light} }}\n@supports (color: light-dark(#fff, #000)) {{ :root {{ {both} }} }}\n{classes}"


def of_file() -> str:
    """The classes in a file of its own, where a picture follows the reader's preference."""
    light = rules({name: light for name, (light, _) in LIGHT_AND_DARK.items()})
    dark = rules({name: dark for name, (_, dark) in LIGHT_AND_DARK.items()})
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
