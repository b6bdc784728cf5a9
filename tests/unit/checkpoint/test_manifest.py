"""The manifest: what is written is read, and whatever else the text holds ends in
CheckpointError, never in a manifest that makes no sense.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard import CheckpointError
from zeroshard.checkpoint.manifest import (
    ITEMSIZE,
    Manifest,
    ParameterEntry,
    ShardEntry,
    TensorEntry,
    digest,
    num_chunks,
)
from zeroshard.core.boxes import Box, check_boxes

HASH = "0123456789abcdef" * 2
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def _stride(shape: list[int], order: list[int]) -> tuple[int, ...]:
    """Return the stride of a dense tensor whose dimensions vary fastest in `order`."""
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim], step = step, step * shape[dim]
    return tuple(stride)


@st.composite
def parameters(draw: st.DrawFn) -> ParameterEntry:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    aliases = draw(st.lists(st.text(max_size=4), max_size=2))
    return ParameterEntry(
        tuple(shape), _stride(shape, list(order)), draw(st.booleans()), tuple(aliases)
    )


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes that are all of `shape`: a grid, or () alone."""
    if not math.prod(shape) or not shape or draw(st.booleans()):
        return [()]
    ranges = [
        list(pairwise(sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})))
        for size in shape
    ]
    return list(itertools.product(*ranges))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A consistent manifest: parameters cut at random places, pieces and other tensors spread
    over the ranks' files one after another.
    """
    world, chunk_bytes = draw(st.integers(1, 3)), draw(st.sampled_from([8, 24, 4 << 20]))
    known = draw(st.dictionaries(st.text(max_size=6), parameters(), max_size=4))
    tensors: list[TensorEntry] = []
    ends = [0] * world

    def place(dtype: str, shape: tuple[int, ...], kind: str, *piece: Any) -> None:
        file = draw(st.integers(0, world - 1))
        num_bytes = math.prod(shape) * ITEMSIZE[dtype]
        hashes = tuple(HASH for _ in range(num_chunks(num_bytes, chunk_bytes)))
        tensors.append(TensorEntry(file, ends[file], dtype, shape, hashes, kind, *piece))
        ends[file] += num_bytes

    for name, entry in known.items():
        grid = draw(boxes(entry.shape))
        for kind in draw(st.sets(st.sampled_from(["value", "state.exp_avg", "ema"]))):
            dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
            for box in grid:
                numel = math.prod(b - a for a, b in box) if box else entry.numel
                cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
                for start, stop in pairwise(cuts):
                    place(dtype, (stop - start,), kind, name, start, stop, box)
    for key in draw(st.sets(st.text(max_size=6), max_size=3)):
        place(
            draw(st.sampled_from(sorted(ITEMSIZE))),
            tuple(draw(st.lists(st.integers(0, 4), max_size=3))),
            key,
        )
    scalars = {
        name: draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2)) for name in known
    }
    groups = [
        {
            "params": list(known),
            "options": draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2)),
        }
    ]
    states = {
        "scheduler": {"same": draw(json_values)},
        "rng": {"ranks": [draw(json_values) for _ in range(world)]},
    }
    return Manifest(
        step=draw(st.integers(0, 10**12)),
        world=world,
        written_by=draw(st.text(max_size=5)),
        policy="zero3",
        precision="bf16",
        files=tuple(
            ShardEntry(f"rank-{rank:05d}-of-{world:05d}.safetensors", 64 + end, 64, HASH)
            for rank, end in enumerate(ends)
        ),
        parameters=known,
        tensors=tuple(tensors),
        optimizer=draw(
            st.sampled_from([None, {"class": "AdamW", "groups": groups, "scalars": scalars}])
        ),
        states=states,
        chunk_bytes=chunk_bytes,
        places=draw(st.sampled_from([(), tuple(f"dp={rank}, tp=0" for rank in range(world))])),
    )


def sealed(raw: Any, text: str | None = None) -> bytes:
    """Return the text of a manifest with a right hash, whatever it says: what a forger writes,
    and what reaches the checks behind the hash.
    """
    body = (json.dumps(raw) if text is None else text).rstrip()
    assert body.endswith("}")
    body = body[:-1].rstrip() + ("," if body[:-1].strip() != "{" else "")
    return f'{body}\n "hash": "{digest(body.encode())}"\n}}\n'.encode()


def example() -> dict[str, Any]:
    """Return a small manifest as raw JSON, without the hash."""
    manifest = Manifest(
        step=3,
        world=2,
        written_by="zeroshard",
        policy="zero3",
        precision="fp32",
        files=tuple(
            ShardEntry(f"rank-{rank:05d}-of-00002.safetensors", 64 + 24, 64, HASH)
            for rank in range(2)
        ),
        parameters={"w": ParameterEntry((2, 3), (3, 1), True)},
        tensors=(
            TensorEntry(0, 0, "F32", (3,), (HASH,), "value", "w", 0, 3),
            TensorEntry(0, 12, "F32", (3,), (HASH,), "state.exp_avg", "w", 0, 3),
            TensorEntry(1, 0, "F32", (3,), (HASH,), "value", "w", 3, 6),
            TensorEntry(1, 12, "F32", (3,), (HASH,), "extra@1"),
        ),
        optimizer={
            "class": "AdamW",
            "groups": [{"params": ["w"], "options": {"lr": 0.1}}],
            "scalars": {"w": {"step": 3.0}},
        },
        states={"extra": {"ranks": [1, {"$tensor": "extra"}]}, "rng": {"same": None}},
    )
    raw = json.loads(manifest.dump())
    del raw["hash"]
    assert Manifest.parse(sealed(raw), "there") == manifest
    return raw


# ----------------------------------------------------------------------------------- there and back


@given(manifests())
def test_what_is_dumped_is_parsed(manifest: Manifest) -> None:
    text = manifest.dump()
    assert Manifest.parse(text, "there") == manifest
    assert json.loads(text)["hash"] == digest(text[: text.rindex(b'\n "hash"')]), (
        "the last line is the hash of all before it"
    )


def test_pieces_come_in_the_order_of_their_ranges_and_other_tensors_by_kind() -> None:
    manifest = Manifest.parse(sealed(example()), "there")
    assert [(piece.file, piece.start, piece.stop) for piece in manifest.pieces()["w", "value"]] == [
        (0, 0, 3),
        (1, 3, 6),
    ]
    assert list(manifest.loose()) == ["extra@1"] and manifest.total_bytes() == 2 * 88
    assert [entry.key for entry in manifest.tensors] == [
        "w|value|0:3",
        "w|state.exp_avg|0:3",
        "w|value|3:6",
        "extra@1",
    ]


# ------------------------------------------------------------------------------------- damaged text


@settings(max_examples=300)
@given(st.data())
def test_damaged_text_is_found_by_its_hash(data: st.DataObject) -> None:
    text = bytearray(sealed(example()))
    where = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "append"]))
    if how == "flip":
        text[where] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del text[where:]
    elif how == "insert":
        text[where:where] = data.draw(st.binary(min_size=1, max_size=4))
    elif how == "remove":
        del text[where]
    else:
        text += data.draw(st.binary(min_size=1, max_size=4))
    if bytes(text) == sealed(example()):  # a byte put in beside its like
        return
    with pytest.raises(CheckpointError, match=r"^there is damaged: its hash does not fit"):
        Manifest.parse(bytes(text), "there")


@settings(max_examples=300)
@given(st.data())
def test_damaged_text_with_a_right_hash_gives_a_manifest_or_a_typed_error(
    data: st.DataObject,
) -> None:
    text = json.dumps(example())
    where = data.draw(st.integers(0, len(text) - 2))
    inserted = data.draw(
        st.text(max_size=2)
        | st.sampled_from(["9" * 30, "-", "[" * 2000, '"', "NaN", "1e999", "{}", "null"])
    )
    removed = data.draw(st.integers(0, 12))
    _parse_or_refuse(sealed(None, text[:where] + inserted + text[where + removed : -1] + "}"))


def _parse_or_refuse(text: bytes) -> None:
    try:
        manifest = Manifest.parse(text, "there")
    except CheckpointError as error:
        assert str(error).startswith("there ") and len(str(error)) < 500
    else:
        assert Manifest.parse(manifest.dump(), "again") == manifest


def _places(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside `raw`."""
    items = (
        raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    )
    return [
        place for key, value in items for place in [(*path, key), *_places(value, (*path, key))]
    ]


