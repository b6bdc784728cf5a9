"""Faults (F15) of the tiers: a disk or a host that fails on one rank is one StorageError on
every rank, and never a step that is half taken in silence.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
import zeroshard.tier.disk as disk_tier
from tests.support import inside
from tests.support.broken_storage import Broken, patched
from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from tests.support.launched import PATHS
from tests.support.training import (
    TRANSPORTS,
    Net,
    Run,
    batch,
    logged,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard import CheckpointError, StateError, StorageError
from zeroshard.runtime.engine import states_of

CUT, STEPS = 1, 4  # where the checkpoint is, and the steps of a whole run

# ----------------------------------------------------------------------------------------- one case


@dataclass(frozen=True)
class Case:
    """One fault: which operation on which state fails, from when on, and where every rank hears
    of it.
    """

    # "read", "write" (EIO), "create" (ENOSPC), "host" (no memory); "cut", "alter", "delete": what
    # happens to the file
    verb: str
    key: str
    since: str  # "forward", "backward", "clip", "step": armed just before this
    # which call raises StorageError: "forward", "second forward", "backward", "clip", "step", "next
    # forward", "next step"; "": none
    told: str
    lost: bool  # what rests is lost: only a checkpoint helps
    row: str = "zero3"
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    no_sync: bool = False
    fresh: bool = False  # at the first step, before there are gradients and moments at rest

    @property
    def clips(self) -> bool:
        return "clip" in (self.since, self.told)

    def offload(self, path: Path | str) -> zs.Offload:
        disk = "disk" in self.options.values()
        return zs.Offload(**self.options, **({"disk_path": str(path)} if disk else {}))

    @property
    def exact(self) -> bool:
        """Whether the device's bits are to be expected: not those of a late update."""
        return "delayed_update" not in self.options


DISK = {"weight": "disk", "grad": "disk", "optimizer": "disk"}


def _case(line: str, **options: Any) -> Case:
    """`line`: verb and key, since when, what is told, and whether what rests is lost."""
    what, since, told, *lost = line.split(" | ")
    own = {name: options.pop(name) for name in {*options} & {*Case.__dataclass_fields__}}
    return Case(*what.split(" ", 1), since, told, bool(lost), options=options, **own)


