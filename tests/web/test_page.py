"""The page in a real browser: one Chromium for all tests."""

from __future__ import annotations

import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the browser tests need selenium (pip install 'offsphere[dev]')")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
QUERY = "When was the zeppelin built?"
TOKEN = "a-token-for-the-page"

CONTRAST = """
const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const element = [...document.querySelectorAll(arguments[0])].find((one) => one.offsetParent || one === document.body);
let behind = element;
while (behind.parentElement && rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map((one) => light(rgb(one)));
return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="the browser tests need chromium and chromedriver (Debian: apt install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Any, site: Any) -> Iterator[Page]:
    """The page, wide, in a new tab of the same browser; at the end its console must be empty."""
    opened = Page(chromium, site)
    opened.size(1280, 900)
    chromium.get_log("browser")
    yield opened
    assert opened.console() == []
    assert chromium.execute_script("return window.hacked") is None


class Page:
    """What a person does with the page."""

    def __init__(self, driver: Any, site: Any):
        self.driver = driver
        self.site = site

    def open(self, **values: Any) -> Page:
        self.driver.get(f"{self.site.url}/?{urllib.parse.urlencode(values)}")
        self.until(lambda: self.find("#main").is_displayed())
        return self

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, holds: Callable[[], Any], seconds: float = 20) -> Any:
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: holds())

    def ids(self, ranking: str) -> list[str]:
        script = "return [...document.querySelectorAll(`#${arguments[0]} .hit`)].map((hit) => hit.dataset.id)"
        return self.driver.execute_script(script, ranking)

    def shows(self, gamma_d: float, k: int = 10) -> bool:
        """Whether both rankings are what the API says for this exponent."""
        return [self.ids("trained"), self.ids("cosine")] == [
            [hit["id"] for hit in self.site.ask("/search", {"query": QUERY, "k": k, **under}).json["hits"]]
            for under in ({"gamma_d": gamma_d}, {"similarity": "cosine"})
        ]

    def hit(self, ranking: str, id: str) -> Any:
        hits = self.driver.find_elements(By.CSS_SELECTOR, f"#{ranking} .hit")
        return next(hit for hit in hits if hit.get_attribute("data-id") == id)

    def busy(self) -> bool:
        return self.find("body").get_attribute("aria-busy") == "true"

    def contrast(self, selector: str) -> float:
        """Of the text of the first such element that is shown, against what is behind it, as WCAG 2 defines it."""
        return self.driver.execute_script(CONTRAST, selector)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def sideways(self) -> int:
        """How many pixels the page is wider than the window."""
        return self.driver.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


def test_a_query_shows_two_rankings(page: Page) -> None:
    page.open()
    assert not page.find("#answer").is_displayed()
    page.find("#query").send_keys(QUERY, Keys.ENTER)
    page.until(lambda: page.shows(0.0))
    assert page.ids("trained") != page.ids("cosine")
    left, right = (page.find(f".ranking[data-list={name}]").rect for name in ("trained", "cosine"))
    assert left["x"] + left["width"] <= right["x"]
    assert left["y"] == right["y"]
    said = page.site.ask("/explore", {"query": QUERY, "gamma_d": 0}).json
    for name in ("trained", "cosine"):
        hits = page.driver.find_elements(By.CSS_SELECTOR, f"#{name} .hit")
        for hit, row in zip(hits, said[name], strict=True):
            assert row["why"] in hit.text
            assert f"{row['angle']:.1f}°" in hit.text
            fill = hit.find_element(By.CSS_SELECTOR, ".length .fill").rect["width"]
            track = hit.find_element(By.CSS_SELECTOR, ".length .track").rect["width"]
            longest = page.site.ask("/index").json["lengths"]["edges"][-1]
            assert fill / track == pytest.approx(min(row["length"] / longest, 1), abs=0.02)
    assert "in both rankings" in page.find("#summary").text
    page.until(lambda: "First:" in page.find("#live").get_attribute("textContent"))
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#histogram .mark")) == 20


def test_the_slider_ranks_again_as_the_api_does(page: Page) -> None:
    page.open(q=QUERY)
    page.until(lambda: page.shows(0.0))
    before = page.ids("trained")
    slider = page.find("#gamma")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 40)
    page.until(lambda: page.find("#answer").get_attribute("data-gamma") == "0.4")
    assert page.find("#gamma-out").text == "0.40"
    assert page.shows(0.4)
    assert page.ids("trained") != before
    page.driver.execute_script(
        "arguments[0].value = 1; arguments[0].dispatchEvent(new Event('input', { bubbles: true }))", slider
    )
    page.until(lambda: page.find("#answer").get_attribute("data-gamma") == "1")
    assert page.ids("trained") == page.ids("cosine")
    page.find("#reset").click()
    page.until(lambda: page.shows(0.0))


def test_the_address_carries_the_view(page: Page) -> None:
    page.open(q=QUERY, gamma="0.55", k=20)
    page.until(lambda: page.shows(0.55, 20))
    assert page.find("#query").get_attribute("value") == QUERY
    assert page.find("#gamma").get_attribute("value") == "0.55"
    page.find("#query").clear()
    page.find("#query").send_keys("super bowl", Keys.ENTER)
    page.until(lambda: "super+bowl" in page.driver.current_url)
    page.driver.back()
    page.until(lambda: page.shows(0.55, 20))


def test_keyboard_alone(page: Page) -> None:
    page.open(q=QUERY)
    page.until(lambda: page.shows(0.0))
    page.press("/")
    assert page.focused().get_attribute("id") == "query"
    page.press(Keys.ARROW_DOWN)
    trained, cosine = page.ids("trained"), page.ids("cosine")
    assert page.focused().get_attribute("data-id") == trained[0]
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.focused().get_attribute("data-id") == trained[2]
    page.press(Keys.ARROW_UP)
    assert page.focused().get_attribute("data-id") == trained[1]
    page.press(Keys.ARROW_RIGHT)
    there = page.focused()
    assert there.find_element(By.XPATH, "..").get_attribute("id") == "cosine"
    assert there.get_attribute("data-id") == (trained[1] if trained[1] in cosine else cosine[1])
    page.press(Keys.END)
    assert page.focused().get_attribute("data-id") == cosine[-1]
    page.press("/")
    assert page.focused().get_attribute("id") == "query"
    page.press("a/b")  # typed, not a shortcut
    assert page.find("#query").get_attribute("value") == "a/b"


def test_tab_reaches_everything_in_the_order_of_the_page(page: Page) -> None:
    page.open(q=QUERY, gamma="0.50")
    page.until(lambda: page.shows(0.5))
    page.find("#query").click()
    order = []
    for _ in range(6):
        now = page.focused()
        order.append(now.get_attribute("id") or now.get_attribute("class").partition(" ")[0] or now.text)
        page.press(Keys.TAB)
    assert order == ["query", "k", "Search", "reset", "gamma", "hit"]


def test_what_documents_say_is_text_and_never_markup(page: Page, documents: list[Any]) -> None:
    nasty = documents[-3]
    page.open(q="zeppelin engine", gamma="1.00", k=50)
    page.until(lambda: nasty.id in page.ids("trained"))
    assert nasty.id in page.ids("cosine")
    hit = page.hit("trained", nasty.id)
    assert hit.find_element(By.CSS_SELECTOR, "h3").text == " ".join(nasty.title.split())
    assert hit.find_element(By.CSS_SELECTOR, ".text").get_attribute("textContent") == nasty.text
    inside = "return document.querySelectorAll('main script, main img, ol ol').length"
    assert page.driver.execute_script(inside) == 0
    page.find("#query").clear()
    page.find("#query").send_keys("<script>window.hacked=1</script>\"'&", Keys.ENTER)
    page.until(lambda: "hacked" in page.driver.current_url and not page.busy())
    page.driver.refresh()
    page.until(lambda: page.ids("trained"))


def test_a_long_text_is_cut_and_can_be_opened(page: Page, documents: list[Any]) -> None:
    page.open(q="a long story that never ends")
    page.until(lambda: "long" in page.ids("trained"))
    hit = page.hit("trained", "long")
    text, more = (hit.find_element(By.CSS_SELECTOR, one) for one in (".text", ".more"))
    assert len(text.get_attribute("textContent")) < 500
    hit.send_keys(Keys.ENTER)
    page.until(lambda: text.get_attribute("textContent") == documents[-2].text)
    assert more.get_attribute("aria-expanded") == "true"
    assert hit.rect["height"] < 700
    more.click()
    page.until(lambda: len(text.get_attribute("textContent")) < 500)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_scrolls_sideways_and_text_can_be_read(page: Page, width: int, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.size(width, 844)
    page.open(q="zeppelin", gamma="0.30")
    page.until(lambda: page.ids("trained"))
    assert page.sideways() <= 0
    narrow = width < 736
    assert page.find("#cosine").is_displayed() is not narrow
    if narrow:
        page.find("#tab-cosine").click()
        assert page.find("#cosine").is_displayed() and not page.find("#trained").is_displayed()
        assert page.sideways() <= 0
    for selector in ("body", ".text", ".why", ".soft", ".up, .down", ".more"):
        assert page.contrast(selector) >= 4.5, selector
    picture = page.driver.get_screenshot_as_png()
    assert len(set(picture_bytes(picture))) > 100
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def picture_bytes(png: bytes) -> bytes:
    """The bytes of a picture's pixels: an empty page has very few different ones."""
    from io import BytesIO

    from PIL import Image

    return Image.open(BytesIO(png)).convert("L").tobytes()


