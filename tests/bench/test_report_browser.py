"""Reports in a real browser: nothing is fetched, nothing overflows, all can be read in light, in dark and on paper."""

import pytest

from paceline.bench import report
from support.benches import bench_on, hostile, on_gpus
from support.browser import BROWSER, Browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

# Of each word that is shown, its colour on what lies behind it: the lowest contrast, and the words.
CONTRAST = """(() => {
  const parts = colour => (colour.match(/[0-9.]+/g) || []).map(Number)
  const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255).map(
    c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
  ).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor)
      if (colour.length == 3 || colour[3] == 1) return colour
    }
    return [255, 255, 255]
  }
  let worst = [99, ""]
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (words.nextNode()) {
    const element = words.currentNode.parentElement, box = element.getBoundingClientRect()
    if (!words.currentNode.data.trim() || !box.width || element.closest("title, desc, .unseen")) continue
    const style = getComputedStyle(element)
    const colour = parts(element.closest("svg") ? style.fill : style.color)
    const [low, high] = [luminance(colour), luminance(behind(element))].sort((a, b) => a - b)
    const contrast = (high + 0.05) / (low + 0.05)
    if (contrast < worst[0]) worst = [contrast, words.currentNode.data]
  }
  return worst
})()"""

# Words of figures that reach out of their picture, or into one another.
COLLISIONS = """[...document.querySelectorAll(".picture svg")].filter(svg => svg.checkVisibility()).flatMap(svg => {
  const whole = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")]
  const boxes = texts.map(text => text.getBoundingClientRect())
  const out = texts.filter((_, i) => boxes[i].left < whole.left - 1 || boxes[i].right > whole.right + 1)
  const into = texts.filter((_, i) => boxes.some((box, j) => j < i
    && Math.min(box.right, boxes[i].right) - Math.max(box.left, boxes[i].left) > 1
    && Math.min(box.bottom, boxes[i].bottom) - Math.max(box.top, boxes[i].top) > 4))
  return [...out, ...into].map(text => text.textContent)
})"""

SHOWN = """[...document.querySelectorAll(".picture")].map(
  picture => [...picture.querySelectorAll("svg")].filter(svg => svg.checkVisibility()).length
)"""

TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(13, 17, 23)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    benches = {"eight": bench_on(8), "one": bench_on(1), "hostile": hostile(), "gpus": on_gpus()}
    for name, bench in benches.items():
        report.write(bench, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in benches}


@pytest.mark.parametrize("name", ["eight", "one", "hostile", "gpus"])
def test_a_page_is_whole_and_within_its_window_at_any_width(browser, pages, name):
    browser.prefer("light")
    browser.open(pages[name])
    for width in (320, 360, 390, 600, 768, 1024, 1440):
        browser.resize(width)
        assert browser.ask(TOO_WIDE) <= 0, f"at {width}"
        assert set(browser.ask(SHOWN)) == {1}, f"at {width}"
        assert browser.ask(COLLISIONS) == [], f"at {width}"
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]


def test_a_page_is_the_same_without_scripts_and_network(browser, pages):
    browser.resize(1280)
    browser.open(pages["eight"])
    before = browser.picture()
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["eight"])
        assert browser.picture() == before
        assert browser.complaints() == []
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        online = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.call("Network.emulateNetworkConditions", **online)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["gpus", "hostile"])
def test_all_words_stand_out_from_what_is_behind_them(browser, pages, name, scheme):
    browser.resize(1280)
    browser.prefer(scheme)
    browser.open(pages[name])
    browser.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
    contrast, words = browser.ask(CONTRAST)
    assert contrast >= 4.5, words
    assert browser.ask(BACKGROUND) == {"light": LIGHT, "dark": DARK}[scheme]


def test_colours_follow_the_reader_until_he_chooses(browser, pages):
    browser.resize(390)
    browser.prefer("dark")
    browser.open(pages["eight"])
    assert browser.ask(BACKGROUND) == DARK
    seen = {}
    for choice in ("Light", "Dark", "Auto"):
        browser.click(f".theme label:has(#{choice.lower()})")
        seen[choice] = browser.ask(BACKGROUND)
    assert seen == {"Light": LIGHT, "Dark": DARK, "Auto": DARK}
    browser.prefer("light")
    assert browser.ask(BACKGROUND) == LIGHT


def test_on_paper_it_is_light_and_without_buttons(browser, pages):
    browser.resize(720)
    browser.prefer("dark", media="print")
    browser.open(pages["eight"])
    browser.ask("document.querySelector('#dark').click()")
    assert browser.ask(BACKGROUND) == LIGHT
    assert browser.ask("document.querySelector('.theme').checkVisibility()") is False
    assert set(browser.ask(SHOWN)) == {1}
    assert browser.ask(TOO_WIDE) <= 0


def test_who_does_not_see_a_figure_is_told_and_finds_a_table(browser, pages):
    browser.resize(1280)
    browser.prefer("light")
    browser.open(pages["eight"])
    told = browser.ask("""[...document.querySelectorAll(".picture svg")].map(svg => [
        svg.getAttribute("role"),
        ...svg.getAttribute("aria-labelledby").split(" ").map(id => document.getElementById(id).textContent.length > 8),
    ])""")
    assert len(told) == 7 * 4
    assert {tuple(each) for each in told} == {("img", True, True)}
    browser.click("#throughput summary")
    assert browser.ask("document.querySelector('#throughput td').checkVisibility()")
    rows = browser.ask("[...document.querySelectorAll('#throughput tbody tr')].map(row => row.innerText)")
    assert "paceline DDP\t1,592\t2,963\t5,602\t9,292" in rows
