"""State dictionaries (of schedulers, data loaders, users) as JSON and tensors, without pickle.

JSON's own values stand for themselves. An object with one key that begins with ``$`` stands for::

    {"$tensor": key}  {"$array": key}     a tensor (numpy array) stored under `key`
    {"$scalar": ["float32", 3.0]}         a tensor of no dimensions
    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}
    {"$dict": [[key, value], ...]}        where keys are not plain text
    {"$float": "nan"}  {"$bytes": base64}  {"$complex": [re, im]}  {"$dtype": "float32"}
    {"$subclass": [class, tensors, context, shape, stride]}
                                          a tensor that wraps others, by its __tensor_flatten__()

Invariant: ``decode(encode(x)) == x``, types included, except that a subclass of a plain type
becomes that type (OrderedDict, namedtuple, IntEnum, nn.Parameter), bytearray bytes, and a numpy
scalar Python's number. Anything else is refused with its path.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard.errors import CheckpointError

_MAX_DEPTH = 100
_MAX_INT_BITS = 8192  # Python reads no number of more than 4300 digits
_TAGS: dict[Any, str] = {list: "", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
# not str(): an Enum has its own
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
Store = Callable[[str, torch.Tensor], str]


def encode(value: Any, path: str, store: Store) -> Any:
    """Return `value` as JSON; `store(path, tensor)` gives a tensor's key."""
    return _encode(value, path, store, 0)


def _encode(value: Any, path: str, store: Store, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{path} is nested more than {_MAX_DEPTH} deep")
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        raise CheckpointError(
            f"{path} is a number of {value.bit_length()} bits, and a checkpoint holds"
            f" {_MAX_INT_BITS}"
        )
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        require_dense(value, path)
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            inner = {name: getattr(value, name) for name in names}
            of_class = [inner, context, list(value.shape), list(value.stride())]
            encoded = [_encode(part, path, store, depth + 1) for part in of_class]
            return {"$subclass": [_full_name(type(value)), *encoded]}
        if value.dim() or value.is_complex():
            return {"$tensor": store(path, value)}
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$scalar": [dtype, _encode(value.item(), path, store, depth)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        is_number = value.dtype.kind in "biufc"
        if type(value) in (numpy.ndarray, numpy.memmap) and is_number:
            return {"$array": store(path, _from_numpy(value, path))}
        if isinstance(value, numpy.generic) and is_number:
            number = value.item()
            if not isinstance(number, numpy.generic):  # longdouble
                return _encode(number, path, store, depth)
    if isinstance(value, dict):
        return _encode_dict(value, path, store, depth)
    for kind, tag in _TAGS.items():
        if isinstance(value, kind):
            items = enumerate(sorted(value, key=repr) if kind in (set, frozenset) else value)
            out = [_encode(item, f"{path}[{index}]", store, depth + 1) for index, item in items]
            return {tag: out} if tag else out
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        parts = (value.real, value.imag)
        return {"$complex": [_encode(part, path, store, depth + 1) for part in parts]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    for base, plain in _PLAIN.items():
        if isinstance(value, base):  # a subclass, an IntEnum say
            return _encode(plain(value), path, store, depth)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which has no form in a checkpoint: numbers, text,"
        " lists, dictionaries and tensors have"
    )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclass(name: str) -> Any:
    """Return the subclass of torch.Tensor of that full name, which this program has imported:
    nothing is imported because a checkpoint names it.
    """
    todo = [torch.Tensor]
    while todo:
        kind = todo.pop()
        if _full_name(kind) == name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        todo += kind.__subclasses__()
    raise ValueError(f"a tensor is a {name}, a class that this program has not imported")


def no_tensors(path: str, tensor: torch.Tensor) -> str:
    """Raise CheckpointError: the `store` of values that hold no tensors."""
    raise CheckpointError(
        f"{path} is a tensor of shape {list(tensor.shape)}, which has no place in a checkpoint"
    )


def require_dense(tensor: torch.Tensor, path: str) -> None:
    """Raise CheckpointError naming `path` for a tensor without plain memory."""
    kinds = {"quantized": tensor.is_quantized, "meta": tensor.is_meta, "nested": tensor.is_nested}
    what = next((kind for kind, is_so in kinds.items() if is_so), str(tensor.layout))
    if what != str(torch.strided):
        raise CheckpointError(f"{path} is a {what} tensor, which has no form in a checkpoint")


def _from_numpy(array: Any, path: str) -> torch.Tensor:
    """Return a tensor of the same numbers, which torch can hold in native byte order only."""
    # a copy: torch warns of arrays that may not be written
    native = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise CheckpointError(
            f"{path} is an array of {array.dtype}, which has no form in a checkpoint"
        ) from None


def _encode_dict(value: dict[Any, Any], path: str, store: Store, depth: int) -> Any:
    depth += 1
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}.{key}", store, depth) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        encoded_key = _encode(key, f"{path} (a key)", store, depth)
        pairs.append([encoded_key, _encode(item, f"{path}[{key!r}]", store, depth)])
    return {"$dict": pairs}


