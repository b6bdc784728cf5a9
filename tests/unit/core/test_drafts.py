"""Files that are written as a whole or not at all, and never through a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.core import drafts
from zeroshard.core.drafts import replacing


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
    monkeypatch.setattr(drafts.secrets, "token_hex", lambda num_bytes: "guessed")
    for target in (victim, tmp_path / "not there"):
        (tmp_path / ".file.guessed").symlink_to(target)
        with pytest.raises(FileExistsError), replacing(path) as file:
            file.write(b"other")
        assert (tmp_path / ".file.guessed").is_symlink()
        (tmp_path / ".file.guessed").unlink()
    assert victim.read_text() == "precious" and path.read_text() == "new"
    assert not (tmp_path / "not there").exists()
