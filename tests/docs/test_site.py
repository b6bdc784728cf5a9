"""The documentation holds together without mkdocs: links, anchors, navigation, generated pages."""

from __future__ import annotations

import ast
import io
import posixpath
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import zeroshard as zs
from scripts.docs_site import drawings, hooks
from scripts.docs_site.api import api_page, public_names
from scripts.docs_site.markdown import anchors, blocks, commands, links, prose, slug
from scripts.docs_site.messages import ERRORS, messages
from scripts.docs_site.pages import ROOT, generated_pages
from scripts.docs_site.search import EXPECTED, Section, found, sections
from tests.support.harness import ROOT as TREE
from zeroshard import errors
from zeroshard.launch import cli, deepspeed_line, options
from zeroshard.launch.cli import build_parsers
from zeroshard.launch.supervisor import CONTRACT_EXIT_CODES
from zeroshard.terminal import UsageError

DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")


@cache
def _generated() -> dict[str, str]:
    return {f"docs/{path}": text for path, text in generated_pages().items()}


@cache
def _texts() -> dict[str, str]:
    """Return every Markdown file by its path in the repository, generated pages included."""
    written = [*DOCS.rglob("*.md"), *(ROOT / name for name in OUTSIDE)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in written} | _generated()


def _broken(place: str, text: str) -> list[str]:
    """Return the links of the file `place` that lead nowhere."""
    found = []
    for line, link in links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        path = place if not target else path
        if path not in _texts() and not (ROOT / path).exists():
            found.append(f"{place}:{line}: {link}: there is no {path}")
        elif anchor and (path not in _texts() or anchor not in anchors(_texts()[path])):
            found.append(f"{place}:{line}: {link}: {path} has no heading #{anchor}")
    return found


def test_every_link_and_anchor_leads_somewhere() -> None:
    copied = {"docs/changelog.md", "docs/security.md"}  # their links are those of the originals
    pages = {place: text for place, text in _texts().items() if place not in copied}
    assert sum(len(links(text)) for text in pages.values()) > 120
    assert [each for place, text in pages.items() for each in _broken(place, text)] == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "See [this](tour.md#forward), [that](tour.md#sideways) and [it](nothing.md).\n"
    assert [each.partition(": ")[2] for each in _broken("docs/x.md", text)] == [
        "tour.md#sideways: docs/tour.md has no heading #sideways",
        "nothing.md: there is no docs/nothing.md",
    ]


def test_anchors_are_those_of_the_site() -> None:
    assert slug("`shard()` and `engine.clip_grad_norm_`") == "shard-and-engineclip_grad_norm_"
    assert anchors("# A b\n\n## A b\n\n    # code\n\n```\n# code\n```\n") == {"a-b", "a-b_1"}


def test_the_navigation_names_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    lines = [line for line in nav.splitlines() if not line.lstrip().startswith("#")]
    named = re.findall(r"[\w/-]+\.md", "\n".join(lines))
    pages = {path.removeprefix("docs/") for path in _texts() if path.startswith("docs/")}
    assert len(named) == len(set(named))
    assert set(named) == pages


def test_the_reference_has_every_public_name() -> None:
    text = api_page()
    assert set(zs.__all__) - {"nn", "__version__"} <= set(public_names())
    assert [name for name in public_names() if text.count(f"\n### {name}\n") != 1] == []
    assert "\n#### Engine.clip_grad_norm_\n" in text
    assert "clip_grad_norm_(max_norm: float) -> torch.Tensor" in text


def test_the_pictures_are_those_that_the_script_draws() -> None:
    for name, draw in drawings.DRAWINGS.items():
        assert (DOCS / "img" / f"{name}.svg").read_text() == draw(), "scripts/docs_site/drawings.py"
    assert [f for f in drawings.RING if not (ROOT / "src" / "zeroshard" / f).exists()] == []