CASES = {
    # (a) weights in forward, (b) in backward
    "weights in forward": _case("read blocks.1_fp32_weights | forward | forward", weight="disk"),
    "weights in backward": _case("read blocks.1_fp32_weights | backward | step", **DISK),
    "weights in backward, clipped": _case(
        "read blocks.0_fp32_weights | backward | clip", weight="disk"
    ),
    "weights in backward, accumulating": _case(
        "read blocks.1_fp32_weights | backward | second forward",
        **DISK,
        micro_batches=2,
        no_sync=True,
    ),
    # (c) gradients in backward, and after it
    "gradient written": _case("write blocks.2_fp32_gradient | backward | step", grad="disk"),
    "gradient written, accumulating": _case(
        "write blocks.2_fp32_gradient | backward | step", row="zero2", grad="disk", micro_batches=2
    ),
    "gradient read for the norm": _case(
        "read blocks.2_fp32_gradient | clip | clip", row="zero2", grad="disk"
    ),
    "gradient gathered": _case(
        "host blocks.2:fp32 gradient | backward | step", row="ddp", grad="host", fresh=True
    ),
    # (d) the step's read, (e) its write: streamed, in place, late, by two threads
    "moment read": _case("read blocks.1_fp32_exp_avg. | step | step | lost", optimizer="disk"),
    "master read": _case(
        "read blocks.3_fp32_master | step | step | lost", row="zero1", optimizer="disk"
    ),
    "gradient read": _case(
        "read blocks.2_fp32_gradient | step | step | lost", grad="disk", optimizer="host"
    ),
    "moment written": _case(
        "write blocks.1_fp32_exp_avg_sq | step | step | lost", optimizer="disk"
    ),
    "master written": _case("write blocks.1_fp32_weights | step | step | lost", **DISK),
    "weights written": _case(
        "write blocks.1_fp32_weights | step | step | lost", weight="disk", optimizer="host"
    ),
    "late, read": _case(
        "read blocks.1_fp32_exp_avg. | step | next step | lost",
        row="zero2",
        optimizer="disk",
        delayed_update=0,
    ),
    "late, written": _case(
        "write blocks.1_fp32_exp_avg. | step | next step | lost", optimizer="disk", delayed_update=1
    ),
    "two threads, read": _case(
        "read fp32_exp_avg. | step | step | lost", row="zero2", optimizer="disk", fraction=0.5
    ),
    "two threads, written": _case(
        "write fp32_exp_avg. | step | step | lost", optimizer="disk", fraction=0.5
    ),
    # what happens to files
    "file cut off": _case("cut blocks.1_fp32_exp_avg. | step | step | lost", optimizer="disk"),
    "weights cut off": _case("cut blocks.1_fp32_weights | forward | forward", weight="disk"),
    "file altered": _case(
        "alter blocks.1_fp32_master | step | step | lost",
        row="zero2",
        optimizer="disk",
        verify=True,
    ),
    "file deleted": Case(
        "delete", "blocks.1_fp32_master", "step", "", False, options={"optimizer": "disk"}
    ),
    # no space, no memory
    "disk full for moments": _case(
        "create blocks.1:fp32 exp_avg | step | step | lost", optimizer="disk", fresh=True
    ),
    "disk full for gradients": _case(
        "create blocks.1:fp32 gradient | backward | step", grad="disk", fresh=True
    ),
    "no host memory for moments": _case(
        "host blocks.1:fp32 exp_avg | step | step | lost", row="zero1", optimizer="host", fresh=True
    ),
    "no host memory for gradients": _case(
        "host blocks.1:fp32 gradient | backward | step", grad="host", fresh=True
    ),
    "no host memory for partial sums": _case(
        "host blocks.1:fp32 partial | backward | step",
        row="zero1",
        grad="host",
        micro_batches=2,
        no_sync=True,
        fresh=True,
    ),
}
ALONE = [  # in a world of one, where the streamed step goes on into the next forward
    "weights in forward", "weights in backward", "gradient written", "late, written",
    "two threads, read", "disk full for gradients",
]  # fmt: skip


class Training:
    """A run whose steps may be refused."""

    def __init__(self, rank: int, case: Case, path: Path | str, transport: str) -> None:
        self.rank, self.case = rank, case
        self.model: Net = make_model()
        self.optimizer = two_groups(self.model)
        self.engine = zs.shard(
            self.model,
            self.optimizer,
            policy=case.row,
            offload=case.offload(path),
            comm=zs.Comm(transport=transport),
        )
        self.losses: dict[int, list[float]] = {}

    def step(self, step: int, arm: Callable[[str], None] = lambda what: None) -> None:
        """Take a step; `arm` is called before each part of it."""
        case, losses = self.case, []
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with self.engine.no_sync() if case.no_sync and not last else contextlib.nullcontext():
                arm("second forward" if micro else "forward")
                loss = self.model(*batch(self.rank, step * case.micro_batches + micro))
                losses.append(loss.item())
                arm("backward")
                self.engine.backward(loss)
        if case.clips:
            arm("clip")
            self.engine.clip_grad_norm_(0.1)
        arm("step")
        self.optimizer.step()
        arm("zero_grad")
        self.optimizer.zero_grad()
        self.losses[step] = losses


_references: dict[str, Run] = {}


def _reference(rank: int, world: int, case: Case, folder: Path) -> tuple[Run, Path]:
    """Train without a fault; leave a checkpoint of step CUT. The same bits whatever the tiers,
    but for late updates.
    """
    options = {} if case.exact else case.options
    name = (
        f"{world} {case.row} {case.micro_batches} {case.no_sync} {case.clips}"
        f" {sorted(options.items())}"
    )
    place = folder / hashlib.sha1(name.encode()).hexdigest()
    if name in _references:
        return _references[name], place
    place.mkdir(exist_ok=True)
    training = Training(rank, replace(case, options=options), str(place), "auto")
    for step in range(STEPS):
        if step == CUT:
            zs.save(place, training.engine, step=CUT)
        training.step(step)
    states_of(training.engine).finish_step()
    run = Run(
        [loss for losses in training.losses.values() for loss in losses],
        training.engine.full_state_dict(rank0_only=False),
    )
    training.engine.close()
    _references[name] = run
    return run, place


