"""The report in a real browser: it loads without a fault, answers mouse and keys, fits, and can be read."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright
from report_lines import Line, recording_lines, write_lines

from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import read_recording
from compiled_engine_debug.report import render_report

pytestmark = pytest.mark.browser

BROWSER_VARIABLE = "COMPILED_ENGINE_CHROMIUM"
ARGUMENTS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
SECTIONS = ["findings", "start-up", "model", "bindings", "steps", "keys", "compiles", "memory"]
LONG_NAME = "a_name_that_is_longer_than_a_narrow_screen_is_wide_and_has_no_space_and_no_hyphen_anywhere"
FOUND = (Finding("slot-mapping", "Slot 57 is another request's.", step=12, slot=57),)

# The contrast of each text with what is painted behind it (WCAG 2.2, 1.4.3), and the texts that have too little.
CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (let item = element; item; item = item.parentElement) {
      const color = numbers(getComputedStyle(item).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
      if (color[3] !== 0) throw new Error("half transparent: " + item.outerHTML.slice(0, 80));
    }
    throw new Error("nothing is painted behind " + element.outerHTML.slice(0, 80));
  };
  const faults = [];
  let count = 0;
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const [high, low] = [luminance(numbers(style.color)), luminance(behind(element))].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    count += 1;
    if (ratio < (isLarge ? 3 : 4.5)) faults.push([ratio.toFixed(2), element.tagName, element.textContent.slice(0, 60)]);
  }
  return {count, faults};
}"""


def find_chromium() -> str:
    """The browser. That it is missing fails the tests: these are the proof that the page works."""
    named = os.environ.get(BROWSER_VARIABLE)
    found = shutil.which(named) if named else shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.fail(
            f"{named or 'Chromium'} is not installed. Install it (Debian: apt-get install chromium), name another one "
            f"in {BROWSER_VARIABLE}, or leave these tests out: make test PYTEST_ARGS=\"-m 'not browser'\""
        )
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    # Chromium has no sandbox for root.
    arguments = [*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    executable = find_chromium()
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),
            executable_path=executable,
            args=arguments,
            headless=True,
            reduced_motion="reduce",
        )
        yield context
        context.close()


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    made = recording_lines(3200, num_layers=30, model=LONG_NAME, prefix=LONG_NAME, with_faults=True)
    for line in made:
        for name in ("note", "what", "reason", "inputs"):
            if line.get(name) and line["kind"] != "step":
                line[name] += LONG_NAME
    return made


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, lines: list[Line]) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run, warm = (
        read_recording(write_lines(folder / name, content))
        for name, content in (("run.jsonl", lines), ("warm.jsonl", recording_lines(9, compiling=0.2)))
    )
    file = folder / "report.html"
    file.write_text(render_report(run, warm, FOUND), encoding="utf-8")
    return file


@pytest.fixture
def page(browser: BrowserContext, report: Path) -> Iterator[Page]:
    """The report, open; whatever goes wrong while a test uses it fails the test."""
    yield from open_page(browser, report)


def open_page(browser: BrowserContext, file: Path) -> Iterator[Page]:
    page = browser.new_page()
    faults: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(request.url))
    page.on("request", lambda request: requests.append(request.url))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(file.as_uri())
    yield page
    page.close()
    assert faults == []
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]


def ran(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "step"]


def test_every_section_is_there_and_can_be_reached(page: Page) -> None:
    assert page.locator("main > section").evaluate_all("all => all.map((item) => item.id)") == SECTIONS
    for name in SECTIONS:
        page.locator(f"nav a[href='#{name}']").click()
        assert page.evaluate("location.hash") == f"#{name}"
        assert page.locator(f"#{name}").bounding_box()["height"] > 40  # type: ignore[index]
    assert page.locator("#findings .finding").first.get_attribute("data-detector") == "slot-mapping"


def test_a_click_opens_a_piece_and_another_closes_it(page: Page, lines: list[Line]) -> None:
    (plan,) = (line["plan"] for line in lines if line["kind"] == "plan")
    panel, blocks = page.locator("#panel"), page.locator("#strip button")
    assert panel.is_hidden()
    blocks.nth(2).click()
    assert panel.is_visible()
    pieces = {piece["key"]: piece for piece in plan["pieces"]}
    assert panel.locator("pre").text_content() == pieces[plan["steps"][2]["piece"]]["code"]
    (weight,) = (name for name in plan["steps"][2]["inputs"] if name.startswith("weight:"))
    assert weight.removeprefix("weight:") in panel.inner_text()
    assert "[s0, 4, 32]" in panel.inner_text()
    assert blocks.nth(2).get_attribute("aria-expanded") == "true"
    alike = sum(step.get("piece") == plan["steps"][2]["piece"] for step in plan["steps"])
    assert page.locator("#strip button.same").count() == alike > 20
    blocks.nth(2).click()
    assert panel.is_hidden()
    assert blocks.nth(2).get_attribute("aria-expanded") == "false"


