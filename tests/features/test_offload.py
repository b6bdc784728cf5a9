"""Tiers change where states rest, never a bit: every row with every state on every tier, beside
the same row on the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.covering import cases_of, pairs
from tests.support.harness import run_ranks
from tests.support.training import ROWS, TRANSPORTS, Run, batch, make_model, train, two_groups
from zeroshard.core.placement import Tier
from zeroshard.core.policy import row as policy_row
from zeroshard.optim.runner import StepJob, TileRunner

TIERS = ("device", "host", "disk")


FACTORS = {
    "row": ROWS,
    "weight": TIERS,
    "grad": TIERS,
    "optimizer": TIERS,
    "transport": TRANSPORTS,
    "precision": ("fp32", "bf16", "fp16"),
}


def allowed(case: dict[str, str]) -> bool:
    tiers = [case[state] for state in ("weight", "grad", "optimizer")]
    try:
        policy_row(case["row"]).tiered(*map(Tier, tiers))
    except ValueError:
        return False
    return set(tiers) != {"device"}


def offload(weight: str, grad: str, optimizer: str, path: str, **options: Any) -> zs.Offload:
    disk = {"disk_path": path} if "disk" in (weight, grad, optimizer) else {}
    return zs.Offload(weight=weight, grad=grad, optimizer=optimizer, **disk, **options)


def _matrix(
    rank: int, world: int, cases: Sequence[dict[str, str]], path: str, steps: int
) -> dict[str, list[str]]:
    def run(row: str, transport: str, precision: str, tiers: zs.Offload | None = None) -> Run:
        return train(
            rank,
            row,
            steps,
            micro_batches=2,
            no_sync=True,
            clip=0.1,
            precision=precision,
            offload=tiers,
            comm=zs.Comm.model_validate({"transport": transport}),
            model=functools.partial(make_model, layers=2),
        )

    on_the_device = functools.cache(functools.partial(run, transport="shared_memory"))
    out = {}
    for case in cases:
        row, weight, grad, optimizer, transport, precision = case.values()
        ours = run(row, transport, precision, offload(weight, grad, optimizer, path))
        # rows that keep what a rank has summed inside no_sync() have the bits of one another
        reference = on_the_device(
            "ddp" if row in ("ddp", "zero1") else "zero3", precision=precision
        )
        out[" ".join(case.values())] = ours.differs_from(reference) + (
            ["norms"] if ours.extra["norms"] != reference.extra["norms"] else []
        )
    return out


@pytest.mark.parametrize(
    ("cases", "steps"),
    [
        pytest.param(pairs(FACTORS, allowed), 3, id="pairs"),
        *(
            pytest.param(cases, 5, id=f"{row}-{transport}", marks=pytest.mark.slow)
            for row in ROWS
            for transport in TRANSPORTS
            for cases in [cases_of(FACTORS | {"row": [row], "transport": [transport]}, allowed)]
        ),
    ],
)
def test_every_row_and_tier_gives_the_bits_of_the_device(
    cases: list[dict[str, str]], steps: int, tmp_path: Path
) -> None:
    for differences in run_ranks(2, _matrix, cases, str(tmp_path), steps, timeout=300):
        assert len(differences) == len(cases)
        assert not any(differences.values()), differences


def _fractions(rank: int, world: int, path: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for row in ROWS:
        # large enough for padding not to count
        model = functools.partial(make_model, width=97, layers=3)
        same: dict[str, Any] = {
            "steps": 3,
            "micro_batches": 2,
            "no_sync": True,
            "clip": 0.1,
            "model": model,
        }
        reference = train(rank, row, **same)
        cases = {
            "0.4": offload("device", "host", "host", path, fraction=0.4),
            "0": offload("device", "host", "host", path, fraction=0.0),
            "apart": offload(
                "device", "host", "host", path, fraction={"grad": 0.7, "optimizer": 0.4}
            ),
            "disk": offload("device", "device", "disk", path, fraction=0.35),
        }
        if row.startswith("zero3"):
            cases["weights"] = offload(
                "host", "device", "host", path, fraction={"weight": 0.5, "optimizer": 0.3}
            )
        for name, tiers in cases.items():
            run = train(rank, row, offload=tiers, **same)
            report = run.extra["memory"].tiers
            states = {
                tier: report["optimizer"].get(tier, 0) + report["master"].get(tier, 0)
                for tier in TIERS
            }
            moments = report["optimizer"]
            out[f"{row} {name}"] = (run.differs_from(reference), states, moments)
    return out


def test_a_fraction_of_the_optimizer_gives_the_same_bits_and_is_byte_accurate(
    tmp_path: Any,
) -> None:
    for cases in run_ranks(2, _fractions, str(tmp_path), timeout=110):
        for name, (differences, _, moments) in cases.items():
            assert differences == [], name
            share = {"0.4": 0.4, "0": 0.0, "apart": 0.4, "disk": 0.35, "weights": 0.3}[
                name.split()[1]
            ]
            away = moments.get("host", 0) + moments.get("disk", 0)
            assert abs(away / sum(moments.values()) - share) < 0.01, (name, moments)


def _late(
    rank: int, world: int, row: str, start: int, tiers: tuple[str, str, str], path: str
) -> dict[str, float]:
    """Compare `delayed_update` with a plain loop that applies each update one step late."""
    steps = 8
    run = train(rank, row, steps, clip=0.1, offload=offload(*tiers, path, delayed_update=start))
    expected = _reference(steps, start)
    return {
        name: float((value.double() - expected[name].double()).abs().max())
        for name, value in run.state.items()
    }


def _reference(steps: int, start: int) -> dict[str, torch.Tensor]:
    """Train on the batches of both ranks in one process; from step `start` on, the passes compute
    without the newest update. Return the weights with all of them.
    """
    master, model = make_model(), make_model()
    optimizer = two_groups(master)
    pending: list[torch.Tensor] | None = None

    def apply(grads: list[torch.Tensor]) -> None:
        for parameter, grad in zip(master.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), master.parameters(), strict=True):
                ours.copy_(theirs)

    for step in range(steps):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            model.zero_grad()
            model(*batch(rank, step)).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad
        grads = [total / 2 for total in sums]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
        scale = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
        grads = [grad * scale if float(scale) < 1.0 else grad for grad in grads]
        if pending is not None:
            apply(pending)
            pending = None
        if step < start:
            apply(grads)
        else:
            pending = grads
    if pending is not None:
        apply(pending)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("row", "start", "tiers"),
    [
        ("zero2", 0, ("device", "host", "host")),
        ("zero1", 3, ("device", "device", "disk")),
        ("zero3", 3, ("disk", "host", "disk")),
        ("zero3", 2, ("host", "disk", "host")),
    ],
)
def test_a_delayed_update_is_the_reference_one_step_late(
    row: str, start: int, tiers: tuple[str, str, str], tmp_path: Any
) -> None:
    for apart in run_ranks(2, _late, row, start, tiers, str(tmp_path), timeout=60):
        assert max(apart.values()) == 0.0, apart


def _read_late(
    rank: int, world: int, row: str, tiers: tuple[str, str, str], path: str, one_unit: bool
) -> None:
    """Read whole weights after each step, and within each, beside runs that do not."""
    units: dict[str, Any] = {"units": [type(make_model())]} if one_unit else {}
    late = offload(*tiers, path, delayed_update=1)

    def run(where: str, **options: Any) -> list[dict[str, torch.Tensor]]:
        model = make_model()
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy=row, **units, **options)
        seen = []

        def read(here: str) -> None:
            if here != where:
                return
            with engine.gathered():
                inside = {name: p.detach().clone() for name, p in model.named_parameters()}
            # which ends the graph of a forward that no backward follows
            seen.append(inside if here == "forward" else engine.full_state_dict(rank0_only=False))
            assert all(torch.equal(seen[-1][name], value) for name, value in inside.items())

        for step in range(4):
            for micro in range(2):
                loss = model(*batch(rank, 2 * step + micro))
                read("forward")
                engine.backward(loss)
                read(f"backward {micro}")
            optimizer.step()
            optimizer.zero_grad()
            read("step")
            if where == "reset":
                engine.reset()
        if where == "end":
            model(*batch(rank, 9))  # and no backward
            seen.append(engine.full_state_dict(rank0_only=False))
        engine.close()
        return [*seen, {name: p.detach().clone() for name, p in model.named_parameters()}]

    def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(ours[name], value) for name, value in theirs.items())

    exact, delayed = run("step"), run("", offload=late)
    for ours, theirs in zip(run("step", offload=late), exact, strict=True):
        assert same(ours, theirs), "a read between steps has the last one, and so has the next"
    for where in ("forward", "backward 0", "backward 1"):
        assert same(run(where, offload=late)[-1], delayed[-1]), "a read within a step moves nothing"
    assert same(run("reset", offload=late)[-1], exact[-1]), "a reset brings the last one"
    exported, closed = run("end", offload=late)
    assert same(exported, closed), "an export has what close() gives back"


@pytest.mark.parametrize(
    ("row", "tiers", "one_unit"),
    [
        ("zero2", ("device", "host", "host"), False),
        ("zero3", ("disk", "host", "disk"), False),
        ("zero1", ("device", "host", "host"), True),
    ],
)
def test_whole_weights_have_the_last_step_also_where_it_is_taken_late(
    row: str, tiers: tuple[str, str, str], one_unit: bool, tmp_path: Any
) -> None:
    run_ranks(2, _read_late, row, tiers, str(tmp_path), one_unit, timeout=300)


def _kept(rank: int, world: int, path: str) -> dict[str, list[str]]:
    """Step three times on gradients that nobody zeroes: torch adds the next ones to what the
    step has read.
    """

    def run(row: str | None, **options: Any) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = two_groups(model)
        module = torch.nn.parallel.DistributedDataParallel(model) if row is None else model
        engine = None if row is None else zs.shard(model, optimizer, policy=row, **options)
        for step in range(3):
            module(*batch(rank, step)).backward()
            optimizer.step()
        state = model.state_dict() if engine is None else engine.full_state_dict(rank0_only=False)
        if engine is not None:
            engine.close()
        return state

    expected = run(None)
    cases: dict[str, dict[str, Any]] = {row: {"row": row} for row in ROWS}
    for row, tiers in (
        ("zero2", ("device", "host", "host")),
        ("zero3", ("host", "disk", "disk")),
        ("ddp", ("device", "host", "device")),
    ):
        cases[f"{row} {tiers}"] = {"row": row, "offload": offload(*tiers, path)}
    runs = {name: run(**case) for name, case in cases.items()}
    for key, value in expected.items():  # torch adds before it averages, and so rounds elsewhere
        torch.testing.assert_close(runs["ddp"][key], value, rtol=1e-4, atol=1e-5)
    return {
        name: [key for key, value in state.items() if not torch.equal(value, runs["ddp"][key])]
        for name, state in runs.items()
    }


def test_gradients_that_nobody_zeroes_add_up_as_in_plain_training(tmp_path: Any) -> None:
    for differences in run_ranks(2, _kept, str(tmp_path), timeout=60):
        assert not any(differences.values()), differences


def _changed_under_way(rank: int, world: int, path: str) -> dict[str, list[str]]:
    """Change gradients right after a step that reads them only a little later, on a thread of
    its own.
    """
    steps_at_once = TileRunner.run

    def late(self: TileRunner, job: StepJob) -> None:
        time.sleep(0.05)
        steps_at_once(self, job)

    def run(clear: str, **options: Any) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, policy="zero2", **options)
        for step in range(3):
            model(*batch(rank, step)).backward()
            optimizer.step()
            if clear == "all":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "one":
                next(model.parameters()).grad = None
        state = engine.full_state_dict(rank0_only=False)
        engine.close()
        return state

    tiers = [("device", "device", "host"), ("device", "host", "host"), ("device", "disk", "disk")]
    differences: dict[str, list[str]] = {}
    for clear in ("all", "one", "nothing"):
        expected = run(clear)
        TileRunner.run = late  # type: ignore[method-assign]
        try:
            for resting in tiers:
                state = run(clear, offload=offload(*resting, path))
                differences[f"{clear} {resting}"] = [
                    key for key, value in state.items() if not torch.equal(value, expected[key])
                ]
        finally:
            TileRunner.run = steps_at_once  # type: ignore[method-assign]
    return differences


def test_a_step_under_way_reads_its_gradients_before_they_are_cleared_or_added_to(
    tmp_path: Any,
) -> None:
    (differences,) = run_ranks(1, _changed_under_way, str(tmp_path), timeout=60)
    assert not any(differences.values()), differences
