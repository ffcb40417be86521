# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: add pages from outside docs, and make links into the repository work.

Pages are read both in a clone and on the site. A link such as `../benchmarks/results/fold.json`
works in a clone; for the site, the linked file is copied to `repository/`.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "build" / "docs" / "pages"
# Documents outside docs, and their paths on the site.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/README.md": "measuring.md",
}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)([^)]*\))")
FENCE = re.compile(r"(^```.*?^```\s*?$)", re.M | re.S)
# File types that a browser should show as text instead of downloading or running them.
AS_TEXT = {".cpp", ".cu", ".cuh", ".hpp", ".md", ".mjs", ".py", ".sh", ".toml", ".yaml", ".yml"}
PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*images/architecture\.svg\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those of `ELSEWHERE` that docs does not have."""
    if not GENERATED.is_dir():
        raise PluginError(f"{GENERATED} is missing. Run: python docs_site/reference.py")
    for path in sorted(GENERATED.rglob("*.md")):
        files.append(_copied(config, path.relative_to(GENERATED).as_posix(), path))
    for name, place in ELSEWHERE.items():
        if files.get_file_from_path(place) is None:
            files.append(_copied(config, place, ROOT / name))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository to their page or to a copy of the file."""
    source = _source_of(page)

    def changed(found: re.Match[str]) -> str:
        target = _target(source, found[2], page, config, files)
        return f"{found[1]}{target}{found[3]}"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(changed, _with_picture(part)) for part in parts[::2]]
    return "".join(parts)


def _copied(config: MkDocsConfig, place: str, path: Path) -> File:
    return File.generated(config, place, abs_src_path=str(path))


def _source_of(page: Page) -> Path:
    """Return the repository file of a page; generated pages have links as in docs."""
    place = page.file.src_uri
    for name, copied in ELSEWHERE.items():
        if copied == place and not (ROOT / "docs" / place).exists():
            return ROOT / name
    return ROOT / "docs" / place


def _target(source: Path, link: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # Without `resolve`: the path as written counts, not the target of a symbolic link.
    path = Path(os.path.normpath(source.parent / link))
    if not path.is_relative_to(ROOT):
        raise PluginError(f"{page.file.src_uri}: {link} leads out of the repository")
    name = path.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        place = ELSEWHERE[name]
    elif name.startswith("docs/"):
        # A notebook is a page with its outputs (notebooks.py).
        place = re.sub(r"\.ipynb$", ".md", name.removeprefix("docs/"))
        if not path.name.endswith(".html"):
            return _relative(place, page)
    else:
        place = f"repository/{name}"
    if path.is_dir():
        place = f"repository/{name}/index.txt"
    elif path.suffix in AS_TEXT and name not in ELSEWHERE:
        place += ".txt"
    if name not in ELSEWHERE and files.get_file_from_path(place) is None:
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: {link} leads nowhere")
        files.append(_asset(config, place, path))
    return _relative(place, page)


def _asset(config: MkDocsConfig, place: str, path: Path) -> File:
    if path.is_dir():
        names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
        return File.generated(config, place, content="\n".join(names) + "\n")
    return File.generated(config, place, content=path.read_bytes())


def _relative(place: str, page: Page) -> str:
    return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")


def _with_picture(part: str) -> str:
    """Inline the architecture's image, so that it uses the colors of the page."""
    svg = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    svg = re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", svg, flags=re.S).strip()
    return PICTURE.sub(lambda _: f'<div class="architecture">{svg}</div>', part)
