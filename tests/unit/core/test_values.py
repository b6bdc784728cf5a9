"""Values without pickle: what is encoded comes back with its types and bits, and what has no
form is refused with its path.
"""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from zeroshard import CheckpointError
from zeroshard.checkpoint.shard_files import DTYPES, as_bytes
from zeroshard.core.values import decode, encode


def there_and_back(value: Any) -> Any:
    """Return `value` encoded, written as JSON and bytes, read and decoded."""
    stored: dict[str, torch.Tensor] = {}

    def store(path: str, tensor: torch.Tensor) -> str:
        key = f"{len(stored)}:{path}"
        data = bytearray(as_bytes(tensor))
        stored[key] = (
            torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)
            if data
            else torch.empty(tensor.shape, dtype=tensor.dtype)
        )
        return key

    text = json.dumps(encode(value, "extra", store), allow_nan=False)
    return decode(json.loads(text), stored.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and the same bits; NaN is itself, -0.0 is
    not 0.0.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype is other.dtype
            and one.shape == other.shape
            and bytes(as_bytes(one)) == bytes(as_bytes(other))
        )
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same([*one], [*other]) and same([*one.values()], [*other.values()])
    return one == other


hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
anything = st.recursive(
    hashable
    | st.floats()
    | st.complex_numbers()
    | st.sampled_from([*DTYPES.values(), torch.complex128])
    | st.sampled_from(["$", "$tensor", "$dict", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable | st.sampled_from(["$tensor", "$x"]), inner, max_size=4)
        | st.sets(hashable, max_size=4)
    ),
    max_leaves=20,
)


@given(anything)
def test_what_is_encoded_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (0, 5)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 7, shape, generator=generator)
    tensor = (numbers.bool() if dtype is torch.bool else numbers.to(torch.float32)).to(dtype)
    assert same(there_and_back({"deep": [tensor]}), {"deep": [tensor]})


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2],
    ids=str,
)
def test_numbers_that_are_none_and_both_zeros(dtype: torch.dtype) -> None:
    for value in (
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).max,
    ):
        for tensor in (torch.tensor(value, dtype=dtype), torch.tensor([value], dtype=dtype)):
            back = there_and_back(tensor)
            assert back.dtype is dtype and torch.equal(back.float().isnan(), tensor.float().isnan())
            assert math.isnan(value) or same(back, tensor)


def test_the_largest_and_smallest_integers() -> None:
    for dtype in (torch.int64, torch.uint64, torch.int8, torch.uint16):
        for value in (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
            assert same(
                there_and_back(torch.tensor(value, dtype=dtype)), torch.tensor(value, dtype=dtype)
            )
    assert there_and_back(2**8000) == 2**8000


def test_views_and_lazy_tensors_come_back_as_their_numbers() -> None:
    base = torch.arange(12.0).view(3, 4)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for tensor in (
        base.t(),
        base[:, 1],
        base[::2],
        torch.tensor(1.0).expand(3, 2),
        conjugate,
        torch._neg_view(torch.tensor([1.0, -2.0])),
    ):
        assert torch.equal(there_and_back(tensor), tensor)
    assert torch.equal(there_and_back(torch.tensor(1 + 2j).conj()), torch.tensor(1 - 2j))
    trained = torch.nn.Parameter(torch.ones(2))
    back = there_and_back(trained)
    assert type(back) is torch.Tensor and not back.requires_grad and torch.equal(back, trained)


def test_numpy_arrays_of_every_kind() -> None:
    big_endian = np.arange(3, dtype=">i4")
    sealed = np.arange(3.0)
    sealed.flags.writeable = False
    for array in (
        np.zeros((2, 0)),
        np.array(7, dtype=np.uint8),
        np.arange(6).reshape(2, 3).T,
        np.array([1j]).astype(np.complex64),
        sealed,
        np.array([True]),
    ):
        back = there_and_back(array)
        assert (
            back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
        )
    assert np.array_equal(there_and_back(big_endian), big_endian), "in this machine's order"
    assert (
        there_and_back(np.float32(0.1)) == float(np.float32(0.1))
        and type(there_and_back(np.int64(3))) is int
    )
    assert there_and_back(np.bool_(True)) is True and there_and_back(np.complex64(1j)) == 1j


def test_a_memory_mapped_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "array", dtype=np.int32, shape=(4,), mode="w+")
    mapped[:] = range(4)
    assert there_and_back(mapped).tolist() == [0, 1, 2, 3]


def test_random_generators_go_on_where_they_were() -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "new": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    expected = (random.random(), np.random.rand(), torch.rand(1))
    back = there_and_back(states)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    generator = np.random.default_rng()
    generator.bit_generator.state = back["new"]
    assert generator.random() == np.random.default_rng(3).random()


def test_a_scheduler_takes_back_its_state() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    state = schedule.state_dict()
    other = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    other.load_state_dict(there_and_back(state))
    assert other.get_last_lr() == schedule.get_last_lr() and other.last_epoch == 3