def common_part(
    values: Sequence[Any], path: str, identity: Callable[[int, Any], str]
) -> tuple[Any, list[str]]:
    """Return the part that all `values`, encoded, hold alike, and the paths of what differs there.

    Dictionaries are compared by entry, everything else as a whole: by its ``identity(index,
    value)``. Where nothing is alike the part is None, and `path` the only one.
    """
    if not all(isinstance(value, dict) and not _is_tagged(value) for value in values):
        is_one = len({identity(index, value) for index, value in enumerate(values)}) == 1
        return (values[0], []) if is_one else (None, [path])
    found: dict[str, Any] = {}
    differing: list[str] = []
    for key in dict.fromkeys(key for value in values for key in value):
        inside = f"{path}[{key!r}]"
        if not all(key in value for value in values):
            differing.append(inside)
            continue
        part, paths = common_part([value[key] for value in values], inside, identity)
        differing += paths
        if paths != [inside]:
            found[key] = part
    return found, differing


def _is_tagged(value: dict[str, Any]) -> bool:
    """Whether an encoded dictionary stands for another object."""
    return len(value) == 1 and next(iter(value)).startswith("$")


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """Return what `encode` was given; `fetch(key)` returns a tensor. Raises ValueError."""
    try:
        return _decode(value, fetch, 0)
    except CheckpointError:  # of fetch
        raise
    except (
        AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError
    ) as error:  # fmt: skip
        raise ValueError(f"a value has no meaning: {type(error).__name__}: {error}") from error


def _decode(value: Any, fetch: Callable[[str], torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH + 2:  # two more than encode goes: a number has a form of its own
        raise ValueError("values are nested too deep")

    def inner(item: Any) -> Any:
        return _decode(item, fetch, depth + 1)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: inner(item) for key, item in value.items()}
    tag, body = next(iter(value.items()))
    if tag in ("$tensor", "$array"):
        tensor = fetch(body)
        return tensor if tag == "$tensor" else tensor.numpy()
    for kind, known in _TAGS.items():
        if tag == known:
            return kind(inner(item) for item in body)
    if tag == "$subclass":
        tensors, context, shape, stride = (inner(item) for item in body[1:])
        return _subclass(body[0]).__tensor_unflatten__(tensors, context, shape, stride)
    if tag == "$scalar":
        return torch.tensor(inner(body[1]), dtype=inner({"$dtype": body[0]}))
    if tag == "$dict":
        return {inner(key): inner(item) for key, item in body}
    if tag == "$float":
        return float(body)
    if tag == "$bytes":
        return base64.b64decode(body, validate=True)
    if tag == "$complex":
        return complex(*(inner(part) for part in body))
    if tag == "$dtype" and isinstance(getattr(torch, body, None), torch.dtype):
        return getattr(torch, body)
    raise ValueError(f"a value has the unknown form {tag}")