def _put(raw: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        raw = raw[key]
    raw[place[-1]] = value


ODD = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    2**63,
    2**64,
    10**400,
    "",
    "\0",
    "x" * 10_000,
    [],
    {},
    [[]],
    [-1],
    [2**62, 2**62],
    {"a": {}},
    {"$tensor": 3},
]


@pytest.mark.parametrize("place", _places(example()), ids=lambda place: ".".join(map(str, place)))
def test_no_value_anywhere_breaks_the_reader(place: tuple[Any, ...]) -> None:
    for value in ODD:
        raw = example()
        _put(raw, place, value)
        _parse_or_refuse(sealed(raw))
    raw = example()
    owner = raw
    for key in place[:-1]:
        owner = owner[key]
    del owner[place[-1]]
    _parse_or_refuse(sealed(raw))


def _changed(**changes: Any) -> dict[str, Any]:
    """Return the example with values put at paths written ``files__0__name``."""
    raw = copy.deepcopy(example())
    for path, value in changes.items():
        _put(raw, tuple(int(key) if key.isdigit() else key for key in path.split("__")), value)
    return raw


NAME = "rank-00000-of-00002.safetensors"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step is -1, not a whole number from 0"),
        ({"step": 2.0}, "step is 2.0"),
        ({"step": True}, "step is True"),
        ({"step": 2**63}, "step is 9223372036854775808"),
        ({"world": 3}, "3 ranks wrote 2 files"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": 2**40}, "chunks of 1099511627776 bytes"),
        (
            {"files__0__name": "../../etc/passwd"},
            "'../../etc/passwd' is no name of a file of pieces",
        ),
        ({"files__0__name": "/etc/passwd"}, "is no name"),
        ({"files__0__name": f"../{NAME}"}, "is no name"),
        ({"files__0__name": f"{NAME}\0"}, "is no name"),
        ({"files__0__name": f"{NAME}\n"}, "is no name"),
        ({"files__0__name": "manifest.json"}, "is no name"),
        ({"files__0__name": "rank-00001-of-00002.safetensors"}, "a file stands there twice"),
        ({"files__0__header_bytes": 4}, "88 bytes and a header of 4"),
        (
            {"files__0__header_bytes": 2**62, "files__0__bytes": 2**62 + 24},
            "a header of 4611686018427387904",
        ),
        ({"files__0__bytes": 10**6}, "has 1000000 bytes, and its tensors end at 88"),
        ({"files__0__bytes": 87}, "ends behind the end of"),
        (
            {"parameters__w__shape": [2**40, 2**40]},
            r"a shape of \[1099511627776, 1099511627776\] is too large",
        ),
        ({"parameters__w__shape": [1] * 65}, "a shape of 65 dimensions"),
        ({"parameters__w__shape": [2, 4], "parameters__w__stride": [9, 1]}, r"has stride \[9, 1\]"),
        ({"parameters__w__stride": [0, 0]}, r"has stride \[0, 0\]"),
        ({"parameters__w__stride": [3]}, r"has stride \[3\]"),
        ({"parameters__w__trained": "no"}, "'no' is neither true nor false"),
        ({"parameters__w__aliases": "head"}, "'head' is no list"),
        ({"tensors__0__dtype": "F31"}, "as 'F31'"),
        ({"tensors__0__file": 2}, "lies in file 2 of 2"),
        ({"tensors__0__offset": 2**62}, "ends behind the end of"),
        (
            {"tensors__1__offset": 8},
            "lies at byte 8 of the data, and the tensor before it ends at 12",
        ),
        ({"tensors__0__shape": [2**31, 2**31]}, "ends behind the end of"),
        ({"tensors__0__hashes": []}, "has 0 hashes for 12 bytes"),
        ({"tensors__0__hashes": "ab"}, "'ab' is no list"),
        ({"tensors__0__stop": 7}, r"does not fit a parameter of shape \[2, 3\]"),
        ({"tensors__2__start": 2, "tensors__2__stop": 5}, "pieces of value of 'w' overlap at 2"),
        ({"tensors__0__parameter": "v"}, "there is no parameter 'v'"),
        ({"optimizer": []}, r"\[\] is no object"),
        ({"optimizer__groups__0__params": ["v"]}, "there is no parameter 'v'"),
        ({"optimizer__scalars": {"v": {}}}, "there is no parameter 'v'"),
        (
            {"states__extra": {"ranks": [1]}},
            "the state 'extra' is neither the same on all ranks nor one for each of 2",
        ),
        ({"states__extra": {"same": 1, "ranks": [1, 2]}}, "is neither the same"),
        ({"version": 0}, "its format version is 0"),
        ({"version": True}, "its format version is True"),
        ({"version": "1"}, "its format version is '1'"),
        ({"format": "another checkpoint"}, "is not a zeroshard checkpoint"),
    ],
    ids=lambda value: ",".join(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_and_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        Manifest.parse(sealed(_changed(**changes)), "there")
    assert str(error.value).startswith("there ")


def cut_example() -> dict[str, Any]:
    """Return the example with two boxes of its parameter, by rows; the second kind is whole."""
    raw = example() | {"version": 2, "places": ["dp=0, tp=0", "dp=0, tp=1"]}
    for number, box in ((0, [[0, 1], [0, 3]]), (2, [[1, 2], [0, 3]])):
        raw["tensors"][number] |= {"box": box, "start": 0, "stop": 3}
    manifest = Manifest.parse(sealed(raw), "there")
    assert [piece.key for piece in manifest.pieces()["w", "value"]] == [
        "w|value|0:3|0:1,0:3",
        "w|value|0:3|1:2,0:3",
    ]
    assert json.loads(manifest.dump())["version"] == 2
    return raw


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([[0, 1], [0, 3]], [[0, 1], [0, 3]], "pieces of value of 'w' overlap at 0"),
        ([[0, 1], [0, 3]], [[1, 3], [0, 3]], "go beyond at 1:3 of dimension 0 of 2"),
        ([[0, 2], [0, 2]], [[0, 2], [1, 3]], "overlap at 1:3 of dimension 1 of 3"),
        ([[0, 2], [0, 2]], [[1, 2], [0, 3]], "overlap at 1:2 of dimension 0 of 2"),
        ([[0, 1], [0, 1]], [[1, 2], [1, 3]], "does not fit a parameter of shape"),
        ([[0, 2], [0, 2]], None, "one of 0 dimensions, in"),
        ([[0, 1], [0, 3]], None, "one of 0 dimensions, in"),
        ([[0, 1]], [[1, 2]], "does not fit a parameter of shape"),
        ([[0, 1], [3, 3]], [[1, 2], [0, 3]], "a box without elements"),
        ([[0, 1], [-1, 3]], [[1, 2], [0, 3]], "a size is -1"),
        ([[0, 1], [0]], [[1, 2], [0, 3]], "not enough values to unpack"),
        ([[0, 2**40], [0, 2**40]], [[1, 2], [0, 3]], "the boxes of value of 'w' go beyond"),
        ([], [[1, 2], [0, 3]], "a box of 0 dimensions"),
        ("all", [[1, 2], [0, 3]], "'all' is no list"),
    ],
    ids=repr,
)
def test_boxes_that_are_not_the_parameter_once_are_refused(
    first: Any, second: Any, message: str
) -> None:
    raw = cut_example()
    for number, box in ((0, first), (2, second)):
        raw["tensors"][number]["box"] = box
        if box is None:
            del raw["tensors"][number]["box"]
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse(sealed(raw), "there")


