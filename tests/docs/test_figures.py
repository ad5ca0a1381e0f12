"""A figure that stands on two pages is the same on both."""

import re

from support.pages import DOCS, read_page


def rows_of(section):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def test_the_ratios_beside_which_wrapper_are_those_of_the_page_of_dataparallel():
    measured = rows_of(read_page(DOCS / "data-parallel.md").section("How long a step takes"))
    quoted = rows_of(read_page(DOCS / "which-wrapper.md").section("Measured"))
    ratios = {row[0]: row[-1] for row in measured[2:]}
    assert len(ratios) >= 5
    assert {row[0]: row[-1] for row in quoted[2:]} == ratios


def test_how_much_longer_dataparallel_takes_is_the_same_figure_wherever_it_stands():
    page = read_page(DOCS / "data-parallel.md")
    ratio = float(rows_of(page.section("How long a step takes"))[-2][-1])
    (said,) = re.findall(r"([\d.]+) times as\s+long with 200 small ones", page.prose)
    assert float(said) == round(ratio, 1)
