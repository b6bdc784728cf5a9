"""The hooks of mkdocs.yml: add the generated pages, mend links, and keep the site offline.

Links of a page to files outside docs/ become code, since the site has no such page; those to
SECURITY.md and CHANGELOG.md go to their pages. Drawings are put into the page as they are, so that
they follow the site's light and dark scheme; films stay files, so that no search finds their texts.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # mkdocs imports this file by its path

from scripts.docs_site.markdown import LINK
from scripts.docs_site.pages import COPIED, ROOT, generated_pages
from scripts.docs_site.search import EXPECTED, Section, found

__all__ = ["on_files", "on_page_markdown", "on_post_build"]

DRAWING = re.compile(
    r"^!\[(?P<alt>[^\]]*)\]\((?P<path>(?:\.\./)*img/(?!film-)[a-z0-9-]+\.svg)\)$", re.M
)
ABROAD = re.compile(r"""(?:src|href)=["']?(?:https?:)?//(?!www\.w3\.org)[^"' >]*""")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*>")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend links to files outside docs/, and put the drawings into the page."""
    source = page.file.src_uri
    copied = {path: name for name, path in COPIED.items()}
    place = copied.get(source, f"docs/{source}")
    text = LINK.sub(lambda link: _mended(link, place, source), markdown)
    return DRAWING.sub(lambda found: _drawn(found, source), text)


def _mended(link: re.Match[str], place: str, source: str) -> str:
    """Return `link`, which stands in the file `place`, as the page `source` of the site has it."""
    target, _, anchor = link["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    if path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif path in COPIED:
        path = COPIED[path]
    elif path == "README.md":
        path = "index.md"
    else:
        return link["text"] if "`" in link["text"] else f"{link['text']} (`{path}`)"
    there = os.path.relpath(path, posixpath.dirname(source) or ".")
    mark = "!" if link[0].startswith("!") else ""
    return f"{mark}[{link['text']}]({there}{'#' if anchor else ''}{anchor})"


def _drawn(found: re.Match[str], source: str) -> str:
    path = ROOT / "docs" / posixpath.dirname(source) / found["path"]
    svg = path.read_text().replace("\n\n", "\n").strip()
    return f'<figure class="drawing" aria-label="{found["alt"]}">\n{svg}\n</figure>\n'


def on_post_build(config: Any) -> None:
    """Raise where a page would load anything from another site, or the search shows a wrong page
    first.
    """
    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        for tag in LOADED.findall(page.read_text()):
            if ABROAD.search(tag) and 'rel="canonical"' not in tag:
                raise RuntimeError(f"{page} loads from another site: {tag}")
    index = json.loads((Path(config["site_dir"]) / "search" / "search_index.json").read_text())
    entries = [Section.of_index(entry) for entry in index["docs"]]
    for query, wanted in EXPECTED.items():
        if (pages := found(entries, query))[:1] != [wanted]:
            raise RuntimeError(
                f"the search for {query!r} shows {pages[:3]}, and not {wanted} first"
            )
