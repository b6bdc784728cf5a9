"""benchmarks/slow_wire.py: options, what it says where it may not run, closed forms and tables.
Namespaces are for the script itself to make.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import slow_wire
from benchmarks.slow_wire import (
    ROWS,
    AtRate,
    Measured,
    Report,
    RowError,
    bits_per_s,
    limit_words,
    markdown,
    missing,
    notes,
    parse,
    show,
)

MB = 1e6


def _report(
    *, rounds: int = 12, faster: float = 3.0, near: dict[str, float] | None = None
) -> Report:
    """Return what a run would: zeropp-int4 `faster` times as fast as zero3 at 1gbit, and both in
    100 ms without a limit.
    """
    near = {"shared_memory": MB} if near is None else near

    def rows(zero3_s: float, zeropp_s: float) -> dict[str, Measured]:
        return {
            "zero3": Measured(
                [zero3_s] * rounds,
                [121 * MB] * rounds,
                [120 * MB] * rounds,
                120.5 * MB,
                {"gloo": 120 * MB, **near},
            ),
            "zeropp-int4": Measured(
                [zeropp_s] * rounds,
                [16 * MB] * rounds,
                [15 * MB] * rounds,
                15.5 * MB,
                {"gloo": 15 * MB, **near},
            ),
        }

    rates = [
        AtRate("none", 20_000.0, rows(0.1, 0.1)),
        AtRate("1gbit", 940.0, rows(1.2, 1.2 / faster)),
    ]
    machine = {"processor": "some processor", "cores": 2, "kernel": "6.1"}
    options = parse([])
    size = slow_wire.asdict(options.size)
    return Report(
        options.command,
        machine,
        size,
        options.size.num_parameters,
        0.06,
        "bf16",
        2,
        rates,
        {"mics": "no columns yet"},
        {"hpz": "it broke"},
    )


def test_the_default_model_has_many_parameters_and_few_tokens() -> None:
    options = parse([])
    assert 20e6 < options.size.num_parameters < 60e6
    assert options.size.tokens <= 32
    assert options.rows == list(ROWS)
    assert options.rates == ["none", "1gbit", "100mbit"]


@pytest.mark.parametrize(
    "words",
    [
        ["--rates", "fast"],
        ["--rates", "0gbit"],
        ["--rows", "zero9"],
        ["--rounds", "0"],
        ["--width", "100"],
        ["--precision", "fp8"],
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert words[0].removeprefix("--").rstrip("s") in capsys.readouterr().err


def test_rates_are_bits_and_the_bucket_holds_a_packet_at_least() -> None:
    assert bits_per_s("100mbit") == 1e8
    assert bits_per_s("2.5gbit") == 2.5e9
    assert bits_per_s("none") == float("inf")
    assert limit_words("1gbit")[:5] == ["tbf", "rate", "1gbit", "burst", "250000b"]
    assert limit_words("100mbit")[4] == "65536b"


def test_closed_forms_are_those_of_the_table_of_traffic() -> None:
    psi = 2 * 1024  # bytes of bf16 weights; docs/design/routes.md, "Leaving one node per step"
    expected = {
        "zero3": 3,
        "zero3-two-level": 2,
        "zero3-cheapest": 2,
        "hpz": 1.5,
        "mics": 2,
        "hfsdp": 1.5,
        "zeropp-int8": 0.508,
        "zeropp-int4": 0.383,
    }
    for name, row in ROWS.items():
        assert row.leaving_a_node(1024, "bf16") / psi == pytest.approx(expected[name], abs=0.001), (
            name
        )


def test_what_is_missing_is_named() -> None:
    assert missing(lambda name: f"/sbin/{name}", user=0) == []
    assert missing(lambda name: None, user=0) == [
        "the program 'ip' (of iproute2)",
        "the program 'tc' (of iproute2)",
    ]
    assert missing(lambda name: f"/sbin/{name}", user=1000) == ["root rights"]


def test_without_rights_it_is_skipped_loudly_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow_wire, "missing", lambda: ["root rights"])
    assert slow_wire.main([]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "SKIPPED, NOTHING MEASURED" in captured.err
    assert "lacks root rights" in captured.err


def test_a_kernel_that_refuses_is_quoted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    removed = []
    monkeypatch.setattr(slow_wire, "missing", list)
    monkeypatch.setattr(
        slow_wire,
        "_run",
        lambda *words: (_ for _ in ()).throw(
            OSError(f"`{words[0]} {words[1]}`: Operation not permitted")
        ),
    )
    monkeypatch.setattr(slow_wire.Wire, "close", lambda wire: removed.append(wire.hosts))
    assert slow_wire.main([]) == 3
    assert "the right to: `ip netns`: Operation not permitted" in capsys.readouterr().err
    assert len(removed) == 1


def test_a_row_that_breaks_is_left_out_and_the_others_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    tries: list[list[str]] = []

    class Nothing:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: object) -> None: ...

    def measure(ranks: object, wire: object, names: list[str], *_: object) -> Report:
        tries.append(list(names))
        if "hpz" in names:
            raise RowError("hpz", "it broke")
        return _report()

    monkeypatch.setattr(slow_wire, "Wire", Nothing)
    monkeypatch.setattr(slow_wire, "Ranks", Nothing)
    monkeypatch.setattr(slow_wire, "measure", measure)
    report = slow_wire.run(["zero3", "hpz", "mics"], parse([]), said.append)
    assert tries == [["zero3", "hpz", "mics"], ["zero3", "mics"]]
    assert report.failed == {"hpz": "it broke"}
    assert said == ["FAILED: hpz: it broke"]


def test_tables_have_a_line_per_row_with_all_three_counts() -> None:
    report = _report()
    text = io.StringIO()
    show(report, Console(file=text, width=200))
    line = next(
        line for line in markdown(report).splitlines() if line.startswith("| zeropp-int4 | 400 ")
    )
    assert line == "| zeropp-int4 | 400 | 3.00 | 3.00 to 3.00 | 100 ms | 16.0 | 15.0 | 15.5 | 1.0 |"
    for word in line.strip("| ").split(" | "):
        assert word in text.getvalue()


def test_notes_say_what_is_missing_and_what_became_of_the_target() -> None:
    lines = "\n".join(notes(_report()))
    assert "NOT IN THIS VERSION: mics: no columns yet" in lines
    assert "FAILED: hpz: it broke" in lines
    assert "of a zero3 step 80% is payload at that rate, 5% is forward and backward alone" in lines
    assert "without a limit it takes 8% of the time" in lines
    assert "zeropp-int4 at least 2x as fast as zero3: 3.00, holds" in lines
    assert "1.50, misses" in "\n".join(notes(_report(faster=1.5)))
    assert "3.00, too few pairs" in "\n".join(notes(_report(rounds=3)))


def test_ranks_that_were_not_on_two_hosts_are_said() -> None:
    lines = notes(_report(near={"gloo": 160 * MB}))
    assert "NOT TWO HOSTS: zero3 at 1gbit moved 120.0 MB between nodes by 160.0 MB gloo" in lines
    assert not any("NOT TWO HOSTS" in line for line in notes(_report()))
