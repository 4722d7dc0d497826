"""Test the report's page in a browser: no script error, everything by keyboard, narrow and wide,
light and dark.

Skipped without Chromium and its driver (Debian: chromium chromium-driver).
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import report_dumps as made

from commpass.report import html

webdriver = pytest.importorskip("selenium.webdriver", reason="needs: pip install selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
    ),
]
WIDTHS = (320, 360, 521, 768, 901, 1200, 1201, 1400)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Return the page of two runs, of which one was measured, with an example of everything."""
    one = made.eventful(8)
    slower = dataclasses.replace(one.timeline, us=one.timeline.us * 1.5)
    long = "decoder.layers.3.a_module_with_a_rather_long_name_that_nobody_can_break.projection"
    sites = (*made.layers(8), made.site("all_reduce_long", long, missed="nothing is left to hide"))
    other = dataclasses.replace(made.dump(sites, run="b", policy="off"), world_size=8)
    fell = made.dump(made.layers(2), run="b", number=1, direction="backward", fallback="no reason")
    runs = [
        html.Run((one,), "first", {0: slower}),
        html.Run((other, fell), "second", {}),
    ]
    out = tmp_path_factory.mktemp("page") / "report.html"
    html.write(runs, out)
    return out


@pytest.fixture
def opened(browser, path):
    """Yield the freshly loaded page, wide and light. It must not have a script error
    afterwards."""
    show(browser, path)
    yield browser
    assert errors(browser) == []


