"""The one table of the commands: as wide as it is, or folded, as text, as markdown; no markup and
no colours where nobody asked for them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroshard.terminal import (
    Table,
    count_text,
    note,
    print_json,
    progress,
    say,
    say_facts,
)

LONG = "a sentence of several words " * 5


def _out(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_numbers_are_right_text_is_left_and_a_rule_is_below_the_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Table(("row", "GB"), [("a", 1), ("bcd", "12.5")], text=("row",), is_framed=False).print()
    assert _out(capsys) == ["row   GB", "────────", "a      1", "bcd 12.5"]


def test_a_table_is_as_wide_as_its_lines_unless_a_width_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(("", ""), [("what", LONG)], "title", text=("",), folded=("",))
    table.print()
    assert LONG.strip() in capsys.readouterr().out
    table.print(60)
    lines = _out(capsys)
    assert max(map(len, lines)) == 60 and lines[0] == "title" and len(lines) > 4


def test_a_width_breaks_lines_and_neither_words_nor_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [("zero3", "grad+optim host", "1,234.5"), ("ddp", "-", "2")]
    table = Table(("row", "where", "GB"), cells, text=("row", "where"), folded=("where",),
                  is_framed=False)  # fmt: skip
    for width in (24, 5):
        table.print(width)
        lines = _out(capsys)
        assert lines[2:4] == ["zero3 grad+optim 1,234.5", "      host"], width
        assert max(map(len, lines)) == 24


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "-"), (12, "12"), (999, "999"), (999.6, "1k"), (44_318, "44.3k"), (744_002, "744k"),
     (1.5e6, "1.5M"), (2e9, "2G")],
)  # fmt: skip
def test_counts_have_three_digits(number: float, text: str) -> None:
    assert count_text(number) == text


def test_a_frame_without_names_has_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    Table(("", ""), [("a", "b")], text=("",)).print()
    assert _out(capsys) == ["┌───┬───┐", "│ a │ b │", "└───┴───┘"]


def test_cells_and_heads_are_no_markup_and_move_no_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "[red]\x1b[31m\u202e\na\tb"
    Table((name,), [(name,)]).print()
    out = capsys.readouterr().out
    assert out.count("[red]\\x1b[31m\\u202e") == 2 and "\\na\\tb" in out
    assert "\x1b" not in out and "\u202e" not in out


def test_styles_colour_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(("a",), [("1",), ("2",)], styles=["bold", ""])
    table.print()
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    table.print()
    assert "\x1b[1m" in capsys.readouterr().out


def test_markdown_says_the_same() -> None:
    table = Table(("row", "GB"), [("a", 1.5)], "sizes", text=("row",))
    assert table.markdown() == "**sizes**\n\n| row | GB |\n|---|---:|\n| a | 1.5 |\n"


def test_json_has_what_a_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": Path("a/b"), "rows": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"path": "a/b", "rows": [1, None]}


def test_lines_go_to_stdout_and_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say(LONG)
    say_facts([("model", "gpt"), ("note", None)], width=7)
    note("\x1b[31mred")
    told = capsys.readouterr()
    assert told.out == f"{LONG}\nmodel   gpt\n" and told.err == "zeroshard: \\x1b[31mred\n"


def test_a_bar_shows_nothing_off_a_terminal_but_what_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("weights", 3) as bar:
        bar.advance()
        bar.step("next")
        bar.begin("tokens", None)
        bar.advance(2)
        bar.say(LONG)
    told = capsys.readouterr()
    assert told.out == "" and told.err.strip() == LONG.strip()
    with progress(is_quiet=True, is_bytes=True) as bar:
        bar.advance(5)
    assert capsys.readouterr().err == ""