@pytest.mark.parametrize("places", [["dp=0"], ["dp=0", "dp=0"], ["dp=0", 1], "dp=0"], ids=repr)
def test_places_are_one_of_each_rank(places: Any) -> None:
    with pytest.raises(CheckpointError, match=r"places for 2 ranks|no text|no list"):
        Manifest.parse(sealed(cut_example() | {"places": places}), "there")


@pytest.mark.parametrize(
    "place", _places(cut_example()["tensors"][0]["box"]), ids=lambda place: str(place)
)
def test_no_value_in_a_box_breaks_the_reader(place: tuple[Any, ...]) -> None:
    for value in ODD:
        raw = cut_example()
        _put(raw["tensors"][0]["box"], place, value)
        _parse_or_refuse(sealed(raw))


def test_many_boxes_are_checked_in_little_time() -> None:
    grid = {((row, row + 1), (0, 1)) for row in range(100_000)}
    begin = time.process_time()
    check_boxes((100_000, 1), grid, "the boxes")
    with pytest.raises(ValueError, match="leave a hole"):
        check_boxes((100_000, 2), grid | {((0, 1), (1, 2))}, "the boxes")
    assert time.process_time() - begin < 20


def test_the_same_tensor_twice_is_refused() -> None:
    raw = example()
    raw["tensors"].append(raw["tensors"][3] | {"offset": 24})
    raw["files"][1]["bytes"] += 12
    with pytest.raises(CheckpointError, match="a tensor stands there twice"):
        Manifest.parse(sealed(raw), "there")