def test_keys_open_a_piece_and_move_to_its_attention(page: Page, lines: list[Line]) -> None:
    panel = page.locator("#panel")
    page.locator("nav a").last.focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#strip') !== null"):
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the focus is must be seen"
    page.keyboard.press("Enter")
    assert "def forward" in (panel.locator("pre").text_content() or "")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    cache = next(line for line in lines if line["kind"] == "cache")
    text = panel.inner_text()
    assert cache["layer"] in text
    assert hex(cache["address"]) in text
    assert str(cache["shape"]) in text
    assert panel.locator("pre").count() == 0
    page.keyboard.press("Escape")
    assert panel.is_hidden()


def test_the_slider_tells_the_sums_of_the_lines(page: Page, lines: list[Line]) -> None:
    steps, slider, readout = ran(lines), page.locator("#slider"), page.locator("#readout")
    slider.focus()
    for column in range(1, 5):
        page.keyboard.press("ArrowRight")
        own = steps[3 * column : 3 * column + 3]
        real = sum(line["num_tokens"] for line in own)
        padding = sum(line["num_padded_tokens"] for line in own) - real
        text = readout.inner_text()
        assert text.startswith(f"Steps {3 * column} to {3 * column + 2}, ")
        assert f"{real:,} real tokens, {padding:,} padding" in text
        assert slider.get_attribute("aria-valuetext") in text.replace("\n", " ")
        worst = max(own, key=lambda line: line["num_padded_tokens"] - line["num_tokens"])
        name, computed, scheduled, _ = worst["requests"][0]
        assert f"request {name}: {scheduled} from position {computed}" in text
    page.keyboard.press("End")
    assert "to 3,199," in readout.inner_text()


def test_pointing_at_the_charts_reads_the_column_there(page: Page) -> None:
    charts = page.locator("#charts")
    charts.scroll_into_view_if_needed()
    box: Any = charts.bounding_box()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 60)
    number = int(re.match(r"Steps ([\d,]+)", page.locator("#readout").inner_text())[1].replace(",", ""))  # type: ignore[index]
    assert abs(number - 2400) <= 6
    cursor: Any = page.locator("#cursor").bounding_box()
    assert abs(cursor["x"] - (box["x"] + 0.75 * box["width"])) < 4


def test_numbers_in_the_page_are_those_of_the_lines(page: Page, lines: list[Line]) -> None:
    steps = ran(lines)
    assert page.locator("[data-figure=num_steps]").inner_text() == f"{len(steps):,}"
    assert page.locator("[data-figure=num_tokens]").inner_text() == f"{sum(line['num_tokens'] for line in steps):,}"
    padded = sum(line["num_padded_tokens"] for line in steps)
    share = 100 * (padded - sum(line["num_tokens"] for line in steps)) / padded
    assert page.locator("[data-figure=num_wasted_tokens]").inner_text() == f"{share:.1f}%"
    rows = page.locator("#keys tr[data-key]")
    shown = rows.evaluate_all(
        "rows => rows.map((row) => [row.dataset.key, row.cells[1].innerText, row.cells[2].innerText])"
    )
    assert len(shown) == 6
    for key, num_steps, num_tokens in shown:
        own = [line for line in steps if line["key"] == key]
        assert (num_steps, num_tokens) == (f"{len(own):,}", f"{sum(line['num_tokens'] for line in own):,}")


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for index in (2, 3):
        page.locator("#strip button").nth(index).click()
        page.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = page.evaluate(
            """() => [...document.querySelectorAll("main *, header *")].filter((item) =>
              item.checkVisibility() && !item.closest(".scroll, pre")
              && (item.getBoundingClientRect().right > innerWidth + 0.5 || item.getBoundingClientRect().left < -0.5)
            ).map((item) => item.outerHTML.slice(0, 100))"""
        )
        assert wide == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_what_is_behind_it(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
    counts = []
    for index in (2, 3):
        page.locator("#strip button").nth(index).click()
        result = page.evaluate(CONTRAST)
        assert result["faults"] == []
        counts.append(result["count"])
    assert min(counts) > 300
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128")
    assert light is (scheme == "light")


def test_markup_in_names_is_shown_as_text(browser: BrowserContext, tmp_path: Path) -> None:
    nasty = "</script></style>--><img src=x onerror=console.log(1)><script>console.log(2)</script>"
    recording = recording_lines(30, model=nasty, prefix=nasty, code=nasty, with_faults=True)
    file = tmp_path / "report.html"
    file.write_text(render_report(read_recording(write_lines(tmp_path / "run.jsonl", recording))), encoding="utf-8")
    for page in open_page(browser, file):
        assert page.locator("h1").inner_text() == nasty
        page.locator("#strip button").nth(2).click()
        assert page.locator("#panel pre").text_content() == nasty
        page.locator("#strip button").nth(3).click()
        assert f"Attention of {nasty}.1.self_attn" in page.locator("#panel").inner_text()
        assert page.locator("img").count() == 0
        page.locator("#slider").focus()
        page.keyboard.press("ArrowRight")


def test_a_page_without_steps_plan_and_graphs_has_no_fault(browser: BrowserContext, tmp_path: Path) -> None:
    kept = [line for line in recording_lines(1) if line["kind"] in ("header", "phase")]
    file = tmp_path / "report.html"
    file.write_text(render_report(read_recording(write_lines(tmp_path / "run.jsonl", kept))), encoding="utf-8")
    for page in open_page(browser, file):
        assert page.locator("main > section").count() == len(SECTIONS)
