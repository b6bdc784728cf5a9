"""Ranks that do different things after ``shard()``: a case for each call and option in which they
could differ, and what every rank is told. Whoever adds one to the public API adds a case, or says
in `ALIKE` why ranks may differ there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import Net, batch, logged, make_model, two_groups
from zeroshard.comm.cpu import control


@dataclass
class Run:
    """A run of two ranks that has taken a step."""

    rank: int
    path: Path
    model: Net
    optimizer: torch.optim.Optimizer
    engine: zs.Engine
    leaves: int | None

    def backward(self) -> None:
        self.engine.backward(self.model(*batch(self.rank, 0)))

    def backwards(self, **leaves: int) -> None:
        for leaf in self.engine.leaves(**{"step": 1, **leaves}):
            self.engine.backward(self.model(*batch(leaf, 0)))

    def step(self) -> None:
        self.backward() if self.leaves is None else self.backwards()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def averaged(self, decay: float = 0.9, *, last: bool = True) -> zs.EMA:
        """Return an average that has followed two steps, or but for the `last` one."""
        ema = zs.EMA(self.engine, decay)
        for number in range(2):
            self.step()
            if last or number == 0:
                ema.update()
        return ema

    def save(self, **options: Any) -> None:
        zs.save(self.path, self.engine, **{"step": 1, **options})

    def load(self, **options: Any) -> None:
        self.save()
        zs.load(self.path, self.engine, **options)

    def states(self, *names: str) -> zs.ParameterStates:
        """Return the states of the parameter that this rank names."""
        name = names[self.rank % len(names)]
        return zs.ParameterStates(self.engine, self.model.get_parameter(name))

    def freeze(self, name: str) -> None:
        if self.rank == 1:
            self.model.get_submodule(name).requires_grad_(False)


def _enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


class _Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Unlike:
    """What ranks do differently in `act`, and the line that `told` is found in on both.

    It stands for the calls and options `of`, by qualified name. With `alone`, rank 1 acts, and rank
    0 takes its next step. `sharded`: ranks meet there only where weights rest sharded.
    """

    of: str
    act: Callable[[Run], Any]
    told: str
    alone: bool = False
    sharded: bool = False
    leaves: int | None = None


def _alone(of: str, act: Callable[[Run], Any], *, sharded: bool = False) -> Unlike:
    """Return the case of a call that rank 1 makes alone: both ranks hear its name."""
    name = of.removeprefix("Engine.").removeprefix("zeroshard.").split()[0]
    told = rf"in different calls: rank 0 is in .*, rank 1 is in \S*{re.escape(name)}"
    return Unlike(of, act, told, alone=True, sharded=sharded)


_LEAVES = r"of engine.leaves\(\) differs between ranks in step 1 \(rank 0: \d; rank 1: \d\)"
_EMA = "update of zs.EMA.*rank 0: .*rank 1: "
_WHOLE = torch.full((19,), 0.5)

CASES = [
    # ------------------------------------------------------------------ a step
    Unlike(
        "Engine.leaves(step)",
        lambda r: (r.backwards(step=5 + r.rank), r.optimizer.step()),
        f"step {_LEAVES}",
        leaves=4,
    ),
    Unlike(
        "Engine.leaves(seed)",
        lambda r: (r.backwards(seed=5 + r.rank), r.optimizer.step()),
        f"seed {_LEAVES}",
        leaves=4,
    ),
    Unlike(
        "Engine.leaves(step) Engine.accumulate",
        lambda r: (
            r.engine.accumulate(r.engine.leaves(5 + r.rank), lambda leaf: r.model(*batch(leaf, 0))),
            r.optimizer.step(),
        ),
        f"step {_LEAVES}",
        leaves=4,
    ),
    Unlike(
        "Engine.leaves",
        lambda r: r.backward() if r.rank == 0 else r.step(),
        r"a backward outside of engine.leaves\(\)|rank\(s\) \[0\] gave up",
        leaves=4,
    ),
    Unlike(
        "Engine.backward(weight)",
        lambda r: (
            r.engine.backward(r.model(*batch(r.rank, 0)), weight=(None, 3)[r.rank]),
            r.optimizer.step(),
        ),
        "backwards with a weight and without one",
    ),
    Unlike(
        "Engine.clip_grad_norm_(max_norm)",
        lambda r: (r.backward(), r.engine.clip_grad_norm_(1.0 + r.rank)),
        r"max_norm of clip_grad_norm_\(\) differs",
    ),
    _alone("Engine.join", lambda r: _enter(r.engine.join())),
    *(
        Unlike(
            "requires_grad",
            lambda r, name=name, clips=clips: (
                r.freeze(name),
                r.backward(),
                r.engine.clip_grad_norm_(1.0) if clips else r.optimizer.step(),
            ),
            r"parameters frozen after shard\(\) differs .*rank 0: nothing; rank 1: .*weight",
        )
        for name, clips in (("blocks.1.up", False), ("blocks.0", True), ("embed", False))
    ),
    Unlike(
        "Optimizer.step",
        lambda r: (r.backward(), r.optimizer.step() if r.rank else None, r.step()),
        r"in different calls: .*optimizer.step\(\)",
    ),
    Unlike(
        "Optimizer.zero_grad",
        lambda r: (
            r.backward(),
            r.optimizer.zero_grad() if r.rank else None,
            r.backward(),
            r.optimizer.step(),
        ),
        r"different numbers of backwards since zero_grad\(\)",
    ),
    Unlike(
        "Optimizer.param_groups",
        lambda r: (r.optimizer.param_groups[0].update(lr=0.1 + r.rank), r.step()),
        "option 'lr' of optimizer param group 0 differs",
    ),
    Unlike(
        "Engine.trail",
        lambda r: _enter(r.engine.trail(r.path)) if r.rank else r.step(),
        r"in different calls: .*engine.trail\(\)",
        leaves=4,
    ),
    Unlike(
        "Engine.trail(every)",
        lambda r: _enter(r.engine.trail(r.path, every=1 + r.rank)),
        "about 'every'",
        leaves=4,
    ),
    # ------------------------------------------------------------------ averages
    Unlike("EMA(decay)", lambda r: (r.averaged(0.5 + 0.1 * r.rank), r.step()), f"{_EMA}.*0.6"),
    Unlike("EMA.update", lambda r: (r.averaged(last=r.rank == 0), r.step()), _EMA),
    Unlike("EMA", lambda r: (r.averaged() if r.rank else (r.step(), r.step()), r.step()), _EMA),
    Unlike(
        "EMA.update EMA.swapped", lambda r: _enter(r.averaged(last=r.rank == 0).swapped()), _EMA
    ),
    Unlike(
        "EMA.update zeroshard.save",
        lambda r: r.save(states={"ema": r.averaged(last=r.rank == 0)}),
        _EMA,
    ),
    Unlike(
        "EMA.update Engine.repartition",
        lambda r: (ema := r.averaged(last=r.rank == 0), r.engine.repartition(stage=0), ema),
        "updates of zs.EMA",
    ),
    Unlike(
        "EMA.swapped",
        lambda r: (ema := r.averaged(), _enter(ema.swapped()) if r.rank else None, r.step()),
        r"in different calls: .*EMA.swapped\(\)",
    ),
    # ------------------------------------------------------------------ whole parameters
    _alone("Engine.gathered", lambda r: _enter(r.engine.gathered()), sharded=True),
    _alone("Engine.gathered", lambda r: _enter(r.engine.gathered(writeback=True))),
    *(
        Unlike(
            "Engine.gathered(params)",
            lambda r, writeback=writeback: _enter(
                r.engine.gathered(
                    (r.model.head.weight, r.model.embed.weight)[r.rank], writeback=writeback
                )
            ),
            "rank 0: unit norm.weight = whole; rank 1: unit embed.weight = whole",
            sharded=not writeback,
        )
        for writeback in (False, True)
    ),
    Unlike(
        "Engine.gathered(writeback)",
        lambda r: _enter(r.engine.gathered(writeback=r.rank == 1)),
        r"'writeback'|in different calls: .*engine.gathered\(\)",
    ),
    _alone("Engine.full_state_dict", lambda r: r.engine.full_state_dict(), sharded=True),
    Unlike(
        "Engine.full_state_dict(names)",
        lambda r: r.engine.full_state_dict(names=("head.*", "embed.*")[r.rank]),
        "about 'names'",
    ),
    Unlike(
        "Engine.full_state_dict(trained)",
        lambda r: r.engine.full_state_dict(trained=r.rank == 1),
        r"about 'trained'|in different calls: .*engine.full_state_dict\(\)",
    ),
    Unlike(
        "Engine.full_grad",
        lambda r: (
            r.backward(),
            r.engine.clip_grad_norm_(1.0),
            r.engine.full_grad(r.model.head.weight) if r.rank else None,
            r.optimizer.step(),
        ),
        r"in different calls: .*engine.full_grad\(\)",
    ),
    Unlike(
        "Engine.full_grad(param)",
        lambda r: (
            r.backward(),
            r.engine.full_grad((r.model.head.weight, r.model.embed.weight)[r.rank]),
        ),
        "rank 0: parameter = head.weight; rank 1: parameter = embed.weight",
    ),
    Unlike(
        "ParameterStates.master",
        lambda r: r.states("norm.bias").master(),
        "in different calls: .*rank 1 is in ParameterStates",
        alone=True,
    ),
    Unlike(
        "ParameterStates(param)",
        lambda r: r.states("head.weight", "embed.weight").master(),
        "rank 0: parameter = head.weight; rank 1: parameter = embed.weight",
    ),
    Unlike(
        "ParameterStates.state(key)",
        lambda r: r.states("norm.bias").state(("exp_avg", "exp_avg_sq")[r.rank]),
        "rank 0: read = state 'exp_avg'; rank 1: read = state 'exp_avg_sq'",
    ),
    Unlike(
        "ParameterStates.set_master(value)",
        lambda r: r.states("norm.bias").set_master(_WHOLE + r.rank),
        "about 'the numbers'",
    ),
    Unlike(
        "ParameterStates.set_state(value)",
        lambda r: r.states("norm.bias").set_state("exp_avg", _WHOLE + r.rank),
        "about 'the numbers'",
    ),
    Unlike(
        "ParameterStates.set_state(key)",
        lambda r: r.states("norm.bias").set_state(("exp_avg", "exp_avg_sq")[r.rank], _WHOLE),
        "rank 0: set = state 'exp_avg'; rank 1: set = state 'exp_avg_sq'",
    ),
    Unlike(
        "ParameterStates.set_grad(value)",
        lambda r: (r.backward(), r.states("norm.bias").set_grad(_WHOLE + r.rank)),
        "about 'the numbers'",
    ),
    Unlike(
        "Module.load_state_dict",
        lambda r: r.model.load_state_dict(
            {name: one + r.rank for name, one in make_model(layers=2).state_dict().items()}
        ),
        "the numbers of embed.weight",
    ),
    _alone("load_state_dict", lambda r: r.model.load_state_dict(make_model(layers=2).state_dict())),
    # ------------------------------------------------------------------ phases, and the end
    Unlike(
        "Engine.exchange(call)",
        lambda r: r.engine.exchange(b"", f"call {r.rank}"),
        "rank 0 is in call 0, rank 1 is in call 1",
    ),
    _alone("Engine.offload_states", lambda r: r.engine.offload_states()),
    Unlike(
        "Engine.reload_states",
        lambda r: (
            r.engine.offload_states(),
            r.engine.reload_states() if r.rank else None,
            r.step(),
        ),
        r"call engine.reload_states\(\) on every rank|exchange of engine.reload_states\(\)",
    ),
    _alone("Engine.repartition", lambda r: r.engine.repartition(stage=2)),
    *(
        Unlike(
            f"Engine.repartition({name})",
            lambda r, name=name, values=values: r.engine.repartition(**{name: values[r.rank]}),
            "the ranks disagree, first about",
        )
        for name, values in {
            "policy": ("zero2", "ddp"),
            "stage": (2, 0),
            "offload": ({"optimizer": "host"}, {"optimizer": "device"}),
            "shares": ([0.5, 0.5], [0.4, 0.6]),
            "node_size": (1, 2),
        }.items()
    ),
    Unlike(
        "Engine.reset",
        lambda r: r.engine.reset() if r.rank else r.step(),
        r"rank\(s\) \[1\] gave up .* in engine.reset\(\)|nothing",  # on rank 1, which was met there
    ),
    _alone("Engine.close", lambda r: r.engine.close()),
    _alone("zeroshard.detect_anomaly", lambda r: _anomaly(r)),
    # ------------------------------------------------------------------ checkpoints
    _alone("zeroshard.save", lambda r: r.save()),
    Unlike(
        "zeroshard.save(step)", lambda r: r.save(step=1 + r.rank), "rank 0 step=1, rank 1 step=2"
    ),
    Unlike(
        "zeroshard.save(directory)",
        lambda r: zs.save(r.path / str(r.rank), r.engine, step=1),
        "on storage that all ranks share",
    ),
    Unlike(
        "zeroshard.save(states)",
        lambda r: r.save(states={("one", "other")[r.rank]: _Stateful()}),
        r"states differs between ranks \(rank 0: one; rank 1: other\)",
    ),
    Unlike("zeroshard.save(frozen)", lambda r: r.save(frozen=r.rank == 1), "frozen differs"),
    Unlike(
        "zeroshard.save(drop_gradients)",
        lambda r: (r.backward(), r.save(drop_gradients=r.rank == 1)),
        "there are gradients that no step has taken",
    ),
    Unlike(
        "Saver(background)",
        lambda r: zs.Saver(r.path, r.engine, background=r.rank == 1).save(1),
        "background differs",
    ),
    _alone("zeroshard.load", lambda r: zs.load(r.path, r.engine)),
    *(
        Unlike(
            f"zeroshard.load({name})",
            lambda r, name=name, values=values: r.load(**{name: values[r.rank]}),
            f"the ranks disagree, first about '{name}'",
        )
        for name, values in {
            "step": (None, 1),
            "states": (None, {"one": _Stateful()}),
            "fallback": (None, "previous"),
            "frozen": (True, False),
            "generators": (True, False),
        }.items()
    ),
]


def _anomaly(run: Run) -> None:
    with zs.detect_anomaly(run.engine):
        run.step()


# calls and options in which ranks may differ, or are told elsewhere
ALIKE = {
    "Engine.accumulate(batches loss_fn)": "the numbers of batches need not be the same",
    "Engine.accumulate(tier disk_path)": "each rank's own inputs rest there",
    "Engine.attach Engine.attach(optimizer)": "the next step compares its options",
    "Engine.backward(loss retain_graph)": "each rank's own graph",
    "Engine.exchange(payload)": "each rank's own",
    "Engine.follow(schedule budget no_sync)": "features/test_pipeline.py",
    "Engine.full_state_dict(rank0_only)": "who keeps what all have gathered",
    "Engine.gathered(discard) Engine.hide_gradients": "each rank's own view; nothing is sent",
    "Engine.memory Engine.traffic Engine.reset_traffic Engine.optimizer_part": "nothing is sent",
    "Engine.explain_optimizer": "nothing is sent",
    "Engine.no_sync": "features/test_agreement.py",
    "Engine.repartition(mesh dp)": "features/test_repartition.py",
    "Engine.trace(directory)": "each rank's own file; nothing is sent",
    "Engine.trail(directory)": "each rank's own file",
    "EMA(engine) Saver(engine) ParameterStates(engine) OptimizerStates(engine)": "the subject",
    "OptimizerStates.get OptimizerStates.items OptimizerStates.keys": "nothing is sent",
    "OptimizerStates.values": "nothing is sent",
    "OptimizerStates.get(key default)": "nothing is sent",
    "ParameterStates.grad ParameterStates.state": "as master() and full_grad()",
    "ParameterStates.grad(local) ParameterStates.master(local)": "as the whole one alone",
    "ParameterStates.state(local) ParameterStates.set_grad(local)": "as the whole one alone",
    "ParameterStates.set_master(local) ParameterStates.set_state(local)": "as the whole one alone",
    "Saver(directory states frozen) Saver.save(step drop_gradients)": "as zeroshard.save",
    "Saver(keep_last keep_every timeout_s) zeroshard.save(keep_last keep_every)": "rank 0's count",
    "Saver(redundancy)": "faults/test_elastic.py",
    "Saver.save(extra) Saver.keep(extra) zeroshard.save(extra)": "what differs is kept by rank",
    "Saver.close Saver.wait": "collective while a save is under way: its files are awaited",
    "Saver.keep Saver.keep(step)": "faults/test_elastic.py",
    "zeroshard.detect_anomaly(engine) zeroshard.memory_table(engines)": "the subject",
    "zeroshard.load(directory engine)": "the manifest is compared",
    "zeroshard.load(strict verify)": "what one rank refuses is refused on all",
    "zeroshard.load_pretrained zeroshard.load_pretrained(target directory strict rename)": (
        "features/test_load_pretrained.py"
    ),
    "zeroshard.memory_table zeroshard.memory_table(by_unit)": "nothing is sent",
    "zeroshard.save(engine)": "the subject",
}


def _named(text: str) -> Iterator[str]:
    """Yield "Engine.leaves", "Engine.leaves(step)" and "Engine.leaves(seed)" of "Engine.leaves
    Engine.leaves(step seed)".
    """
    for call, options in re.findall(r"([\w.]+)(\([^)]*\))?", text):
        yield call
        yield from (f"{call}({option})" for option in options.strip("()").split())


def _public() -> Iterator[str]:
    """Yield the calls that need an engine, and their options."""
    calls: dict[str, Any] = {}
    for kind in (zs.Engine, zs.EMA, zs.Saver, zs.ParameterStates, zs.OptimizerStates):
        own = inspect.getmembers(kind, inspect.isfunction)
        calls |= {f"{kind.__name__}.{name}": one for name, one in own if not name.startswith("_")}
        if kind is not zs.Engine:
            calls[kind.__name__] = kind
    for name in ("save", "load", "load_pretrained", "detect_anomaly", "memory_table"):
        calls[f"zeroshard.{name}"] = getattr(zs, name)
    for name, call in calls.items():
        yield name
        options = inspect.signature(call).parameters
        yield from (f"{name}({option})" for option in options if option != "self")


def test_every_call_and_option_has_a_case_or_a_reason() -> None:
    said = {name for text in [*(case.of for case in CASES), *ALIKE] for name in _named(text)}
    assert set(_public()) <= said, sorted(set(_public()) - said)


def _told(rank: int, world: int, row: str, transport: str, path: Path) -> dict[int, str]:
    """Return what this rank is told in each case, by number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_LISTEN_AFTER_S", 0.1)
        return dict(_cases(rank, row, transport, path))