def test_a_newer_version_says_which_and_what_to_do() -> None:
    raw = example() | {"version": 3, "written_by": "zeroshard 9.0", "tensors": "of another kind"}
    with pytest.raises(
        CheckpointError,
        match=(
            r"format version 3, written by 'zeroshard 9\.0', .* reads versions up to 2: use a newer"
            r" zeroshard"
        ),
    ):
        Manifest.parse(sealed(raw), "there")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(example()).replace('"step": 3,', '"step": 3, "step": 3,'),
        json.dumps(example()).replace('"lr": 0.1', '"lr": 0.1, "lr": 0.2'),
    ],
    ids=["fields", "inside"],
)
def test_a_key_twice_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"the key '(step|lr)' stands there twice"):
        Manifest.parse(sealed(None, text), "there")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_json_number_is_refused(number: str) -> None:
    with pytest.raises(CheckpointError, match=f"{number} is no number"):
        Manifest.parse(sealed(None, json.dumps(example()).replace("0.1", number)), "there")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [321, 900, 100_000])
def test_deep_nesting_is_refused(opening: str, depth: int) -> None:
    deep = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
    for place in ('"same": null', '"lr": 0.1', '"step": 3.0'):
        assert place in json.dumps(example())
        text = json.dumps(example()).replace(place, place.split(":")[0] + ": " + deep)
        with pytest.raises(CheckpointError, match=r"nested more than|is not JSON"):
            Manifest.parse(sealed(None, text), "there")


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"\x00" * 100, b"[]\n", b'\n "hash": "' + b"0" * 32 + b'"\n}\n', b"\xff\xfe" * 50],
)
def test_what_is_no_manifest_at_all_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="there is damaged"):
        Manifest.parse(text, "there")


@pytest.mark.parametrize("raw", [{}, {"format": None}])
def test_other_json_with_a_right_hash_is_refused(raw: Any) -> None:
    with pytest.raises(CheckpointError, match="is not a zeroshard checkpoint"):
        Manifest.parse(sealed(raw), "there")


@pytest.mark.parametrize(
    "section",
    [
        {"tensors": [{}] * 50_000},
        {"files": [{}] * 50_000},
        {"parameters": {f"{i}": {} for i in range(50_000)}},
    ],
    ids=lambda section: next(iter(section)),
)
def test_the_first_wrong_entry_of_many_ends_the_reading(section: dict[str, Any]) -> None:
    """Every error of 50,000 entries would take 100 MB."""
    text = sealed(example() | section)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="is missing"):
            Manifest.parse(text, "there")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_random_json_in_place_of_whole_sections_is_refused() -> None:
    generator = random.Random(0)
    for section in ("files", "parameters", "tensors", "optimizer", "states", "policy", "world"):
        for _ in range(20):
            raw = example()
            raw[section] = generator.choice(ODD[1:])
            if raw[section] == {} and section == "states":
                continue  # a checkpoint without any
            _parse_or_refuse(sealed(raw))
