"""Files and text of other people: what cannot be read is one reason, and soon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zeroshard.core.untrusted import NotReadable, check_depth, printable, read_file, read_json


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1]}
    assert read_file(tmp_path / "file") == b'{"a": [1]}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "it is not JSON: Expecting property name"),
        (b"\xff", "it is not JSON: "),
        (b"[" * 200_000, "it is nested deeper than 100 levels"),
        (b"[" * 101 + b"]" * 101, "it is nested deeper than 100 levels"),
        (b" " * 1001, "it has more than 1000 bytes"),
        (None, "No such file or directory"),
    ],
)
def test_what_cannot_be_read_is_a_reason_of_one_line(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    most = 1000 if content is None or content[:1] == b" " else 1 << 20
    with pytest.raises(NotReadable) as raised:
        read_json(path, most)
    assert str(raised.value).startswith(reason) and "\n" not in str(raised.value)


def test_pipes_devices_and_directories_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(NotReadable, match="it is not a regular file"):
            read_file(path)
    with pytest.raises(NotReadable, match="null"):
        read_file("a\0b")


def test_a_hundred_levels_are_read_and_one_more_is_not() -> None:
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        check_depth(json.loads(opened * 100 + "1" + closed * 100))
        with pytest.raises(NotReadable, match="deeper than 100"):
            check_depth(json.loads(opened * 101 + "1" + closed * 101))


def test_text_is_printed_without_what_a_terminal_obeys() -> None:
    assert (
        printable("plain text, \u00e9\u4e2d\U0001f600\n\tnext")
        == "plain text, \u00e9\u4e2d\U0001f600\n\tnext"
    )
    assert printable("\x1b[31mred\x07\r\x7f\x9b") == r"\x1b[31mred\x07\r\x7f\x9b"
    assert printable("\u202eabc\u2066\u2028") == r"\u202eabc\u2066\u2028"
    assert printable("\ud800").encode() == rb"\ud800"
