"""Files and text of other people: what cannot be read is one reason, and soon. Files that are
written whole or not at all, and never through a link.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from zeroshard.system import safe_files
from zeroshard.system.safe_files import (
    NotReadable,
    check_depth,
    printable,
    read_file,
    read_json,
    replacing,
)


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


@pytest.mark.timeout(10)  # opening a pipe waits for a writer that never comes
def test_pipes_devices_and_directories_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(NotReadable, match="it is not a regular file"):
            read_file(path)
    with pytest.raises(NotReadable, match="null"):
        read_file("a\0b")


@pytest.mark.parametrize("kind", ["same", "other", "pipe", "link"])
def test_without_proc_a_file_is_opened_by_its_name_where_it_is_still_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, real = tmp_path / "file", os.open
    path.write_bytes(b"whole")

    def without_proc(name: str | Path, *args: int, dir_fd: int | None = None) -> int:
        if not str(name).startswith("/proc/"):
            return real(name, *args, dir_fd=dir_fd)
        if kind != "same":
            path.rename(tmp_path / "moved")
        if kind == "other":
            path.write_bytes(b"other")
        if kind == "pipe":  # it is opened without a wait for a writer
            os.mkfifo(path)
        if kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
            (tmp_path / "elsewhere").write_bytes(b"elsewhere")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    monkeypatch.setattr(os, "open", without_proc)
    if kind == "same":
        assert read_file(path) == b"whole"
    else:
        with pytest.raises(NotReadable, match="replaced while it was opened"):
            read_file(path)


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


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="midway"), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError("midway")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_links_at_the_name_and_at_the_draft_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    path.symlink_to(victim)
    with replacing(path) as file:
        file.write(b"new")
    assert victim.read_text() == "precious" and not path.is_symlink()
    monkeypatch.setattr(safe_files.secrets, "token_hex", lambda num_bytes: "guessed")
    for target in (victim, tmp_path / "not there"):
        (tmp_path / ".file.guessed").symlink_to(target)
        with pytest.raises(FileExistsError), replacing(path) as file:
            file.write(b"other")
        assert (tmp_path / ".file.guessed").is_symlink()
        (tmp_path / ".file.guessed").unlink()
    assert victim.read_text() == "precious" and path.read_text() == "new"
    assert not (tmp_path / "not there").exists()