def _tamper(case: Case, engine: zs.Engine) -> None:
    """Cut, alter or delete the file of a state."""
    (store,) = inside.stores(engine).values()
    name = next(name for name in sorted(os.listdir(store.path)) if case.key in name)
    path = store.path / name
    if case.verb == "cut":
        os.truncate(path, 512)
    elif case.verb == "delete":
        os.unlink(path)
    else:
        with open(path, "r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 8)


@dataclass
class Seen:
    """What one rank saw."""

    told: str = ""  # in which part of the step
    error: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def _fault(
    rank: int, world: int, name: str, culprit: int, transport: str, swap: str, checkpoints: Path
) -> Seen:
    """Train; meet the fault at step CUT; recover; end with the bits of a run without it."""
    case, seen = CASES[name], Seen()
    expected, folder = _reference(rank, world, case, checkpoints)
    threads = {thread.ident for thread in threading.enumerate()}
    training = Training(rank, case, swap, transport)
    engine = training.engine
    if not case.fresh:
        for step in range(CUT):
            training.step(step)
        if not case.exact:
            states_of(engine).finish_step()  # as the save of the reference did
    broken = Broken(case.verb, case.key)
    first = 0 if case.fresh else CUT
    with (
        broken.installed()
        if case.verb in ("read", "write", "create", "host")
        else contextlib.nullcontext()
    ):
        _meet(training, case, broken, first, seen, rank == culprit)
        if case.told:
            _recover(training, case, broken, first, folder, seen)
    for step in range(
        CUT if case.fresh and case.lost else first if case.told else first + 1, STEPS
    ):
        training.step(step)
    losses = [
        loss
        for step in range(STEPS)
        for loss in training.losses.get(
            step, expected.losses[step * case.micro_batches :][: case.micro_batches]
        )
    ]
    states_of(engine).finish_step()
    seen.differs = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
    engine.close()
    deadline = time.monotonic() + 300
    while (
        left := [thread for thread in threading.enumerate() if thread.ident not in threads]
    ) and time.monotonic() < deadline:
        left[0].join(0.05)
    seen.threads = [thread.name for thread in left]
    seen.files = [entry for entry in os.listdir(swap) if f"-{rank}-{os.getpid()}-" in entry]
    return seen


def _meet(
    training: Training, case: Case, broken: Broken, first: int, seen: Seen, culprit: bool
) -> None:
    part = "forward"

    def arm(what: str) -> None:
        nonlocal part
        part = f"{prefix}{what}"
        if what == case.since and culprit and not broken.armed and not prefix:
            broken.armed = True
            if case.verb in ("cut", "alter", "delete"):
                _tamper(case, training.engine)

    prefix = ""
    try:
        training.step(first, arm)
        if case.told:
            prefix = "next "
            training.step(first + 1, arm)
    except StorageError as error:
        seen.told, seen.error = part, str(error)


def _recover(
    training: Training, case: Case, broken: Broken, first: int, folder: Path, seen: Seen
) -> None:
    """See what is refused, then repair the disk and go on."""
    engine = training.engine
    attempts: dict[str, Callable[[], Any]] = {
        "forward": lambda: training.model(*batch(training.rank, 0)),
        "step": training.optimizer.step,
    }
    if case.lost:
        attempts |= {
            "save": lambda: zs.save(folder, engine, step=99),
            "state dict": engine.full_state_dict,
        }
    for what, attempt in attempts.items():
        try:
            attempt()
            seen.refused[what] = ""
        except (StateError, CheckpointError) as error:
            seen.refused[what] = str(error)
    engine.reset()
    if case.lost:  # a reset alone is not enough
        with pytest.raises(StateError, match=r"zs\.load\(\)"):
            training.model(*batch(training.rank, 0))
    elif case.verb == "cut":  # what was read is gone for good
        with pytest.raises(StorageError, match="cut off"):
            training.model(*batch(training.rank, 0))
    broken.armed = False
    if case.lost or case.verb == "cut":
        zs.load(folder, engine)


def _check(name: str, culprit: int, results: list[Seen], path: str) -> None:
    case = CASES[name]
    state = case.key.rstrip(".").replace("_fp32_", ":fp32 ").removeprefix("fp32_")
    for rank, seen in enumerate(results):
        # alone, the streamed step goes on into the forward
        steps_on = len(results) == 1 and case.since == "step"
        assert seen.told == case.told or (
            steps_on and seen.told in ("next forward", "next step")
        ), (rank, seen)
        if case.told:
            assert state in seen.error, (rank, seen.error)
            assert case.verb == "host" or path in seen.error, (rank, seen.error)
            assert ("zs.load()" if case.lost else "engine.reset()") in seen.error, (
                rank,
                seen.error,
            )
            assert rank == culprit or seen.error.startswith(f"rank {culprit}: "), (rank, seen.error)
            for what, reason in seen.refused.items():
                assert ("zs.load()" if case.lost else "engine.reset()") in reason, (
                    rank,
                    what,
                    reason,
                )
        assert seen.differs == [], (rank, seen.differs)
        assert seen.threads == [], (rank, seen.threads)
        assert seen.files == [], (rank, seen.files)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs without faults leave theirs."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        # each fault over one of the two
        pytest.param(name, transport, marks=[pytest.mark.slow] * ((number + place) % 2))
        for number, name in enumerate(CASES)
        for place, transport in enumerate(TRANSPORTS)
    ],
)
def test_a_fault_of_one_rank_is_told_on_every_rank_and_training_recovers_bit_for_bit(
    name: str, transport: str, tmp_path: Path, checkpoints: Path
) -> None:
    culprit = len(name) % 2
    _check(
        name,
        culprit,
        run_ranks(2, _fault, name, culprit, transport, str(tmp_path), checkpoints, timeout=60),
        str(tmp_path),
    )


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_is_told_and_recovered_from_in_a_world_of_one(
    name: str, tmp_path: Path, checkpoints: Path
) -> None:
    _check(
        name,
        0,
        run_ranks(1, _fault, name, 0, "auto", str(tmp_path), checkpoints, timeout=60),
        str(tmp_path),
    )