def _cases(rank: int, row: str, transport: str, path: Path) -> Iterator[tuple[int, str]]:
    for number, case in enumerate(CASES):
        if case.sharded and row != "zero3":
            continue
        model = make_model(layers=2)
        optimizer = two_groups(model)
        comm = zs.Comm.model_validate({"transport": transport})
        options: Any = {"policy": row, "leaves": case.leaves, "comm": comm}
        engine = zs.shard(model, optimizer, **options)
        run = Run(rank, path / str(number), model, optimizer, engine, case.leaves)
        run.step()
        try:
            if rank == 1 or not case.alone:
                case.act(run)
            if case.alone:
                run.step()
            engine.close()
        except zs.ZeroshardError as error:
            yield number, f"{type(error).__name__}: {error}"
            engine.reset()
            engine.close()


@pytest.mark.parametrize(("row", "transport"), [("zero3", "gloo"), ("zero1", "shared_memory")])
def test_ranks_that_do_different_things_are_told_what_on_every_rank(
    row: str, transport: str, tmp_path: Path
) -> None:
    for told in run_ranks(2, _told, row, transport, tmp_path, timeout=300):
        for number, case in enumerate(CASES):
            if case.sharded and row != "zero3":
                continue
            said = told.get(number, "nothing")
            assert re.search(case.told, said) and "StallError" not in said, (case.of, said)


