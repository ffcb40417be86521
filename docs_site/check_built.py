# SPDX-License-Identifier: Apache-2.0
"""Check the built site: nothing is loaded from another host, and every link has a target.

MkDocs checks links between pages; this checks the finished HTML: python docs_site/check_built.py
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[1] / "build" / "docs" / "site"
# Attributes that a browser loads automatically; `a` is not one of them.
LOADS = {
    "audio": ("src",), "embed": ("src",), "form": ("action",), "iframe": ("src",),
    "img": ("src", "srcset"), "image": ("href",), "input": ("src",), "link": ("href",),
    "object": ("data",), "script": ("src",), "source": ("src", "srcset"), "use": ("href",),
    "video": ("src", "poster"),
}  # fmt: skip
# Kinds of `link` that only contain an address and load nothing.
NAMES_ONLY = {"canonical", "next", "prev"}
FOREIGN = re.compile(r"^\s*(?:https?:)?//", re.I)
CSS_URL = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """What a page loads and links to, and its own anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and NAMES_ONLY & set(values.get("rel", "").split()):
            return
        self.loads += [values[name] for name in LOADS.get(tag, ()) if values.get(name)]
        self.loads += css_loads(values.get("style", ""))


def css_loads(text: str) -> list[str]:
    """Return what a style sheet loads, except inline data."""
    found = (first or second for first, second in CSS_URL.findall(text))
    return [url for url in found if not url.startswith(("data:", "#"))]


def faults(site: Path) -> Iterator[str]:
    """Yield a sentence for each fault."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        inline = re.findall(r"<style[^>]*>(.*?)</style>", path.read_text(), re.S)
        for url in [*page.loads, *(url for text in inline for url in css_loads(text))]:
            if FOREIGN.match(url):
                yield f"{name}: loads {url}"
            elif not url.startswith("data:"):
                yield from missing(pages, site, path, url)
        for url in page.links:
            if not FOREIGN.match(url) and not url.startswith(("mailto:", "javascript:")):
                yield from missing(pages, site, path, url)
    for path in sorted(site.rglob("*.css")):
        for url in css_loads(path.read_text()):
            if FOREIGN.match(url):
                yield f"{path.relative_to(site)}: loads {url}"


def missing(pages: dict[Path, Page], site: Path, source: Path, url: str) -> Iterator[str]:
    """Yield a sentence if a link has no target."""
    parts = urlsplit(url)
    # The 404 page is shown for any path, so its links start at the root of the site.
    if source.name == "404.html" and parts.path.startswith("/"):
        target = (site / unquote(parts.path).lstrip("/")).resolve()
    else:
        target = (source.parent / unquote(parts.path)).resolve() if parts.path else source.resolve()
    if target.is_dir():
        target /= "index.html"
    name = source.relative_to(site)
    if not target.is_file():
        yield f"{name}: {url} leads to no file"
    elif target in pages and unquote(parts.fragment) not in pages[target].places:
        yield f"{name}: {url} leads to no anchor on that page"


def main() -> int:
    """Print all faults; return 1 if there are any."""
    found = list(faults(SITE.resolve()))
    print(*found, sep="\n", file=sys.stderr) if found else None
    count = len(list(SITE.rglob("*.html")))
    number = f"{len(found) or 'no'} fault{'' if len(found) == 1 else 's'}"
    print(f"checked {count} pages for other hosts, links and anchors: {number}")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