# ------------------------------------------------------------------------------------------ shard()


def _at_shard(rank: int, world: int, transport: str, what: str, path: str) -> str:
    """Fail in shard() on rank 1 (alone: rank 0); return the error. The model can be sharded and
    trained afterwards.
    """
    model = make_model()
    optimizer = two_groups(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    culprit = rank == world - 1
    place = Path(path) / f"{what}-{rank}"
    broken = Broken("", "")
    if what == "file" and culprit:
        place.write_text("not a directory")
    elif what == "read-only" and culprit:
        place = Path("/proc/self/fdinfo")  # root may write everywhere else
    elif what != "missing" or not culprit:
        place.mkdir()
    if what == "full":
        broken = Broken("create", "blocks.2:fp32 weights")
    elif what == "initial write":
        broken = Broken("write", "blocks.2_fp32_weights")
    elif what == "moments":
        model(*batch(0, 0)).backward()
        optimizer.step()  # state from before the sharding is put to rest by shard()
        optimizer.zero_grad()
        broken = Broken("create", "blocks.2:fp32 exp_avg")
    offload = zs.Offload(weight="disk", optimizer="disk", disk_path=str(place))
    threads = set(threading.enumerate())
    broken.armed = culprit
    with (
        broken.installed() if broken.verb else contextlib.nullcontext(),
        pytest.raises(StorageError) as caught,
    ):
        zs.shard(
            model, optimizer, policy="zero3", offload=offload, comm=zs.Comm(transport=transport)
        )
    if place.is_dir() and what != "read-only":
        assert os.listdir(place) == []
    gc.collect()
    _joined(threads)
    if what == "initial write":  # too late: the weights were on their way
        return str(caught.value)
    if what != "moments":
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine = zs.shard(model, optimizer, policy="zero3", comm=zs.Comm(transport=transport))
    model(*batch(rank, 0)).backward()
    optimizer.step()
    engine.close()
    return str(caught.value)


def _joined(threads: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 300
    while (
        left := [thread for thread in threading.enumerate() if thread not in threads]
    ) and time.monotonic() < deadline:
        left[0].join(0.05)
    assert left == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "missing-1 does not exist: create it"),
        ("file", "file-1 is not a directory"),
        ("read-only", "no directory can be made there"),
        ("full", "blocks.2:fp32 weights: .*full-1.* free"),
        ("moments", "blocks.2:fp32 exp_avg: .*moments-1.* free"),
        ("initial write", "initial write-1.*blocks.2:fp32 weights: cannot write"),
    ],
)
def test_shard_is_refused_on_every_rank_and_leaves_the_model_as_it_was(
    what: str, words: str, transport: str, tmp_path: Path
) -> None:
    for error in run_ranks(2, _at_shard, transport, what, str(tmp_path), timeout=60):
        assert re.search(words, error), error
        assert "engine.reset()" not in error and "zs.load()" not in error, "there is no engine"


