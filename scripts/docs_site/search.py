"""Which page the site's search shows first for some words.

The site searches in the browser: lunr, as mkdocs-material sets it up. Its ranking is written here
once more, so that a test can ask the pages and `hooks.py` the index that was built:

    a page is its sections, one per heading, each with a title and a text
    each word of a query finds the words that begin with it
    a section's score is the sum over words and fields of BM25 (k1 1.2, b 0.75), a title counting
    1000 times; it counts twice where it is the page itself or has all words of the query, five
    times where both
    pages follow the score of their best section

What it does not do: the browser's stop words, which no query here has.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["EXPECTED", "Section", "found", "sections"]

# what people type, and the page that is to come first
EXPECTED = {
    "OOM": "out-of-memory",
    "out of memory": "out-of-memory",
    "nvidia smi": "nvidia-smi",
    "reserved allocated": "nvidia-smi",
    "resume": "checkpoints",
    "save_pretrained": "hugging-face",
    "from_pretrained": "hugging-face",
    "gradient clipping": "learning-rate",
    "learning rate": "learning-rate",
    "mixed precision": "mixed-precision",
    "bf16": "mixed-precision",
    "fp16": "mixed-precision",
    "gradient accumulation": "accumulation",
    "LoRA": "lora",
    "offload": "offload",
    "NaN": "loss-differs",
    "hangs": "hangs",
    "hang": "hangs",
    "clip": "learning-rate",
    "MoE": "moe",
    "tensor parallel": "composition",
    "pipeline": "composition",
    "plan memory": "planner",
    "FSDP2": "from-fsdp2",
}
K1, B, TITLE = 1.2, 0.75, 1000.0
_HEADING = re.compile(r"^(#{1,3}) +(.+?) *#*$")
_FENCE = re.compile(r"^ *```")
_TAG = re.compile(r"<[^>]*>")
_FRONT = re.compile(r"---\nsearch:\n  boost: ([\d.]+)\n---\n\s*")


@dataclass(frozen=True)
class Section:
    """A heading of a page and what stands below it."""

    page: str  # without its suffix
    is_page: bool  # the first one, under the page's title
    title: str
    text: str
    boost: float = 1.0  # of the page, as its front matter says

    @classmethod
    def of_index(cls, entry: dict[str, Any]) -> Section:
        """Return the section of an entry of the built index."""
        page, _, anchor = entry["location"].partition("#")
        text = html.unescape(_TAG.sub(" ", entry["text"]))
        title = html.unescape(_TAG.sub("", entry["title"]))
        return cls(page.removesuffix(".html"), not anchor, title, text, entry.get("boost", 1.0))


def sections(page: str, markdown: str) -> list[Section]:
    """Return the sections of a page that is written in Markdown."""
    found: list[Section] = []
    title, lines, fenced = page, list[str](), False
    front = _FRONT.match(markdown)
    boost = 1.0 if front is None else float(front[1])
    markdown = _FRONT.sub("", markdown)
    for line in [*markdown.splitlines(), "# "]:
        fenced ^= _FENCE.match(line) is not None
        heading = None if fenced else _HEADING.match(line)
        if heading is None and line != "# ":
            lines.append(line)
            continue
        if found or lines or title != page:
            found.append(Section(page, not found, title, " ".join(lines), boost))
        title, lines = (heading[2] if heading else "").replace("`", ""), []
    return found


def _words(text: str) -> Counter[str]:
    return Counter(word for word in re.split(r"[\s\-`,.:;()\"'|]+", text.lower()) if word)


def found(everything: Iterable[Section], query: str) -> list[str]:
    """Return the pages that the search shows for `query`, the first one first."""
    all_sections = list(everything)
    counted = [(_words(one.title), _words(one.text)) for one in all_sections]
    wanted = query.lower().split()
    lengths = [sum(field[n].total() for field in counted) / len(counted) for n in (0, 1)]
    holding: Counter[str] = Counter()
    for title, text in counted:
        holding.update(title.keys() | text.keys())
    best: dict[str, float] = {}
    for section, fields in zip(all_sections, counted, strict=True):
        score, met = 0.0, set[str]()
        for words, weight, length in zip(fields, (TITLE, 1.0), lengths, strict=True):
            size = K1 * (1 - B + B * words.total() / length)
            for word, count in words.items():
                begins = [one for one in wanted if word.startswith(one)]
                if not begins:
                    continue
                met.update(begins)
                rest = len(counted) - holding[word] + 0.5
                idf = math.log(1 + abs(rest / (holding[word] + 0.5)))
                score += len(begins) * weight * idf * (K1 + 1) * count / (size + count)
        boost = section.is_page + (len(met) == len(set(wanted)))
        score *= section.boost * (1 + boost**2)
        best[section.page] = max(best.get(section.page, 0.0), score)
    return [page for page, score in sorted(best.items(), key=lambda one: -one[1]) if score > 0]
