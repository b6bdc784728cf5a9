"""Read Markdown as far as the checks need it: fenced blocks, commands, links and anchors.

Anchors are those of Python-Markdown's ``toc`` extension, which mkdocs uses.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["Block", "anchors", "blocks", "commands", "links", "prose", "slug"]

APART = ("not run", "after the diff")  # marks of blocks that are not run as they are
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
MARK = re.compile(r"^ *<!-- (?P<mark>[^>]*?) -->$")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#*$")
LINK = re.compile(r"(?<!\\)!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)
COMMAND = re.compile(r"^(?:    |\$ |> )? *(?:\$ )?(?P<command>zeroshard [^#]*?)(?: +#.*)?$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `mark` is the text of the HTML comment on the line before it, if any."""

    line: int
    language: str
    text: str
    mark: str = ""

    @property
    def is_run(self) -> bool:
        """Whether the tests run it: Python and console blocks that no mark excepts."""
        kind, _, what = self.mark.partition(": ")
        lacks = kind == "needs" and find_spec(what) is None
        return self.language in ("python", "console") and kind not in APART and not lacks


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of `text`, in order."""
    found: list[Block] = []
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    mark = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence is not None:
                indent, info = fence["indent"], fence["info"].split()
                opened, body = (number, indent, info[0] if info else "", mark), []
            comment = MARK.match(line)
            mark = comment["mark"] if comment is not None else ""
        elif fence is not None and not fence["info"]:
            begun, _, language, given = opened
            found.append(Block(begun, language, "\n".join(body) + "\n", given))
            opened = None
        else:
            body.append(line.removeprefix(opened[1]))
    assert opened is None, f"a block has no end: {opened}"
    return found


def prose(text: str) -> list[tuple[int, str]]:
    """Return the numbered lines of `text` outside fenced and indented blocks."""
    found: list[tuple[int, str]] = []
    fenced, indented, before = False, False, ""
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = FENCE.match(line) is not None
        if not fenced and not is_fence:
            indented = line.startswith("    ") and (indented or not before.strip())
            if not indented:
                found.append((number, line))
        fenced ^= is_fence
        before = line if line.strip() or not indented else before
    return found


def links(text: str) -> list[tuple[int, str]]:
    """Return the targets of all inline links and pictures, with their line numbers."""
    lines = prose(text)
    joined = CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), "\n".join(t for _, t in lines))
    found: list[tuple[int, str]] = []
    for match in LINK.finditer(joined):
        at = joined.count("\n", 0, match.start("target"))
        found.append((lines[at][0], match["target"]))
        found += [(lines[at][0], inner["target"]) for inner in LINK.finditer(match["text"])]
    return found


def slug(heading: str) -> str:
    """Return the anchor that Python-Markdown makes of a heading's text."""
    plain = LINK.sub(lambda link: link["text"], heading).replace("`", "").replace("*", "")
    ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of `text`; repeated ones get ``_1``, ``_2``, ..."""
    found: set[str] = set()
    for _, line in prose(text):
        heading = HEADING.match(line)
        if heading is None:
            continue
        name = first = slug(heading["text"])
        count = 0
        while name in found:
            count += 1
            name = f"{first}_{count}"
        found.add(name)
    return found


def commands(text: str) -> list[tuple[int, str]]:
    """Return the numbered ``zeroshard ...`` command lines of `text`, joined over backslashes."""
    outside = {number for number, _ in prose(text)}
    found: list[tuple[int, str]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        while line.endswith("\\") and number < len(lines):
            line = f"{line[:-1].rstrip()} {lines[number].strip()}"
            number += 1
        command = COMMAND.match(line)
        if command is not None and number not in outside:
            found.append((number, command["command"].strip()))
    return found