# ----------------------------------------------------------------------- a disk that is really full


FULL = """
import shutil, sys, torch
import zeroshard as zs
from pathlib import Path
from tests.support.training import (
    batch,
    make_model,
    two_groups,
)

disk, checkpoints = Path(sys.argv[1]), Path(sys.argv[2])
offload = zs.Offload(optimizer="disk", disk_path=str(disk))


def made():
    model = make_model(width=256, layers=2)
    optimizer = two_groups(model)
    return model, optimizer, zs.shard(model, optimizer, stage=2, offload=offload)


def step(made, number):
    made[0](*batch(0, number)).backward()
    made[1].step()
    made[1].zero_grad()


junk = disk / "junk"
junk.write_bytes(bytes(16 << 20))  # masters fit beside it, moments do not
full = made()
zs.save(checkpoints, full[2], step=0)
try:
    step(full, 0)
    full[2].full_state_dict()  # in one process the step goes on beside what follows: wait for it
    print("NOTHING RAISED")
except zs.StorageError as error:
    assert all(word in str(error) for word in ("exp_avg", str(disk), "free", "zs.load()")), error
try:
    step(full, 0)
    print("NOT REFUSED")
except zs.StateError as error:
    assert "zs.load()" in str(error), error
junk.unlink()
zs.load(checkpoints, full[2])
for number in range(3):
    step(full, number)
states = [full[2].full_state_dict()]
full[2].close()
again = made()
for number in range(3):
    step(again, number)
states.append(again[2].full_state_dict())
assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
again[2].close()
assert list(disk.iterdir()) == []
print("OK")
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_step_is_told_and_training_goes_on_once_there_is_space(
    tmp_path: Path,
) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("CANNOT MOUNT A SMALL tmpfs HERE (unshare -rm is refused)")
    disk, checkpoints, script = tmp_path / "disk", tmp_path / "checkpoints", tmp_path / "full.py"
    disk.mkdir()
    script.write_text(FULL)
    command = (
        f"mount -t tmpfs -o size=24m tmpfs {disk} && exec {sys.executable} {script} {disk}"
        f" {checkpoints}"
    )
    environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "OK\n", done.stdout + done.stderr


# -------------------------------------------------------------------- whole parameters, loads, join


def _whole(rank: int, world: int, transport: str, path: str) -> dict[str, str]:
    """Read and write whole parameters with a disk that fails on rank 1."""
    case = Case(
        "read",
        "blocks.1_fp32_weights",
        "",
        "",
        False,
        options={"weight": "disk", "grad": "disk", "optimizer": "host"},
    )
    training = Training(rank, case, path, transport)
    engine, model = training.engine, training.model
    training.step(0)
    folder = Path(path) / "checkpoints"
    zs.save(folder, engine, step=1)
    parameter = model.blocks[1].up.weight

    def writeback() -> None:
        with engine.gathered(parameter, writeback=True), torch.no_grad():
            parameter.zero_()

    def gradient() -> None:
        engine.full_grad(parameter)

    def load_model() -> None:
        model.load_state_dict(whole)

    whole = engine.full_state_dict(rank0_only=False)
    expected = whole["blocks.1.up.weight"]
    out = {}
    for name, verb, key, action in (
        ("full_state_dict", "read", "blocks.1_fp32_weights", lambda: engine.full_state_dict()),
        (
            "gathered",
            "read",
            "blocks.1_fp32_weights",
            lambda: engine.gathered(parameter).__enter__(),
        ),
        ("full_grad", "read", "blocks.1_fp32_gradient", gradient),
        ("writeback", "write", "blocks.1_fp32_weights", writeback),
        ("load_state_dict", "write", "blocks.1_fp32_weights", load_model),
        ("load", "write", "blocks.1_fp32_weights", lambda: zs.load(folder, engine)),
    ):
        if name == "full_grad":
            model(*batch(rank, 7)).backward()
        broken = Broken(verb, key)
        with broken.installed():
            broken.armed = rank == 1
            with pytest.raises(StorageError) as caught:
                action()
            out[name] = str(caught.value)
        if "zs.load()" in out[name]:
            zs.load(folder, engine)
        else:
            engine.reset()
        assert torch.equal(
            engine.full_state_dict(rank0_only=False)["blocks.1.up.weight"], expected
        ), name
    training.step(1)
    engine.close()
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reading_writing_and_loading_whole_parameters_fails_on_every_rank(
    transport: str, tmp_path: Path
) -> None:
    told = run_ranks(2, _whole, transport, str(tmp_path), timeout=60)
    for errors in told:
        for name, error in errors.items():
            state = "blocks.1:fp32 gradient" if name == "full_grad" else "blocks.1:fp32 weights"
            assert str(tmp_path) in error and state in error, (name, error)
            assert ("zs.load()" in error) == (name in ("writeback", "load_state_dict", "load")), (
                name,
                error,
            )


def _late_join(rank: int, world: int, path: str, key: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Rank 1's data ends first; while it shadows, rank 0's disk fails in a forward, or in a
    step.
    """
    model, optimizer, engine = make_sharded(
        offload=zs.Offload(weight="disk", optimizer="disk", disk_path=path)
    )
    broken, error = Broken("read", key), ""
    with broken.installed():
        try:
            with engine.join():
                for step in range(2 if rank else 3):
                    broken.armed = step == 2
                    take_steps(rank, [step], model, optimizer)
        except StorageError as caught:
            error = str(caught)
    engine.close()
    return error, {}