def test_every_control_has_a_name(page: Page) -> None:
    page.open(q=QUERY)
    page.until(lambda: page.shows(0.0))
    unnamed = [
        element.get_attribute("outerHTML")
        for element in page.driver.find_elements(By.CSS_SELECTOR, "button, input, select, svg")
        if element.is_displayed() and not element.accessible_name
    ]
    assert unnamed == []
    assert page.find("#histogram svg").aria_role in ("img", "image")
    assert page.find("#gamma").get_attribute("aria-valuetext") == "0.00, as trained"


def test_an_empty_index_says_so(page: Page, empty_explorer: Any, serving: Any) -> None:
    with serving(empty_explorer) as page.site:
        page.open(q=QUERY)
        assert "no documents yet" in page.find("#summary").text
        assert not page.find("#query").is_enabled()


def test_a_server_that_is_gone_is_named_and_asked_again(page: Page, explorer: Any, serving: Any) -> None:
    with serving(explorer) as page.site:
        page.open(q=QUERY)
        page.until(lambda: page.shows(0.0))
    page.find("#gamma").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: "does not answer" in page.find("#trouble").text)
    assert page.find("#trouble").get_attribute("role") == "alert"
    assert page.ids("trained")  # what was there stays
    with serving(explorer, port=urllib.parse.urlsplit(page.site.url).port):
        page.find("#retry").click()
        page.until(lambda: page.find("#answer").get_attribute("data-gamma") == "0.01")
        assert not page.find("#trouble").is_displayed()
    assert any("ERR_" in message for message in page.console())  # the browser's own note of it, and nothing else later


