"""The contents of a step as plain values for a table or JSON, from its manifest. No torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.manifest import BUFFER, Manifest
from zeroshard.checkpoint.steps import MANIFEST, STEP_NAME


def is_step(path: Path) -> bool:
    """Return whether `path` is a step, and not a directory of steps."""
    return (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.resolve().name) is not None


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Return the content of `manifest`, without the list of its tensors."""
    parameters = manifest.parameters.values()
    return {
        "step": manifest.step,
        "world": manifest.world,
        "policy": manifest.policy,
        "precision": manifest.precision,
        "written_by": manifest.written_by,
        "bytes": manifest.total_bytes(),
        "parameters": {
            "count": len(manifest.parameters),
            "trained": sum(entry.trained for entry in parameters),
            "tied": sum(bool(entry.aliases) for entry in parameters),
            "elements": sum(entry.numel for entry in parameters),
        },
        "tensors": _tensors(manifest),
        "files": _files(manifest),
        "optimizer": _optimizer(manifest),
        "states": {
            name: "alike on all ranks" if "same" in state else "each rank its own"
            for name, state in manifest.states.items()
        },
    }


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    """Return number and bytes by kind and dtype, the largest first."""
    count: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for entry in manifest.tensors:
        kind = "buffer" if entry.kind.startswith(BUFFER) else "other"
        if entry.parameter is not None:
            kind = entry.kind
        count[kind, entry.dtype] += 1
        total[kind, entry.dtype] += entry.num_bytes
    return [
        {"kind": kind, "dtype": dtype, "tensors": count[kind, dtype], "bytes": size}
        for (kind, dtype), size in total.most_common()
    ]


def _files(manifest: Manifest) -> list[dict[str, Any]]:
    tensors = Counter(entry.file for entry in manifest.tensors)
    return [
        {"name": file.name, "bytes": file.bytes, "tensors": tensors[number]}
        for number, file in enumerate(manifest.files)
    ]


def _optimizer(manifest: Manifest) -> dict[str, Any] | None:
    if manifest.optimizer is None:
        return None
    groups = [
        {"parameters": len(group["params"]), "options": _plain(group["options"])}
        for group in manifest.optimizer["groups"]
    ]
    return {"class": manifest.optimizer["class"], "groups": groups}


def _plain(value: Any) -> Any:
    """Return an encoded value (values.py) without its tags; a tuple becomes a list."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("$"):
        return _plain(value[tag][1] if tag == "$scalar" else value[tag])
    return {key: _plain(item) for key, item in value.items()}
