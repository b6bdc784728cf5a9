"""Every diff of docs/extending.md applies to a copy of the package, changes as many files as the
page says, and does there what the page shows.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from scripts.docs_site.markdown import Block, blocks, slug
from tests.support.harness import ROOT, spawn_ranks
from tests.support.launched import forget_package
from zeroshard.core.placement import Tier, TierName

PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = {
    slug(text.partition("\n")[0]): blocks(text)
    for text in PAGE.split("\n## ")[1:]
    if "\n```diff\n" in text
}  # those with a diff, by the anchor of the heading
FILES = [block for block in blocks(PAGE) if block.mark.startswith("file: ")]
LIMIT_S = 300.0  # of one command, which takes a few seconds


def _diff(section: str) -> str:
    (diff,) = [block.text for block in SECTIONS[section] if block.language == "diff"]
    return diff


def _changed(diff: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", diff, re.M))


def _patched(tree: Path, diff: str) -> None:
    """Copy the package below `tree`, and apply `diff` to the copy."""
    shutil.copytree(ROOT / "src", tree / "src")
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}  # in no repository
    subprocess.run(
        ["git", "apply", "--verbose"], input=diff, text=True, cwd=tree, env=alone, check=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def _run_there(rank: int, world: int, tree: str, words: Sequence[str]) -> None:
    """Run a program on the package below `tree`: this rank has imported another copy of it."""
    forget_package()
    os.chdir(tree)
    sys.path[:0], sys.argv = [tree, f"{tree}/src"], list(words)
    runpy.run_path(words[0], run_name="__main__")
    found = Path(str(sys.modules["zeroshard"].__file__))
    assert found.is_relative_to(tree), found


def _printed(command: str, tree: Path) -> str:
    """Run `command` on the package below `tree`, without a launcher; return what it prints."""
    if launched := re.fullmatch(r"zeroshard run --nproc (\d) (.*)", command):
        words = launched[2].split()
        ranks = spawn_ranks(int(launched[1]), _run_there, str(tree), words, timeout=LIMIT_S)
        printed = "".join(rank.stdout + rank.stderr for rank in ranks)
        assert not any(rank.exitcode for rank in ranks), f"{command}\n{printed}"
        return printed
    path = os.pathsep.join([str(tree / "src"), os.environ["PYTHONPATH"]])
    environment = {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        command.split(), cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}\n{printed}"
    return printed


def _check_console(block: Block, tree: Path) -> None:
    """Run the commands of `block` on the package below `tree`, and compare what they print."""
    printed = ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            printed = _printed(line[2:], tree)
        else:
            shown = ".*".join(re.escape(part) for part in line.split("..."))
            assert re.search(shown, printed), f"{line!r} is not in\n{printed}"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_diff_applies_and_does_what_the_page_shows(section: str, tmp_path: Path) -> None:
    _patched(tmp_path, _diff(section))
    for file in FILES:
        (tmp_path / file.mark.removeprefix("file: ")).write_text(file.text)
    consoles = [block for block in SECTIONS[section] if block.language == "console"]
    assert consoles and all(block.mark == "after the diff" for block in consoles)
    for block in consoles:
        _check_console(block, tmp_path)


def test_a_tier_more_has_a_column_in_a_plan_and_the_room_of_the_host(tmp_path: Path) -> None:
    _patched(tmp_path, _diff("a-tier"))
    rows, mix = tmp_path / "src/zeroshard/planner/rows.py", "    (_DEVICE, _DEVICE, _HOST):"
    text = rows.read_text()
    assert text.count(mix) == 1
    more = '    (_DEVICE, _DEVICE, Tier.MAPPED): ("zero3",),\n'
    rows.write_text(text.replace(mix, more + mix))
    command = "zeroshard plan --params 7B --gpus 8 --gpu H100"
    printed = _printed(command, tmp_path)
    assert re.search(r"row .* host mapped ", printed)
    assert re.search(r"optim mapped +5\.25 +15\.3 +- +10\.5 .* yes", printed), printed
    printed = _printed(f"{command} --host-memory 60GiB", tmp_path)
    assert re.search("optim mapped .* no: host", printed), printed


def test_each_diff_changes_as_many_files_as_the_page_says() -> None:
    table = re.findall(r"^\| \[[\w ]+\]\(#([\w-]+)\) \| (?:0 or )?(\d) \|", PAGE, re.M)
    changed = {section: len(_changed(_diff(section))) for section in SECTIONS}
    assert {section: int(count) for section, count in table} == changed
    assert list(changed.values()) == [1, 2, 2, 1]


def test_a_diff_that_no_longer_fits_fails(tmp_path: Path) -> None:
    diff = _diff("a-row").replace(' _row("zero1"', ' _row("zero-1"')
    with pytest.raises(subprocess.CalledProcessError):
        _patched(tmp_path, diff)


def test_the_names_of_tiers_are_those_of_the_enum() -> None:
    assert [tier.value for tier in Tier] == list(get_args(TierName))
