"""State dictionaries as JSON and tensors, and back: what a scheduler, a data loader or a user keeps, without pickle.

JSON's own values stand for themselves. An object with one key that begins with ``$`` stands for what JSON lacks::

    {"$tensor": key}  {"$array": key}     a tensor (numpy array) stored under `key`
    {"$scalar": ["float32", 3.0]}         a tensor of no dimensions
    {"$tuple": [...]}  {"$set": [...]}    {"$dict": [[key, value], ...]} where keys are not plain text
    {"$float": "nan"}  {"$bytes": base64}  {"$complex": [re, im]}  {"$dtype": "float32"}

Invariant: ``decode(encode(x)) == x``, types included (subclasses of dict and tuple become dict and tuple); anything else is refused with its
path, before a byte is written.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from zeroshard.errors import CheckpointError

__all__ = ["decode", "encode"]

_MAX_DEPTH = 100


def encode(value: Any, path: str, store: Callable[[str, torch.Tensor], str]) -> Any:
    """Return `value` as JSON; `store(path, tensor)` keeps a tensor and returns its key. Raises CheckpointError naming the path of what has no form."""
    return _encode(value, path, store, 0)


def _encode(value: Any, path: str, store: Callable[[str, torch.Tensor], str], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{path} is nested more than {_MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(f"{path} is a {value.layout} tensor, which has no form in a checkpoint")
        if value.dim() == 0 and not value.is_complex():
            return {"$scalar": [str(value.dtype).removeprefix("torch."), _encode(value.item(), path, store, depth)]}
        return {"$tensor": store(path, value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": store(path, torch.from_numpy(numpy.ascontiguousarray(value)).reshape(value.shape))}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return _encode(value.item(), path, store, depth)
    if isinstance(value, dict):
        return _encode_dict(value, path, store, depth)
    for kind, tag in ((list, ""), (tuple, "$tuple"), (set, "$set"), (frozenset, "$set")):
        if isinstance(value, kind):
            items = sorted(value, key=repr) if tag == "$set" else value
            out = [_encode(item, f"{path}[{index}]", store, depth + 1) for index, item in enumerate(items)]
            return {tag: out} if tag else out
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [_encode(part, path, store, depth + 1) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bool | int | float | str):  # a subclass, an IntEnum say
        return _encode(next(kind for kind in (int, float, str) if isinstance(value, kind))(value), path, store, depth)
    raise CheckpointError(f"{path} is a {type(value).__name__}, which has no form in a checkpoint: numbers, text, lists, dictionaries and tensors have")


def _encode_dict(value: dict[Any, Any], path: str, store: Callable[[str, torch.Tensor], str], depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}.{key}", store, depth + 1) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{path} (a key)", store, depth + 1), _encode(item, f"{path}[{key!r}]", store, depth + 1)] for key, item in value.items()
    ]
    return {"$dict": pairs}


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """Return what `encode` was given; `fetch(key)` brings a tensor. Raises ValueError for a form that does not exist."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: decode(item, fetch) for key, item in value.items()}
    body = value[tag]
    if tag in ("$tensor", "$array"):
        tensor = fetch(body)
        return tensor if tag == "$tensor" else tensor.numpy()
    if tag in ("$tuple", "$set"):
        items = [decode(item, fetch) for item in body]
        return tuple(items) if tag == "$tuple" else set(items)
    if tag == "$scalar":
        return torch.tensor(decode(body[1], fetch), dtype=decode({"$dtype": body[0]}, fetch))
    if tag == "$dict":
        return {decode(key, fetch): decode(item, fetch) for key, item in body}
    if tag == "$float":
        return float(body)
    if tag == "$bytes":
        return base64.b64decode(body)
    if tag == "$complex":
        return complex(*(decode(part, fetch) for part in body))
    if tag == "$dtype" and isinstance(getattr(torch, body, None), torch.dtype):
        return getattr(torch, body)
    raise ValueError(f"a value has the unknown form {tag}")
