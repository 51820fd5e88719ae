"""Open every page of the built site in Chromium, and list what is broken.

    make check-site

It reports dead links and anchors, images that do not load, console messages, requests to other
hosts, pages that are wider than the window, and a search for a class that does not find it first.
`--screenshots FOLDER` also writes a screenshot of each page in a wide and in a narrow window. It
needs playwright and Chromium (`--browser`), but no network.
"""

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

WIDE, NARROW = (1440, 1000), (390, 844)

# The links, anchors and images of a page, as resolved by the browser.
LINKS = "[...document.links].map(link => link.href)"
ANCHORS = "[...document.querySelectorAll('[id]')].map(element => element.id)"
BROKEN_PICTURES = """[...document.images]
    .filter(image => !(image.complete && image.naturalWidth > 0)).map(image => image.src)"""
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the files of the site without logging each request."""

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield the address."""
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def dead_links(
    root: str, links: dict[str, list[str]], ids: dict[str, set[str]]
) -> list[str]:
    """The links that lead to no page, file or anchor of the site."""
    found = []
    for page, targets in links.items():
        for target in targets:
            address, anchor = urldefrag(target)
            if not address.startswith(root):
                if urlsplit(address).scheme not in ("http", "https"):
                    found.append(f"{page}: {target} is not a web address")
                continue
            name = unquote(address.removeprefix(root)) or "index.html"
            if name not in ids:
                found.append(f"{page}: {target} is not a page")
            elif anchor and unquote(anchor) not in ids[name]:
                found.append(f"{page}: the anchor of {target} does not exist")
    return found


def finds(page: Page, root: str, word: str) -> list[str]:
    """The pages that the site's search finds for a word."""
    page.goto(f"{root}search.html?q={word}")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    return page.eval_on_selector_all(
        "#search-results li a", "all => all.map(a => a.href)"
    )


def check(folder: Path, browser: str, screenshots: Path | None) -> list[str]:
    """Everything that is broken."""
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    files = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }
    ids: dict[str, set[str]] = {name: set() for name in files}
    links: dict[str, list[str]] = {}
    wrong: list[str] = []
    with served(folder) as root, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox"]
        )
        page = chromium.new_page(
            viewport=dict(zip(("width", "height"), WIDE, strict=True))
        )

        def say(said: ConsoleMessage) -> None:
            # Sphinx's search prints this for names with dots, whose excerpts it does not show.
            if not said.text.startswith("Anchored content block not found"):
                wrong.append(f"{page.url}: console: {said.text}")

        page.on("console", say)
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: error: {error}"))
        page.on(
            "requestfailed", lambda asked: wrong.append(f"{page.url}: no {asked.url}")
        )

        def requested(asked: object) -> None:
            if not asked.url.startswith((root, "data:")):
                wrong.append(f"{page.url} requests {asked.url}")

        page.on("request", requested)
        for name in pages:
            page.goto(root + name, wait_until="load")
            links[name] = page.evaluate(LINKS)
            ids[name] = set(page.evaluate(ANCHORS))
            page.evaluate(
                "document.querySelectorAll('img').forEach(i => i.loading = 'eager')"
            )
            page.wait_for_load_state("networkidle")
            wrong += [
                f"{name}: {image} is not shown"
                for image in page.evaluate(BROKEN_PICTURES)
            ]
            for width, height in (WIDE, NARROW):
                page.set_viewport_size({"width": width, "height": height})
                if excess := page.evaluate(TOO_WIDE):
                    wrong.append(
                        f"{name}: {excess} pixels too wide for a window of {width}"
                    )
                if screenshots is not None:
                    picture = screenshots / f"{name.replace('/', '-')}-{width}.png"
                    page.screenshot(path=picture)
        wrong += dead_links(root, links, ids)
        found = finds(page, root, "BestCheckpointer")
        if "reference/engine.hooks.html" not in found[0]:
            wrong.append(f"the search for BestCheckpointer finds {found}")
        chromium.close()
    print(f"{len(pages)} pages, {sum(map(len, links.values()))} links")
    return wrong


def main() -> None:
    """Print what is broken; the exit code is 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("output/site"))
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--screenshots", type=Path)
    arguments = parser.parse_args()
    wrong = check(arguments.folder, arguments.browser, arguments.screenshots)
    print("\n".join(wrong) or "nothing is broken")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
