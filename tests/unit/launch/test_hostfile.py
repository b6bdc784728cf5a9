"""Hostfiles and the choice of hosts and slots: all of the format, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.launch.options import Host, choose_hosts, parse_hosts, read_hosts
from zeroshard.terminal import UsageError

NAMES = st.from_regex(r"\A[a-z0-9_][A-Za-z0-9._-]{0,12}\Z")
SPACES = st.text(" \t", min_size=1, max_size=3)
FOUR = [Host(f"worker-{number}", (0, 1, 2, 3), 4) for number in range(3)]


@given(st.dictionaries(NAMES, st.integers(1, 99), min_size=1), st.data())
def test_every_hostfile_that_can_be_written_is_read_back(
    hosts: dict[str, int], data: st.DataObject
) -> None:
    lines = []
    for name, count in hosts.items():
        lines += data.draw(st.lists(st.sampled_from(["", "  ", "# worker-9 slots=1"]), max_size=2))
        end = data.draw(st.sampled_from(["", " ", "\r", "  # slots=7"]))
        lines.append(f"{name}{data.draw(SPACES)}slots={count}{end}")
    expected = [Host(name, tuple(range(count)), count) for name, count in hosts.items()]
    assert parse_hosts("\n".join(lines)) == expected


@given(st.text())
def test_a_name_that_is_read_is_one_word_and_no_option(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    for host in hosts:
        assert not host.name.startswith("-") and set(host.name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        )


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=touch${IFS}x slots=1",
        "-v slots=1",
        ".. slots=1",
        "worker 1 slots=1",
        "worker;touch slots=1",
        "worker$(id) slots=1",
        "user@worker slots=1",
        "worker:22 slots=1",
        "worker\u00e9 slots=1",
        "worker",
        "worker slots=",
        "worker slots=0",
        "worker slots=-1",
        "worker slots=two",
        "worker slots=\u0662",
        "worker slots=99999",
        "worker slots=1 slots=2",
        "first slots=1",
        "slots=4",
        "w" * 300 + " slots=1",
        "a\x00b slots=1",
        "a\x0bslots=1",
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(UsageError, match=r"^hostfile hosts, line 3: ") as caught:
        parse_hosts(f"# comment\nfirst slots=2\n{line}\nlast slots=1", "hosts")
    assert "\n" not in str(caught.value)


def test_a_file_without_a_host_or_with_far_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(UsageError, match="No such file"):
        read_hosts(str(path))
    path.write_text("# none\n\n")
    with pytest.raises(UsageError, match="names no host"):
        read_hosts(str(path))
    path.write_text("#" * (1 << 21))
    with pytest.raises(UsageError, match="are no hostfile"):
        read_hosts(str(path))
    path.write_bytes(b"a\xff slots=1\n")
    with pytest.raises(UsageError, match="line 1"):
        read_hosts(str(path))


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"worker-0": 4, "worker-1": 4, "worker-2": 4}),
        ("worker-0@worker-1:0,2", None, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-2@worker-0", None, {"worker-0": 4, "worker-2": 4}),
        ("worker-1:3,0,3", None, {"worker-1": (0, 3)}),
        (None, "worker-1", {"worker-0": 4, "worker-2": 4}),
        (None, "worker-1:0", {"worker-0": 4, "worker-1": (1, 2, 3), "worker-2": 4}),
        (None, "worker-0@worker-1:0,1,2,3@worker-2:0", {"worker-2": (1, 2, 3)}),
    ],
)
def test_include_and_exclude_choose_hosts_and_slots(
    include: str | None, exclude: str | None, expected: dict[str, int | tuple[int, ...]]
) -> None:
    chosen = {host.name: host.slots for host in choose_hosts(FOUR, include, exclude)}
    assert chosen == {
        name: tuple(range(slots)) if isinstance(slots, int) else slots
        for name, slots in expected.items()
    }
    assert list(chosen) == sorted(chosen)  # as in the hostfile


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "exclude each other"),
        ("worker-9", None, "--include: 'worker-9' is not a host"),
        (None, "worker-9", "--exclude: 'worker-9' is not a host"),
        ("", None, "--include: '' is not a host"),
        ("worker-0:4", None, "worker-0 has no slot '4', only 0 to 3"),
        ("worker-0:", None, "has no slot ''"),
        ("worker-0:-1", None, "has no slot '-1'"),
        ("worker-0:1@worker-0:2", None, "worker-0 stands there twice"),
        (None, "worker-0@worker-1@worker-2", "leaves no slot"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(
    include: str | None, exclude: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_hosts(FOUR, include, exclude)


@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_exclude_leaves_what_include_of_the_same_does_not_take(
    first: set[int], second: set[int]
) -> None:
    parts = [f"worker-{n}:{','.join(map(str, s))}" for n, s in ((0, first), (1, second)) if s]
    if not parts:
        return
    text = "@".join(parts)
    taken = {(h.name, slot) for h in choose_hosts(FOUR, text, None) for slot in h.slots}
    left = {(h.name, slot) for h in choose_hosts(FOUR, None, text) for slot in h.slots}
    assert taken | left == {(host.name, slot) for host in FOUR for slot in host.slots}
    assert not taken & left