@pytest.mark.parametrize("key", ["blocks.1_fp32_weights", "blocks.1_fp32_exp_avg."])
def test_a_rank_that_shadows_the_others_in_join_hears_of_a_fault(key: str, tmp_path: Path) -> None:
    (first, _), (second, _) = run_ranks(2, _late_join, str(tmp_path), key, timeout=60)
    assert key.rstrip(".").replace("_fp32_", ":fp32 ") in first and second == f"rank 0: {first}"


# ---------------------------------------------------------------------------------- reset and close


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("key", "since"),
    [
        ("blocks.1_fp32_weights", "forward"),
        ("blocks.1_fp32_weights", "step"),
        ("blocks.1_fp32_exp_avg.", "step"),
    ],
)
@on_ranks(2, timeout=60)
def test_close_gives_everything_back_after_a_fault_and_says_what_is_lost(
    rank: int, key: str, since: str, transport: str, tmp_path: Path
) -> None:
    """Close at once after a fault, with a disk that still fails; look at the errors of the pass and
    of close(), what was logged, whether NaN came back.
    """
    case = Case("read", key, since, "", False, options=DISK)
    threads = set(threading.enumerate())
    training = Training(rank, case, tmp_path, transport)
    training.step(0)
    broken, seen, ended = Broken("read", key), Seen(), ""
    with logged() as records, broken.installed():
        _meet(training, case, broken, 1, seen, rank == 1)
        try:
            training.engine.close()
        except StorageError as error:
            ended = str(error)
    _joined(threads)
    assert not [name for name in os.listdir(tmp_path) if f"-{rank}-{os.getpid()}-" in name]
    assert type(training.model.blocks[1].up.weight) is torch.nn.Parameter
    training.optimizer.zero_grad()
    training.model(*batch(rank, 0)).backward()  # a plain module and a plain optimizer
    training.optimizer.step()
    nan = any(bool(parameter.isnan().any()) for parameter in training.model.parameters())
    given_back = [record for record in records if "given back" in record]
    assert key.rstrip(".").replace("_fp32_", ":fp32 ") in seen.error, rank
    lost = since == "step"
    assert bool(given_back) is lost, (rank, given_back)  # it was told before
    assert bool(ended) is not lost, (rank, ended)
    assert nan is ("weights" in key), rank  # what could not be read reads as NaN, on every rank


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, timeout=60)
def test_reset_waits_for_reads_that_are_under_way(
    rank: int, transport: str, tmp_path: Path
) -> None:
    """Leave a forward by an exception while slow reads are under way, and reset."""
    training = Training(rank, Case("", "", "", "", False, options=DISK), tmp_path, transport)
    reference = Training(rank, Case("", "", "", "", False), tmp_path, transport)
    for step in range(2):
        training.step(step)
        reference.step(step)
    real = disk_tier.read_blocks

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        real(*arguments)

    class Boom(Exception):
        pass

    def boom(*arguments: Any) -> None:
        raise Boom

    # while the next block is being read
    handle = training.model.blocks[1].register_forward_hook(boom)
    with patched(disk_tier, "read_blocks", slow), pytest.raises(Boom):
        training.model(*batch(rank, 9))
    handle.remove()
    training.engine.reset()
    # memory that a read would write to is somebody else's by now
    inside.drop_full_weights(training.engine)
    training.step(2)
    reference.step(2)
    runs = [Run([], t.engine.full_state_dict(rank0_only=False)) for t in (training, reference)]
    training.engine.close()
    reference.engine.close()
    found = runs[0].differs_from(runs[1])
    assert found == []