def _rasterised(svg: str) -> list[tuple[int, int]]:
    """Return how many pixels of a picture on white have which brightness, as a program without CSS
    variables or animation draws it.
    """
    cairosvg = pytest.importorskip("cairosvg", exc_type=(ImportError, OSError))  # needs libcairo2
    png = cairosvg.svg2png(bytestring=svg.encode(), background_color="white")
    return Image.open(io.BytesIO(png)).convert("L").getcolors(256)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_no_black_box_in_programs_without_css_variables(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 60_000
    body = text.partition("</style>")[2]
    assert "var(" not in body and "style=" not in body
    shades = _rasterised(text)
    pixels = sum(count for count, _ in shades)
    assert len(shades) > 20
    assert sum(count for count, shade in shades if shade < 40) < 0.05 * pixels
    assert sum(count for count, shade in shades if shade > 200) > 0.4 * pixels


def test_a_picture_of_variables_alone_is_found_to_be_black() -> None:
    text = (DOCS / "img" / "table.svg").read_text()
    rules = re.sub(r' fill="#\w+" class="f-(\w+)', r' style="fill:var(--\1)" class="', text)
    assert rules != text
    shades = _rasterised(rules)
    assert sum(count for count, shade in shades if shade < 40) > 0.05 * sum(n for n, _ in shades)


def test_messages_are_collected_from_every_class_of_error() -> None:
    found = messages()
    assert {one.error for one in found} == set(ERRORS) and len(found) > 300
    texts = [one.text for one in found]
    assert any("holds no checkpoint" in text for text in texts)
    raised = [name for name in errors.__all__ if name != "ZeroshardError"]
    assert sorted(raised) == sorted(ERRORS)
    page = _texts()["docs/errors.md"]
    assert [name for name in ERRORS if f"\n### {name}\n" not in page] == []


def test_the_page_of_errors_has_every_exit_code() -> None:
    table = re.findall(r"^\| (\d+) \|", _texts()["docs/errors.md"], re.M)
    declared = {getattr(errors, name).exit_code for name in errors.__all__}
    assert {0, 1, 2, *declared, *CONTRACT_EXIT_CODES} == set(map(int, table))


def test_links_out_of_the_site_are_mended() -> None:
    link = hooks.LINK.search("[the policy](../../src/zeroshard/core/policy.py)")
    assert link is not None
    text = hooks._mended(link, "docs/design/x.md", "design/x.md")
    assert text == "the policy (`src/zeroshard/core/policy.py`)"
    link = hooks.LINK.search("[security](../../SECURITY.md#reporting)")
    assert link is not None
    text = hooks._mended(link, "docs/design/x.md", "design/x.md")
    assert text == "[security](../security.md#reporting)"


def _parse(command: str) -> None:
    """Parse a command line as the program would. Raises SystemExit or UsageError."""
    words = shlex.split(command, comments=True)[1:]
    parser, parsers = build_parsers()
    if words[:1] == ["run"]:
        options.parse_run(parsers["run"], words[1:])
        return
    if words[:1] == ["deepspeed"]:
        deepspeed_line.parse(parsers["deepspeed"], words[1:])
        return
    if words[:1] == ["as-deepspeed"]:
        return  # whatever follows is another program's
    if words[:1] == ["bench"]:
        cli.add_benchmarks(parsers["bench"])
    parser.parse_args(words)


def test_every_command_line_in_the_documentation_parses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = 0
    for place, text in _texts().items():
        if place in _generated():
            continue
        for line, command in commands(text):
            if "[" in command or "--help" in command or command.startswith("zeroshard run: "):
                continue  # a form, or a message
            count += 1
            try:
                _parse(command)
            except (SystemExit, UsageError) as error:
                if " not found" in str(error):  # the reader's script
                    continue
                pytest.fail(f"{place}:{line}: {command}: {error} {capsys.readouterr().err}")
    assert count > 30


def test_a_command_line_with_an_unknown_option_is_found() -> None:
    with pytest.raises(SystemExit):
        _parse("zeroshard plan --parms 7.5B")
    with pytest.raises(UsageError, match="unknown option --nprocs"):
        _parse("zeroshard run --nprocs 2 train.py")


def test_only_hooks_imports_mkdocs() -> None:
    assert TREE == ROOT
    for path in (ROOT / "scripts" / "docs_site").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [
            ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        assert path.name == "hooks.py" or not any("mkdocs" in name for name in names), path


def test_no_page_names_what_it_cannot_show() -> None:
    """Fenced blocks have a language, so that they are coloured and found by the snippet test."""
    for place, text in _texts().items():
        assert [b.line for b in blocks(text) if not b.language and place.count("/") < 2] == [], (
            place
        )


@cache
def _sections() -> tuple[Section, ...]:
    pages = {place: text for place, text in _texts().items() if place.startswith("docs/")}
    return tuple(
        section
        for place, text in pages.items()
        for section in sections(place.removeprefix("docs/").removesuffix(".md"), text)
    )


@pytest.mark.parametrize("query", EXPECTED)
def test_the_search_shows_the_page_that_is_meant_first(query: str) -> None:
    assert found(_sections(), query)[:1] == [EXPECTED[query]], found(_sections(), query)[:3]


def test_the_search_ranks_titles_before_texts_and_pages_before_sections() -> None:
    first = sections("first", "# Memory\n\nA word.\n\n## Other\n\nResume `a run`, resume it.\n")
    second = sections("second", "# Saving\n\n## Resume\n\nNothing.\n```\n# resume\n```\n")
    third = sections("third", "# Resumed\n\nA word.\n")
    assert [one.title for one in (*first, *second)] == ["Memory", "Other", "Saving", "Resume"]
    assert [one.is_page for one in first] == [True, False]
    assert found([*first, *second, *third], "resume") == ["third", "second", "first"]
    assert found(first, "nothing") == []
    entry = {"location": "a/b.html#c", "title": "<code>x</code> &amp; y", "text": "<p>z</p>"}
    assert Section.of_index(entry) == Section("a/b", False, "x & y", " z ")


def test_blocks_of_code_are_not_wider_than_a_page_of_a_phone_or_a_split_screen() -> None:
    """72 columns, as docs/ruff.toml says, but for a string that cannot be cut."""
    free = ("docs/design/", "docs/reference/", "CONTRIBUTING.md", "CHANGELOG.md")
    wide = [
        f"{place}:{block.line}: {line}"
        for place, text in _texts().items()
        if not place.startswith(free)
        for block in blocks(text)
        if block.language in ("python", "bash")
        for line in block.text.splitlines()
        if len(line) > 72
    ]
    assert wide == []


def test_every_test_that_a_page_names_is_there() -> None:
    named = {
        (place, path.removeprefix("tests/"), test)
        for place, text in _texts().items()
        for path, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    }
    gone = [
        f"{place}: {path}::{test}"
        for place, path, test in sorted(named)
        if f"def {test}(" not in (TREE / "tests" / path).read_text()
    ]
    assert len(named) > 20 and gone == []


def _shown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of what is typed and printed: console, text and indented blocks."""
    for block in blocks(text):
        if block.language in ("console", "text"):
            yield from enumerate(block.text.splitlines(), block.line + 1)
    plain = {number for number, _ in prose(text)}
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fenced ^= line.lstrip().startswith("```")
        if number not in plain and not is_fenced and not line.lstrip().startswith("```"):
            yield number, line.removeprefix("    ")


def test_what_is_typed_and_printed_fits_into_a_terminal() -> None:
    """80 columns, as tables of the program have, and 72 where a console block is typed; pages of
    measurements and formats keep their long lines.
    """
    free = (
        "docs/design/", "docs/reference/", "docs/changelog", "docs/benchmarks", "docs/checkpoint-",
        "docs/planner-measured", "docs/tour", "CONTRIBUTING.md", "CHANGELOG.md",
    )  # fmt: skip
    wide = [
        f"{place}:{number}: {line}"
        for place, text in _texts().items()
        if not place.startswith(free)
        for number, line in _shown(text)
        if len(line) > (72 if line.startswith("$ ") else 80)
    ]
    assert wide == []
