"""Check a built site: ``python docs/check_site.py docs/_build/html [--browser] [--screenshots FOLDER]``.

Always: every link to a page, a place within one, a picture or a file of the site leads somewhere. With --browser, in a
headless chromium at the width of a phone and of a desktop: no page scrolls sideways, and every picture shows.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

WIDTHS = {"phone": (375, 812), "desktop": (1280, 900)}


class Page(HTMLParser):
    """What a page links to, and the places that others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.places |= {value for value in (found.get("id"), found.get("name")) if value}
        link = found.get("href" if tag in ("a", "link") else "src" if tag in ("img", "script") else "")
        if link:
            self.links.append(link)


def broken(site: Path) -> list[str]:
    """One sentence for each link within the site that leads nowhere."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.is_file():
                wrong.append(f"{path.relative_to(site)}: {link} is not there")
            elif "_modules" in path.parts:
                continue  # Sphinx names one module for all objects of a file, some of which have two
            elif place and target in pages and place not in pages[target].places:
                wrong.append(f"{path.relative_to(site)}: {link}: the page has no such place")
    return wrong if pages else [f"{site}: holds no page"]


def program() -> str | None:
    """The browser, by the names of Debian and of the machines of GitHub."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def missing() -> str:
    """Why no browser can be asked; empty where one can."""
    if not (program() and shutil.which("chromedriver")):
        return "there is no chromium with its chromedriver on this machine"
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed: pip install selenium"
    return ""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The site at an address on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(program())
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=str(shutil.which("chromedriver")))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


# Pictures further down are there, and formulas are set, where MathJax could be fetched.
SETTLED = """
const done = arguments[0];
for (const each of document.images) each.loading = "eager";
const pictures = [...document.images].map((each) => each.decode().catch(() => null));
const formulas = window.MathJax && window.MathJax.startup ? window.MathJax.startup.promise : null;
Promise.all([...pictures, formulas]).then(() => done(), () => done());
"""

LOOK = """
const root = document.documentElement;
const beyond = (each) => each.getBoundingClientRect().right > root.clientWidth + 1;
const wide = [...document.querySelectorAll("body *")].filter(beyond);
return {
  over: root.scrollWidth - root.clientWidth,
  first: wide.slice(0, 1).map((each) => each.outerHTML.slice(0, 80))[0] || "",
  pictures: [...document.images].filter((each) => !(each.complete && each.naturalWidth)).map((each) => each.src),
};
"""


def looked_at(site: Path, names: list[str], screenshots: Path | None) -> list[str]:
    """One sentence for each page that scrolls sideways or lacks a picture, at each width."""
    wrong = []
    with served(site) as address, browser() as driver:
        for kind, (width, height) in WIDTHS.items():
            # The window cannot be as narrow as a phone; what is emulated can.
            device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": kind == "phone"}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
            for name in names:
                driver.get(f"{address}/{name}")
                driver.execute_async_script(SETTLED)
                seen = driver.execute_script(LOOK)
                if seen["over"] > 0:
                    wrong.append(f"{name}: scrolls {seen['over']} pixels sideways on a {kind}; {seen['first']}")
                wrong += [f"{name}: {picture} does not show on a {kind}" for picture in seen["pictures"]]
                if screenshots is not None:
                    shot = screenshots / f"{kind}-{name.replace('/', '-').removesuffix('.html')}.png"
                    driver.save_screenshot(str(shot))
    return wrong


# What somebody types into the search box, and the page that has to be among the first results.
SEARCHES = {
    "how do I resume a run": "how-do-i.html",
    "how do I choose delta": "how-do-i.html",
    "how do I write a filter": "how-do-i.html",
    "make_private": "api/dpcore.torch.make_private.html",
    "must hold at least one block of shape": "reference/errors.html",
}


ENDED = """
const said = document.querySelector(".search-summary");
return Boolean(said) && /found|did not match/i.test(said.innerText);
"""
FOUND = "return [...document.querySelectorAll('#search-results li > a')].slice(0, 10).map((each) => each.href)"


def not_found(site: Path) -> list[str]:
    """One sentence for each search whose page is not among its first ten results."""
    from selenium.webdriver.support.wait import WebDriverWait

    wrong = []
    with served(site) as address, browser() as driver:
        for words, page in SEARCHES.items():
            driver.get(f"{address}/search.html?q={quote(words)}")
            WebDriverWait(driver, 30).until(lambda found: found.execute_script(ENDED))
            if not any(f"/{page}" in link for link in driver.execute_script(FOUND)):
                wrong.append(f"the search for {words!r} does not find {page}")
    return wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true", help="open the pages in chromium, too")
    parser.add_argument(
        "--pages", nargs="*", default=None, help="these alone are opened; by default all but the source's"
    )
    parser.add_argument("--screenshots", type=Path, default=None, metavar="FOLDER")
    given = parser.parse_args(arguments)
    site = given.site.resolve()
    wrong = broken(site)
    reason = missing() if given.browser else ""
    if reason:
        print(f"no page was opened in a browser: {reason}")
    elif given.browser:
        if given.screenshots is not None:
            given.screenshots.mkdir(parents=True, exist_ok=True)
        names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if "_modules" not in path.parts]
        wrong += looked_at(site, given.pages or names, given.screenshots)
        wrong += not_found(site) if (site / "search.html").exists() else []
    print(
        "\n".join(wrong) or "every link leads somewhere" + (", every page fits" if given.browser and not reason else "")
    )
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