def show(browser, path: Path, width: int = 1280, scheme: str = "light", media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get("about:blank")
    browser.get(path.as_uri())


def errors(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def open_all(browser) -> None:
    """Open every line, site and detail, and those nested in them."""
    closed = ".open[aria-expanded=false]"
    browser.execute_script(
        "document.querySelectorAll(arguments[0]).forEach((b) => b.click())", closed
    )
    for _ in range(3):
        browser.execute_async_script(
            """
            for (const each of document.querySelectorAll("details:not([open])")) each.open = true;
            setTimeout(arguments[0], 50);
            """
        )


def press(browser, *keys: str) -> None:
    webdriver.ActionChains(browser).send_keys(*keys).perform()


def tab_to(browser, wanted) -> None:
    """Move to an element with the tab key, and check that it shows the focus."""
    for _ in range(200):
        press(browser, Keys.TAB)
        if browser.switch_to.active_element == wanted:
            width = wanted.value_of_css_property("outline-width")
            assert wanted.value_of_css_property("outline-style") != "none"
            assert width != "0px"
            return
    raise AssertionError("the tab key does not lead there")


def soon(browser, what):
    """Return the result of a function once there is one: details are filled after they have
    opened."""
    return WebDriverWait(browser, 20).until(what)


def in_table(browser, table: str, css: str, at: int = 0):
    return browser.find_elements(By.CSS_SELECTOR, f"[data-table={table}] {css}")[at]


def modules(browser) -> list[str]:
    """Return the modules in the lines of the first table of sites."""
    names = "#a [data-table=sites] > table > tbody > tr > th code"
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    return browser.execute_script(script, names)


@pytest.mark.slow
def test_everything_opens_without_an_error_and_nothing_is_loaded(opened, tmp_path):
    assert modules(opened) == ["layers.*.attn.o", "layers.*.mlp.down", "layers.*.mlp.down"]
    open_all(opened)
    assert made.REASON in opened.page_source
    assert "an error of 12% is above max_error" in opened.page_source
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert opened.save_screenshot(str(tmp_path / "page.png"))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_needs_scrolling_sideways(browser, path, tmp_path, width):
    show(browser, path, width)
    for when in ("closed", "open"):
        if when == "open":
            open_all(browser)
        needs = browser.execute_script("return document.documentElement.scrollWidth")
        browser.save_screenshot(str(tmp_path / f"{width}-{when}.png"))
        assert needs <= width, when
    assert errors(browser) == []


@pytest.mark.slow
def test_every_link_leads_somewhere(opened):
    links = opened.find_elements(By.CSS_SELECTOR, "nav a")
    assert len(links) >= 13
    for link in links:
        target = link.get_attribute("href").partition("#")[2]
        opened.execute_script("window.scrollTo(0, 0)")
        link.click()
        top = opened.execute_script(
            "return document.getElementById(arguments[0]).getBoundingClientRect().top", target
        )
        assert 0 <= top < 900, target
        assert opened.current_url.endswith(f"#{target}")


@pytest.mark.slow
def test_sorting_by_keyboard(opened):
    of = "#a [data-table=sites] thead button"
    heads = {each.text: each for each in opened.find_elements(By.CSS_SELECTOR, of)}
    (bytes_head,) = (head for text, head in heads.items() if text.startswith("bytes on the wire"))
    tab_to(opened, bytes_head)
    press(opened, Keys.ENTER)
    assert sorted_as(bytes_head) == "descending"
    counts = opened.execute_script(
        "return [...document.querySelectorAll('#a [data-table=sites] tbody td[data-label=count]')]"
        ".map((cell) => Number(cell.textContent))"
    )
    # 2 uncompressed: 2 MiB; 8 and 6 as int8: 2.03 and 1.5 MiB
    assert counts == [8, 2, 6]
    press(opened, Keys.SPACE)
    assert sorted_as(bytes_head) == "ascending"
    assert opened.switch_to.active_element == bytes_head
    first = next(iter(heads.values()))
    first.click()
    assert (sorted_as(first), sorted_as(bytes_head)) == ("ascending", "none")


def sorted_as(button) -> str:
    return button.find_element(By.XPATH, "..").get_attribute("aria-sort")


@pytest.mark.slow
def test_filtering_by_keyboard(opened):
    tab_to(opened, opened.find_element(By.CSS_SELECTOR, "#a [data-table=sites] input"))
    press(opened, "layers.2. DOWN")
    assert modules(opened) == ["layers.*.mlp.down"]
    said = opened.find_element(By.CSS_SELECTOR, "#a [data-table=sites] output")
    assert said.text == "1 of 3 lines, 1 site"
    press(opened, " int8")
    assert modules(opened) == []
    assert said.text == "0 of 3 lines, 0 sites"


@pytest.mark.slow
def test_site_and_its_candidates_by_keyboard(opened):
    opener = opened.find_element(By.CSS_SELECTOR, "#a [data-table=sites] .open")
    tab_to(opened, opener)
    press(opened, Keys.SPACE)
    assert opener.get_attribute("aria-expanded") == "true"
    detail = opened.find_element(By.CSS_SELECTOR, "#a .detail")
    assert made.REASON in detail.text
    shared, *sites = detail.find_elements(By.CSS_SELECTOR, "summary")
    assert len(sites) == 8
    tab_to(opened, shared)
    press(opened, Keys.ENTER)
    lines = soon(opened, lambda _: detail.find_elements(By.CSS_SELECTOR, "table > tbody > tr"))
    assert [line.find_element(By.TAG_NAME, "th").text for line in lines] == [
        "int8 by two_shot, 2 chunks, kernel",
        "uncompressed",
        "int4 by ring",
    ]
    tab_to(opened, sites[0])
    press(opened, Keys.ENTER)
    soon(opened, lambda _: "all_reduce_0, made of all_reduce_p, all_reduce_q" in detail.text)
    opener.send_keys(Keys.ENTER)
    assert not opened.find_elements(By.CSS_SELECTOR, "#a .detail")


@pytest.mark.slow
def test_timelines_by_keyboard(opened):
    figure = opened.find_element(By.CSS_SELECTOR, "#a figure")
    said = figure.find_element(By.CSS_SELECTOR, ".said")
    buttons = {each.text: each for each in figure.find_elements(By.TAG_NAME, "button")}
    tab_to(opened, buttons["Next wait"])
    press(opened, Keys.ENTER)
    assert said.text.startswith("exposed: the rank waits: all_reduce_0 in layers.0.attn.o")
    press(opened, Keys.ENTER)
    assert "all_reduce_1 in layers.0.mlp.down" in said.text
    buttons["Previous wait"].send_keys(Keys.ENTER)
    assert "all_reduce_0 in" in said.text
    painted = "return [...arguments[0].querySelector('canvas').toDataURL()].length"
    near = opened.execute_script(painted, figure)
    buttons["All"].send_keys(Keys.ENTER)
    assert opened.execute_script(painted, figure) != near


@pytest.mark.slow
def test_bars_show_what_is_chosen(opened):
    place = opened.find_element(By.CSS_SELECTOR, "#a [data-table=sites]")
    chosen = Select(place.find_element(By.TAG_NAME, "select"))
    assert chosen.first_selected_option.text == "exposed time, predicted"
    assert "measured" in " ".join(option.text for option in chosen.options)
    chosen.select_by_visible_text("bytes on the wire")
    text = "16 sites in graph order, by bytes on the wire; the highest bar is 1.0 MiB"
    assert text in place.text
    assert len(place.find_elements(By.CSS_SELECTOR, "svg.spark")) == 3


@pytest.mark.slow
def test_bars_have_a_scale(opened):
    place = opened.find_element(By.CSS_SELECTOR, "#a [data-table=sites]")
    marks = place.find_elements(By.CSS_SELECTOR, ".scale span")
    assert marks[-1].text == "0"
    Select(place.find_element(By.TAG_NAME, "select")).select_by_visible_text("bytes before")
    marks = [mark.text for mark in place.find_elements(By.CSS_SELECTOR, ".scale span")]
    assert marks == ["1.0 MiB", "512.0 KiB", "0"]
    assert "up to 1.0 MiB" in place.text


@pytest.mark.slow
def test_what_got_slower_is_marked(browser, tmp_path):
    sites = made.layers(2)
    slow = [
        dataclasses.replace(site, predicted_us=2 * site.plain_us) if "mlp" in site.module else site
        for site in sites
    ]
    runs = [html.Run((made.dump(each, run=run),), run) for each, run in ((sites, "a"), (slow, "b"))]
    html.write(runs, tmp_path / "report.html")
    show(browser, tmp_path / "report.html")
    marked = {
        place: [each.text for each in browser.find_elements(By.CSS_SELECTOR, f"{place} .slower")]
        for place in ("#a [data-table]", "#b [data-table]", "#compare [data-table]", ".pairs")
    }
    assert [len(texts) for texts in marked.values()][:3] == [0, 1, 1], marked
    assert marked[".pairs"]
    assert all(text.endswith("slower") for texts in marked.values() for text in texts)


CONTRAST = """
    const light = (colour) => {
      const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
        .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
      for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor;
        if (colour !== "rgba(0, 0, 0, 0)") return colour;
      }
    };
    const found = [];
    for (const element of document.body.querySelectorAll("*")) {
      const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
      if (!own || !element.checkVisibility() || element.disabled) continue;
      if (element.closest("svg, script, style")) continue;
      const two = [getComputedStyle(element).color, behind(element)].map(light);
      const ratio = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
      if (ratio < 4.5) found.push(`${element.tagName}.${element.className}: ${ratio}`);
    }
    return found;
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(browser, path, tmp_path, scheme):
    """The contrast is at least 4.5 to 1, as required by WCAG 2.1, 1.4.3."""
    show(browser, path, scheme=scheme)
    open_all(browser)
    browser.save_screenshot(str(tmp_path / f"{scheme}.png"))
    back = "return getComputedStyle(document.body).backgroundColor"
    assert (browser.execute_script(back) == "rgb(255, 255, 255)") == (scheme == "light")
    assert browser.execute_script(CONTRAST) == []
    assert errors(browser) == []


@pytest.mark.slow
def test_printed_page_is_light_and_without_buttons(browser, path):
    show(browser, path, scheme="dark", media="print")
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert back == "rgb(255, 255, 255)"
    hidden = browser.find_elements(By.CSS_SELECTOR, "nav, .tools")
    assert hidden
    assert not any(each.is_displayed() for each in hidden)
    assert errors(browser) == []


@pytest.mark.every
def test_ten_thousand_lines_are_made_when_they_are_wanted(browser, tmp_path):
    sites = [made.site(f"all_reduce_{n}", f"part{n}.mlp") for n in range(10_000)]
    out = tmp_path / "big.html"
    html.write([html.Run((made.dump(sites),), "big", {})], out)
    show(browser, out)
    assert len(modules(browser)) == 100
    in_table(browser, "sites", "> button.more").send_keys(Keys.ENTER)
    assert len(modules(browser)) == 200
    in_table(browser, "sites", "input").send_keys("part77")
    assert len(modules(browser)) == 100
    said = in_table(browser, "sites", "output")
    assert said.text == "111 of 10,000 lines, 111 sites"
    assert errors(browser) == []


@pytest.mark.slow
def test_names_run_no_script(browser, tmp_path):
    bad = "</script><img src=x onerror=document.title='bad'><script>document.title='bad'</script>"
    out = tmp_path / "bad.html"
    one = made.dump([made.site("s", bad, missed=bad), made.site("t", bad)], policy=bad)
    html.write([html.Run((one,), bad, {})], out)
    show(browser, out)
    open_all(browser)
    assert bad in browser.find_element(By.TAG_NAME, "h2").text
    assert modules(browser) == [bad]
    assert browser.title != "bad"
    assert errors(browser) == []


def test_sites_of_one_run_alone_are_no_share_of_the_other(browser, tmp_path):
    sites = made.layers(2)
    runs = [made.dump([*sites, made.site("extra", "head")]), made.dump(sites, run="b")]
    html.write([html.Run((each,), each.run, {}) for each in runs], tmp_path / "report.html")
    show(browser, tmp_path / "report.html")
    row = in_table(browser, "changes", "tbody > tr").text
    assert "only in A" in row
    assert "260.0 KiB → -" in row.replace("\u00a0", " ")
    assert "%" not in row


def test_short_words_stay_whole_on_a_telephone(browser, path):
    """A policy's name in the first table, with two runs."""
    show(browser, path, 400)
    cell = browser.find_element(By.CSS_SELECTOR, ".pairs tbody td.number")
    script = """
        const range = document.createRange();
        range.selectNodeContents(arguments[0]);
        return range.getClientRects().length;
    """
    assert (cell.text, browser.execute_script(script, cell)) == ("balanced", 1)
