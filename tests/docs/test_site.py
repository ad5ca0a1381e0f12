"""The site builds without a warning, is whole, and needs nothing from elsewhere."""

import html.parser
import os
import pathlib
import subprocess
import sys
import urllib.parse

import pytest

import paceline
import paceline.parallel.apex
from support.browser import BROWSER, Browser
from support.commands import wait_until
from support.pages import PROJECT

ROOMS = ("amp", "checkpoint", "data", "errors", "parallel", "pipeline", "plan", "timeline")
APEX = {
    f"paceline.parallel.apex.{name}" for name in ("DistributedDataParallel", "LARC", "Reducer", "convert_syncbn_model")
}


class Parts(html.parser.HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "alternate", "next", "prev"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=PROJECT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_the_site_is_whole_and_needs_nothing_from_elsewhere(folder):
    site = {path: Parts(path.read_text()) for path in folder.rglob("*.html") if path.name != "404.html"}
    every_link_leads_to_a_page_and_a_place_that_is_there(site)
    nothing_is_loaded_from_elsewhere(site)
    every_page_is_there_in_both_languages(site)
    every_public_name_is_in_the_reference(site)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser here")
@pytest.mark.parametrize(("page", "words"), [("index.html", "drifted"), ("zh/index.html", "卡住")])
def test_pages_from_the_disk_can_be_searched_and_are_as_wide_as_the_screen(folder, page, words, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.resize(360)
        for other in ("compatibility.html", "when-it-fails.html"):
            browser.open((folder / page).with_name(other))
            assert browser.ask("document.documentElement.scrollWidth") == 360
        browser.open(folder / page)
        browser.call("Page.navigate", url=f"{(folder / page).as_uri()}?q={urllib.parse.quote(words)}")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        links = wait_until(lambda: browser.ask(found))
        assert any("when-it-fails.html" in link for link in links)
        # The theme looks for the other language's sitemap, which it may not read from a disk, and does without.
        assert [said for said in browser.complaints() if "sitemap.xml" not in said] == []
        assert all(address.startswith(("file:", "data:", "about:")) for address in browser.requests())
    finally:
        browser.close()


def every_link_leads_to_a_page_and_a_place_that_is_there(site):
    broken = []
    for path, parts in site.items():
        for link in parts.links:
            target, anchor = urllib.parse.urldefrag(urllib.parse.unquote(link))
            if "://" in target or target.startswith("mailto:"):
                continue
            file = pathlib.Path(os.path.normpath(path.parent / target)) if target else path
            if not file.exists() or (anchor and file in site and anchor not in site[file].ids):
                broken.append((path.name, link))
    assert broken == []


def nothing_is_loaded_from_elsewhere(site):
    for path, parts in site.items():
        for load in parts.loads:
            assert "//" not in load, f"{path.name}: {load}"
            assert (path.parent / load).exists(), f"{path.name}: {load}"


def every_page_is_there_in_both_languages(site):
    places = {path.as_posix().split("/site/", 1)[1] for path in site}
    english = {place for place in places if not place.startswith("zh/")}
    assert {f"zh/{place}" for place in english} == places - english


def public_names():
    names = {f"paceline.{name}" for name in paceline.__all__} | APEX
    for room in ROOMS:
        module = __import__(f"paceline.{room}", fromlist=["_"])
        defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        exported = [name for name in getattr(module, "__all__", defined) if not name.startswith("_")]
        elsewhere = (paceline, *([paceline.parallel.apex] if room == "amp" else []))
        own = {name for name in exported if all(getattr(module, name) is not getattr(of, name, 0) for of in elsewhere)}
        names |= {f"paceline.{room}.{name}" for name in own}
    return names


def every_public_name_is_in_the_reference(site):
    ids = {name for path, parts in site.items() if path.parent.name == "reference" for name in parts.ids}
    assert public_names() - ids == set()