# ---------------------------------------------------------------------- killed runs, and neighbours


def _killed(rank: int, world: int, path: str) -> None:
    training = Training(rank, Case("", "", "", "", False, options=DISK), path, "shared_memory")
    for step in range(CUT):
        training.step(step)
    zs.save(Path(path) / "checkpoints", training.engine, step=CUT)
    training.step(CUT)
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank: int, world: int, path: str) -> tuple[list[str], list[str]]:
    found = _swaps(path)
    training = Training(rank, Case("", "", "", "", False, options=DISK), path, "shared_memory")
    neighbour = Training(
        rank,
        Case("", "", "", "", False, options={"weight": "disk", "optimizer": "disk"}),
        path,
        "shared_memory",
    )
    inside.exchange(training.engine, b"")
    left = [name for name in _swaps(path) if name in found]
    zs.load(Path(path) / "checkpoints", training.engine)
    reference = Training(rank, Case("", "", "", "", False), path, "shared_memory")
    for step in range(STEPS):
        reference.step(step)
        neighbour.step(step)
        if step >= CUT:
            training.step(step)
        if step == CUT:
            assert len(_swaps(path)) == 2 * world
    expected = reference.engine.full_state_dict(rank0_only=False)
    differs = []
    for run in (training, neighbour):
        differs += Run([], run.engine.full_state_dict(rank0_only=False)).differs_from(
            Run([], expected)
        )
        inside.exchange(run.engine, b"")
        run.engine.close()
    reference.engine.close()
    return left, differs


def _swaps(path: str) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith("zeroshard-swap")]


def test_a_killed_runs_files_are_removed_by_the_next_and_two_runs_leave_each_other_alone(
    tmp_path: Path,
) -> None:
    killed = spawn_ranks(2, _killed, str(tmp_path), timeout=60)
    assert [result.exitcode for result in killed] == [-signal.SIGKILL] * 2
    assert len(_swaps(str(tmp_path))) == 2
    for left, differs in run_ranks(2, _resumed, str(tmp_path), timeout=60):
        assert left == [] and differs == []
    assert _swaps(str(tmp_path)) == []