# --------------------------------------------------------------------------------------- subclasses


class Phase(enum.IntEnum):
    WARM = 3


class Mode(str, enum.Enum):  # noqa: UP042 (whose str() is not its text)
    FAST = "fast"


class Half(float):
    def __repr__(self) -> str:
        return "a half"


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.Size([2, 3]), (2, 3)),
        (Point(1, [2]), (1, [2])),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Phase.WARM, 3),
        (Mode.FAST, "fast"),
        ({Mode.FAST: 1}, {"fast": 1}),
        (Half(0.5), 0.5),
        (bytearray(b"\x00\xff"), b"\x00\xff"),
        (np.str_("text"), "text"),
        (np.bytes_(b"bytes"), b"bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_becomes_the_plain_type(value: Any, expected: Any) -> None:
    assert same(there_and_back(value), expected)


# ----------------------------------------------------------------------------------------- refusals


class Unknown:
    pass


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": [1, Unknown()]},
            r"^extra\.a\[1\] is a Unknown, which has no form in a checkpoint: numbers, text",
        ),
        ({"a.b": {3: Unknown()}}, r"^extra\.a\.b\[3\] is a Unknown"),
        ({(1, Unknown): 1}, r"^extra \(a key\)\[1\] is a type"),
        ({"f": lambda: 0}, r"^extra\.f is a function"),
        ({"d": datetime.date(2024, 1, 1)}, r"^extra\.d is a date"),
        ({"p": Path("x")}, r"^extra\.p is a PosixPath"),
        ({"n": 2**8192}, r"^extra\.n is a number of 8193 bits"),
        ([[_cycle()]], r"\[0\] is nested more than 100 deep"),
        ({"t": torch.zeros(2).to_sparse()}, r"^extra\.t is a torch\.sparse_coo tensor"),
        ({"t": torch.zeros(2, device="meta")}, r"^extra\.t is a meta tensor"),
        (
            {"t": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)},
            r"^extra\.t is a nested tensor",
        ),
        ({"a": np.zeros(2, dtype=np.longdouble)}, r"^extra\.a is an array of (float|longdouble)"),
        ({"a": np.longdouble(1)}, r"^extra\.a is a longdouble"),
        ({"a": np.array(["x"])}, r"^extra\.a is a ndarray"),
        ({"a": np.array([None])}, r"^extra\.a is a ndarray"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, r"^extra\.a is a MaskedArray"),
        ({"a": np.datetime64(1, "ns")}, r"^extra\.a is a datetime64"),
        ({"g": torch.Generator()}, r"^extra\.g is a Generator"),
    ],
    ids=lambda value: "",
)
def test_what_has_no_form_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        there_and_back(value)


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: {"a": x}, lambda x: {1: x}, lambda x: (x,), lambda x: frozenset([x])],
    ids="ldits",
)
def test_a_hundred_levels_come_back_and_one_more_is_refused(wrap: Callable[[Any], Any]) -> None:
    assert there_and_back(_nested(100, wrap)) == _nested(100, wrap)
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        there_and_back(_nested(101, wrap))


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "gASVAA=="},
        {"$tensor": "not there"},
        {"$tensor": []},
        {"$array": "half"},
        {"$scalar": ["float32"]},
        {"$scalar": ["float32", "x"]},
        {"$scalar": ["int8", 10**30]},
        {"$scalar": ["Tensor", 1]},
        {"$dtype": "load"},
        {"$dtype": 3},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$set": [[1]]},
        {"$set": 3},
        {"$float": "x"},
        {"$complex": [1, 2, 3]},
        {"$bytes": "?"},
        {"$bytes": 1},
        {"$": 1},
        {"$subclass": ["os.system", {}, [], [], []]},
        {"$subclass": ["torch.nn.parameter.Parameter", {}, [], [], []]},
        {"$subclass": ["torch.testing._internal.two_tensor.TwoTensor", {}, None, [], []]},
        {"$subclass": []},
        _nested(300, lambda x: [x]),
        _nested(100_000, lambda x: {"a": x}),
    ],
    ids=lambda value: str(next(iter(value)))[:9],
)
def test_what_encode_does_not_write_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(value, {"half": torch.zeros(1, dtype=torch.bfloat16)}.__getitem__)


def test_a_tensor_that_wraps_others_comes_back_by_its_own_words() -> None:
    value = TwoTensor(torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64))
    found = there_and_back({"state": [value]})["state"][0]
    assert type(found) is TwoTensor and found.shape == (2, 3)
    assert torch.equal(found.a, value.a) and torch.equal(found.b, value.b)


def test_an_error_of_the_file_stays_what_it_is() -> None:
    def fetch(key: str) -> torch.Tensor:
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match=r"^damaged$"):
        decode([{"$tensor": "a"}], fetch)