# ------------------------------------------------------------------ what CPU ranks alone let pass


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(*batch(run.rank, 1))


def _gathered(run: Run) -> None:
    with run.engine.gathered():
        if run.rank == 0:
            _evaluate(run)


def _joined(run: Run) -> None:
    with run.engine.join():
        for _ in range(2 + run.rank):
            run.step()


def _accumulated(run: Run) -> None:
    run.engine.accumulate(range(2 + run.rank), lambda number: run.model(*batch(number, 0)))
    run.optimizer.step()
    run.optimizer.zero_grad()


AHEAD: dict[str, tuple[Callable[[Run], Any], str, bool]] = {  # the row, and whether it is told
    "a forward of one rank": (lambda r: r.rank or _evaluate(r), "zero3", True),
    "a read on one rank": (lambda r: r.rank or r.model.head.weight.norm(), "zero3-keep", True),
    "a forward of one rank, weights whole": (lambda r: r.rank or _evaluate(r), "zero2", False),
    "a forward of one rank inside gathered()": (_gathered, "zero3", False),
    "a forward and a read of every rank": (
        lambda r: (_evaluate(r), r.model.head.weight.norm()),
        "zero3",
        False,
    ),
    "uneven batches": (_joined, "zero3", False),
    "uneven micro-batches": (_accumulated, "zero3", False),
    "uneven leaves": (lambda r: None, "zero3", False),
}


@on_ranks(2)
def test_a_rank_that_is_ahead_where_only_cpu_ranks_let_it_pass_is_told_of_once(rank: int) -> None:
    """Each case of `AHEAD` stands before two of four steps."""
    for name, (act, row, told) in AHEAD.items():
        model = make_model(layers=2)
        optimizer = two_groups(model)
        leaves = 5 if name == "uneven leaves" else None
        engine = zs.shard(model, optimizer, policy=row, leaves=leaves)
        run = Run(rank, Path(), model, optimizer, engine, leaves)
        with logged() as said:
            for number in range(4):
                if number in (1, 2):
                    act(run)
                run.step()
            engine.close()
        said = [text for text in said if "began" in text]
        assert len(said) == (0 if rank else told), (name, said)
        for text in said:
            assert text.startswith("rank(s) [0] began 2 forwards, or reads of weights")
            assert "before step 1 where others began 1" in text