def test_a_server_with_a_token_asks_for_it(page: Page, explorer: Any, serving: Any) -> None:
    with serving(explorer, TOKEN) as page.site:
        page.driver.get(f"{page.site.url}/")
        page.until(lambda: page.find("#token-form").is_displayed())
        page.find("#token").send_keys("wrong", Keys.ENTER)
        page.until(lambda: "refused" in page.find("#trouble").text)
        page.find("#token").clear()
        page.find("#token").send_keys(TOKEN, Keys.ENTER)
        page.until(lambda: page.find("#main").is_displayed())
        page.find("#query").send_keys(QUERY, Keys.ENTER)
        page.until(lambda: page.ids("trained"))
        assert TOKEN not in page.driver.current_url
        page.driver.get(f"{page.site.url}/docs")
        page.until(lambda: "/explore" in page.find("#routes").text)
        page.driver.execute_script("sessionStorage.clear()")
    assert all("401" in message for message in page.console())


def test_the_page_of_the_api_lists_every_route(page: Page) -> None:
    page.driver.get(f"{page.site.url}/docs")
    page.until(lambda: page.driver.find_elements(By.CSS_SELECTOR, ".route"))
    shown = [heading.text for heading in page.driver.find_elements(By.CSS_SELECTOR, ".route h2")]
    paths = page.site.ask("/openapi.json").json["paths"]
    assert shown == [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    page.size(390, 844)
    assert page.sideways() <= 0
