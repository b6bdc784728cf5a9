"""Checkpoints and whole weights under DeepSpeed's calls.

    save_dir/latest                                the newest tag
    save_dir/zero_to_fp32.py                       writes whole weights of it: fp32_weights.py
    save_dir/global_step8/step-0000000008/...      zeroshard's checkpoint (zs.save), which loads on
                                                   any number of ranks and any stage
    save_dir/global_step8/saved_step               8: the step that is the tag's

Invariants: ``latest`` names a tag only once its checkpoint is complete. A tag is one name: nothing
outside of ``save_dir`` is written, removed or, by ``latest``, read. Of a tag's directory only the
step that was the tag's before is removed. Rank 0 reads and writes these files, and its errors are
raised on every rank. Frozen parameters are always in a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from zeroshard.deepspeed.answers import Batch, Progress
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.system.safe_files import replacing

_LATEST, _STEP = "latest", "saved_step"
_SCRIPT = '''#!/usr/bin/env python
"""Write the whole fp32 weights of this checkpoint: python zero_to_fp32.py . OUTPUT_DIR"""

from zeroshard.deepspeed.fp32_weights import main

if __name__ == "__main__":
    main()
'''
_MOST_BYTES = 4096  # of a file that holds a name


class TaggedCheckpoints:
    """Saving and loading of an engine."""

    engine: zs.Engine
    optimizer: Any
    lr_scheduler: Any
    progress: Progress
    batch: Batch

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything under ``save_dir/tag`` (default: ``global_stepN``). Collective.

        `client_state` is numbers, text, lists, dictionaries and tensors. Frozen parameters are
        saved also with `exclude_frozen_parameters`: a checkpoint here is always whole. Between
        boundaries, too: this run goes on with its gradients, one that loads begins the step anew.
        """
        if not save_dir:
            raise zs.ConfigError(f"save_dir={save_dir!r} names no directory")
        tag = f"global_step{self.progress.global_steps}" if tag is None else str(tag)
        directories = self._check_tag(tag, Path(save_dir))
        directory = Path(save_dir) / tag
        extra = {"client_state": dict(client_state or {}), "progress": self.progress.counts()}
        step = self.progress.global_steps
        try:
            path = zs.save(
                directory, self.engine, step=step, states=self._states(), extra=extra,
                drop_gradients=True,
            )  # fmt: skip
        except zs.CheckpointError as error:
            if len(directories) == 1:
                raise
            raise zs.CheckpointError(
                f"the ranks name different directories: {', '.join(sorted(directories))}; give"
                f" save_checkpoint() one, from rank 0's clock, on every rank ({error})"
            ) from None

        def finish() -> None:
            before = None
            with suppress(zs.CheckpointError):
                before = _saved_step(directory)
            _write_name(directory / _STEP, str(step))
            if before not in (None, step):
                older = path.with_name(f"step-{before:010d}")
                hidden = path.with_name(f".removing-{older.name}")  # the next save removes it
                with suppress(OSError):
                    older.rename(hidden)
                    shutil.rmtree(hidden, ignore_errors=True)
            if not (script := Path(save_dir) / "zero_to_fp32.py").exists():
                _write_name(script, _SCRIPT)
                mode = script.stat().st_mode
                script.chmod(mode | (mode & 0o444) >> 2)  # whoever reads it may run it
            if save_latest:
                _write_name(Path(save_dir) / _LATEST, tag)

        self._on_rank_0("save_checkpoint()", finish)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` wrote; return its path and the client state, or (None, None)
        where `load_dir` has no ``latest``. Collective.

        Raises CheckpointError, and ConfigError for `custom_load_fn` and a `tag` that is no name.
        """
        if custom_load_fn is not None:
            raise zs.ConfigError("custom_load_fn: weights are read in shards; load them before")
        tag = None if tag is None else str(tag)
        self._check_tag(tag, Path(load_dir))
        found = self._on_rank_0("load_checkpoint()", lambda: _found(Path(load_dir), tag))
        if found is None:
            _log.warning("%s has no file %r: nothing is loaded", load_dir, _LATEST)
            return None, None
        directory, step = Path(load_dir) / found[0], found[1]
        states = self._states() if load_lr_scheduler_states and not load_module_only else {}
        with_optimizer = load_optimizer_states and not load_module_only
        keeps = self.optimizer is not None and not with_optimizer
        before = self.optimizer.state_dict() if keeps else None
        strict = load_module_strict and not keeps
        # a script's own seed decides what it draws afterwards: it may skip the batches it has seen
        restored = zs.load(
            directory, self.engine, step=step, states=states, strict=strict, generators=False
        )
        if before is not None:
            self.optimizer.load_state_dict(before)
        misfits = [line for line in restored.skipped if line.startswith("parameter ")]
        if load_module_strict and misfits:
            raise zs.CheckpointError("; ".join(misfits))
        extra = restored.extra or {}
        if not load_module_only:
            vars(self.progress).update(extra.get("progress", {}))
            # a checkpoint holds no gradient, so a step begins, of as many micro-batches as now
            self.progress.micro_steps = self.progress.global_steps * self.batch.steps
        return str(directory), extra.get("client_state", {})

    def _states(self) -> dict[str, Any]:
        return {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}

    def _check_tag(self, tag: str | None, directory: Path) -> set[str]:
        """Return the directories that the ranks name. Raise where they name different tags, or what
        is no name. Collective.
        """
        mine = json.dumps([tag, str(directory)]).encode()
        told = list(map(json.loads, self.engine.exchange(mine, "a checkpoint's tag")))
        tags = {json.dumps(one) for one, _ in told}
        if len(tags) > 1:
            raise zs.PlanMismatch(
                f"the ranks name different tags: {', '.join(sorted(tags))}; give save_checkpoint()"
                " and load_checkpoint() the same one on every rank, in every mode of"
                " checkpoint.tag_validation"
            )
        if tag is not None and not _is_name(tag):
            raise zs.ConfigError(
                f"tag={tag!r} is not the name of a directory inside of the checkpoint's: give one"
                f" name, without a slash or a dot in front, and not {_LATEST!r}"
            )
        return {one for _, one in told}

    def _on_rank_0(self, call: str, work: Callable[[], Any]) -> Any:
        """Return what `work` returns on rank 0, by way of JSON. Raises its error on every rank, as
        a CheckpointError. Collective.
        """
        told: dict[str, Any] = {}
        if self.engine.rank == 0:
            try:
                told["result"] = work()
            except OSError as error:
                told["error"] = f"{call}: {error.filename or ''}: {error.strerror or error}"
            except zs.CheckpointError as error:
                told["error"] = str(error)
            except Exception as error:  # torch's, of a disk that is full
                told["error"] = f"{call}: {type(error).__name__}: {error}"
        told = json.loads(self.engine.exchange(json.dumps(told).encode(), call)[0])
        if "error" in told:
            raise zs.CheckpointError(told["error"])
        return told["result"]

    # ------------------------------------------------------------------ whole weights

    def module_state_dict(self, **_: Any) -> dict[str, torch.Tensor]:
        """Return the whole state_dict on every rank, on CPU. Collective."""
        return self.engine.full_state_dict(rank0_only=False)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole state_dict on rank 0, None on the others. Collective."""
        state = self.engine.full_state_dict()
        for name, one in self.engine.module.named_parameters():
            if exclude_frozen_parameters and not one.requires_grad:
                state.pop(name, None)
        return state if self.engine.rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights in the dtype that computes, with torch.save. Collective."""
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            with (Path(save_dir) / save_filename).open("wb") as file:
                torch.save(state, file)

        self._on_rank_0("save_16bit_model()", write)
        return True

    save_fp16_model = save_16bit_model

    def _save_pretrained(
        self, save: Callable[..., Any], /, *args: Any, state_dict: Any = None, **options: Any
    ) -> Any:
        """Call the ``save_pretrained()`` of a module at stage 3, on rank 0, with its weights: those
        of an adapter (PEFT's) alone, which are trained, where it is one. Collective.
        """
        if state_dict is not None:
            return save(*args, state_dict=state_dict, **options)
        module = self.engine.module
        adapts = hasattr(module, "peft_config")
        state = self.engine.full_state_dict(trained=adapts)

        def write() -> None:
            rest = module.state_dict() if adapts else {}  # frozen weights, without numbers
            save(*args, state_dict={**rest, **state}, **options)

        self._on_rank_0("save_pretrained()", write)
        return None


def _is_name(tag: str) -> bool:
    """Whether `tag` is one visible name, and not the name of the file beside it."""
    plain = re.fullmatch(r"[^./][^/]*", tag) is not None and tag.isprintable()
    return plain and tag != _LATEST and len(os.fsencode(tag)) <= 255


def _found(load_dir: Path, tag: str | None) -> tuple[str, int | None] | None:
    """Return the tag to load, ``latest``'s if it is None, and the tag's step where that is known;
    None without ``latest``. Raises CheckpointError.
    """
    if tag is None and (tag := _latest_tag(load_dir)) is None:
        return None
    directory = load_dir / tag
    if any(directory.glob("*_model_states.pt")):
        raise zs.CheckpointError(
            f"{directory} is a checkpoint that DeepSpeed wrote: make it one of zeroshard's with"
            f" `zeroshard checkpoint import {load_dir} OUT_DIR`, and load that with"
            " zeroshard.load()"
        )
    return tag, _saved_step(directory)


def _latest_tag(load_dir: Path) -> str | None:
    """Return what ``latest`` names, None without it. Raises CheckpointError."""
    tag = _read_name(load_dir / _LATEST)
    if tag is None:
        return None
    if not _is_name(tag) or (load_dir / tag).resolve().parent != load_dir.resolve():
        raise zs.CheckpointError(
            f"{load_dir / _LATEST} names {tag[:100]!r}, which is no directory beside it: give"
            " tag= the name of one"
        )
    return tag


def step_of(load_dir: Path, tag: str | None) -> Path | None:
    """Return the directory of the step that a tag of ours holds (None: the one that ``latest``
    names); None for a checkpoint that DeepSpeed wrote. Raises CheckpointError.
    """
    if tag is not None and not _is_name(tag):
        raise zs.ConfigError(f"tag={tag!r} is not the name of a directory")
    named = _latest_tag(load_dir) if tag is None else tag
    directory = load_dir if named is None else load_dir / named
    step = _saved_step(directory)
    return None if step is None else directory / f"step-{step:010d}"


def _saved_step(directory: Path) -> int | None:
    """Return the step that is the tag's, None where nothing says so. Raises CheckpointError."""
    text = _read_name(directory / _STEP)
    if text is not None and re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise zs.CheckpointError(f"{directory / _STEP} holds {text[:100]!r}, not a number of steps")
    return None if text is None else int(text)


def _read_name(path: Path) -> str | None:
    """Return what the file holds, None where it is missing. Raises CheckpointError for what is no
    small file of text.
    """
    try:
        # a pipe opens at once so, and is told by its kind
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        content = file.read(_MOST_BYTES + 1) if regular else b""
    try:
        if regular and len(content) <= _MOST_BYTES:
            return content.decode("utf-8").strip()
    except UnicodeDecodeError:
        pass
    raise zs.CheckpointError(f"{path} cannot be read: it is not a file that holds a name")


def _write_name(path: Path, text: str) -> None:
    """Write the file as a whole, or leave the one that is there; remove what a killed one left."""
    for left in path.parent.glob(f".{path.name}.????????????????"):
        with suppress(OSError):
            left.unlink()
    with replacing(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
