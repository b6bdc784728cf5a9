"""Judge whether ``initialize()`` takes a configuration: one answer, for it and for ``zeroshard
config explain``.

    each key . all options together . the batch sizes . the optimizer . the schedule . what watches

A refusal is a finding, as those of ``zeroshard.read_deepspeed()`` are. Optimizer and schedule are
made, and take a step, on trial: over a layer of two by two. Cost: some milliseconds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.deepspeed.answers import as_config_error, complete_batch
from zeroshard.deepspeed.keys.table import key_of
from zeroshard.deepspeed.lr_schedules import make_schedule
from zeroshard.deepspeed.optimizers import make_optimizer

Check = Callable[[nn.Module, torch.optim.Optimizer], None]
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# values in the place of "auto" for parameters that a schedule cannot do without
_FILLED = {"total_num_steps": 100, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
_MADE = "initialize() makes it; shard() and ZeroTrainer take the object that they are given"


def findings(file: zs.DeepSpeedFile, check: Check) -> list[zs.Finding]:
    """Return what each key does in ``initialize()`` on some number of ranks, where "auto" was
    filled in. `check` raises ConfigError for an optimizer that cannot be sharded.
    """
    judge = _Judge(file, filled=True)
    judge.options(None)
    judge.optimizer(check)
    judge.schedule()
    judge.watched()
    return judge.findings


def accepted(
    file: zs.DeepSpeedFile, ranks: int, given: Collection[str], tell: Callable[[int, str], None]
) -> zs.Config:
    """Return zeroshard's part of the configuration. Raises ConfigError with every refusal, one a
    line. Sections that are `given` as objects are not looked at. `tell` takes a level of logging
    and a line for each key that is none of DeepSpeed's, or for which nothing is written.
    """
    judge = _Judge(file, filled=False)
    judge.options(ranks)
    judge.watched()
    if "optimizer" not in given:
        judge.optimizer(lambda model, optimizer: None)  # shard() checks the real one
    if "scheduler" not in given:
        judge.schedule()
    judged = replace(file, findings=tuple(judge.findings))
    judged.checked_fields()
    for line in judged.unknown():
        tell(logging.WARNING, line)
    for one in judged.findings:
        if (key := key_of(one.key)) and key.watches_in_vain(one.value):
            tell(logging.INFO, f"{one.key}: nothing is written for it here; {key.why}")
    return file.config()


def section(
    data: dict[str, Any], name: str, *, filled: bool = False
) -> tuple[str, dict[str, Any]] | None:
    """Return the type and the parameters of ``optimizer`` or ``scheduler``, without those that are
    "auto", or with a value in their place where they are said to be `filled` in.
    """
    found = data.get(name)
    if not found:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise zs.ConfigError(f"the section {name!r} needs a type: {found!r}")
    params = found.get("params") or {}
    if not isinstance(params, dict):
        raise zs.ConfigError(f"{name}.params={params!r} is not an object")
    stand_ins = _FILLED if filled else {}
    return found["type"], {
        key: stand_ins[key] if value == "auto" else value
        for key, value in params.items()
        if value != "auto" or key in stand_ins
    }


def try_schedule(kind: str, params: dict[str, Any], groups: int) -> None:
    """Make a schedule over an optimizer with `groups` param groups, and step it. Raises
    ConfigError.
    """
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    with as_config_error(f"scheduler.params of {kind}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: no optimizer steps here
        schedule = make_schedule(kind, params, torch.optim.Adam(parameters, lr=0.1))
        for iteration in (0, 1, 10, 10**6):
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(1.0)  # the training gives it: engine.step(lr_kwargs={"metrics": ...})
            elif isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
                schedule.step()
            else:
                schedule.step(iteration)


class _Judge:
    """One configuration's findings, to which refusals are added."""

    def __init__(self, file: zs.DeepSpeedFile, *, filled: bool) -> None:
        self.findings = list(file.findings)
        self._file = file
        self._filled = filled

    def options(self, ranks: int | None) -> None:
        """Judge the options together, and the batch sizes: over `ranks`, or over some number."""
        if self._file.refusals():
            return
        with self._refusing(""):
            settings = self._file.config()
            settings.refuse_unsupported()
        if any(one.verdict == "refused" for one in self.findings):
            return
        sizes = [self._file.data.get(name) for name in _SIZES]
        if self._filled and "auto" in sizes and not any(isinstance(one, int) for one in sizes):
            return
        with self._refusing(_SIZES[0]):
            complete_batch(settings, _ranks_for(settings) if ranks is None else ranks)

    def optimizer(self, check: Check) -> None:
        """Judge the section ``optimizer``."""

        def make(kind: str, params: dict[str, Any]) -> str:
            device = torch.accelerator.current_accelerator(check_available=True)
            # zeros: an initialised layer would draw from the script's random numbers
            zeros = [torch.zeros(shape, device=device or "cpu") for shape in [(2, 2), (2,)]]
            model = nn.ParameterList(zeros)
            optimizer = make_optimizer(kind, params, list(model.parameters()))
            check(model, optimizer)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with as_config_error(f"optimizer.params of {kind}"):
                optimizer.step(lambda: 0.0)
            return f"{type(optimizer).__module__}.{type(optimizer).__name__}"

        self._make("optimizer", make)

    def schedule(self) -> None:
        """Judge the section ``scheduler``, for as many param groups as it has rates."""

        def make(kind: str, params: dict[str, Any]) -> str:
            lists = [len(one) for one in params.values() if isinstance(one, list)]
            try_schedule(kind, params, groups=max([*lists, 1]))
            return kind

        self._make("scheduler", make)

    def watched(self) -> None:
        """Say what is written for keys that only watch."""
        for place, one in enumerate(self.findings):
            key = key_of(one.key)
            plain = (one.verdict, one.source) == ("ignored", "file")
            if key is not None and key.done and plain and key.is_on(one.value):
                self.findings[place] = replace(one, verdict="honoured", why=key.done)

    def _make(self, name: str, make: Callable[[str, dict[str, Any]], str]) -> None:
        """Say that a section is honoured, and what `make` makes of it."""
        with self._refusing(f"{name}.type"):
            found = section(self._file.data, name, filled=self._filled)
            made = "" if found is None else make(*found)
            for place, one in enumerate(self.findings):
                if found and one.key.startswith(f"{name}.") and one.verdict == "ignored":
                    changes = {"becomes": made if one.key == f"{name}.type" else "", "why": _MADE}
                    self.findings[place] = replace(one, verdict="honoured", **changes)

    @contextmanager
    def _refusing(self, key: str) -> Iterator[None]:
        """Turn a ConfigError into a finding of `key`, or of all keys together."""
        try:
            yield
        except zs.ConfigError as error:
            place = next((n for n, one in enumerate(self.findings) if one.key == key), None)
            if place is None:
                self.findings.append(zs.Finding("", None, "file", "refused", "", str(error)))
            elif self.findings[place].verdict != "refused":
                one = self.findings[place]
                why = str(error).removeprefix(f"{key}={one.value!r} ")
                self.findings[place] = replace(one, verdict="refused", becomes="", why=why)


def _ranks_for(settings: zs.Config) -> int:
    """Return a number of ranks on which the batch sizes hold, if there is one."""
    train, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    if (leaves := settings.leaves_of(1)) is not None:
        return max(1, leaves[0] // (settings.gradient_accumulation_steps or leaves[0]))
    if train is None or micro is None:
        return 1
    return max(1, train // (micro * (settings.gradient_accumulation_steps or 1)))
