"""Links lead somewhere, in the repository."""

import pytest

from support.pages import all_pages, read_page

PAGES = {page.name: page for page in all_pages()}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_and_to_a_heading_that_is_there(name):
    page = PAGES[name]
    for link in page.links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in read_page(path).anchors, f"{name}: {link}"
