"""checkpoint(): the bits of a plain call, the inputs on the tier and nowhere else, copies beside
compute, and no growth.
"""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.activations import using
from tests.support.endless_link import Endless
from tests.support.family_training import STAGES, compare
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, Block, Net, batch, make_model, train, two_groups
from zeroshard.core.placement import Tier
from zeroshard.core.residency import Use
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.nn.checkpointing import checkpoint, checkpoint_blocks, uncheckpoint_blocks
from zeroshard.runtime import shelf
from zeroshard.runtime.shelf import ActivationStore, activation_store_for
from zeroshard.tier.stores import HostStore

TIERS = ("device", "host", "disk")
CPU = torch.device("cpu")
WIDTH = 64  # activations of [32, 64] fp32 are 8 KiB


@pytest.fixture
def host() -> Iterator[ActivationStore]:
    """A host store of the test's own."""
    with using(ActivationStore(HostStore(CPU), CPU)) as store:
        yield store


@pytest.fixture
def where(tmp_path: Path, host: ActivationStore) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return the keywords of a tier."""
    yield lambda tier: {"tier": tier} | ({"disk_path": str(tmp_path)} if tier == "disk" else {})
    for key in [key for key in shelf._stores if key[2] == str(tmp_path)]:
        shelf._stores.pop(key).close()


def activation(seed: int = 0, *, grad: bool = True) -> torch.Tensor:
    """Return an activation [32, WIDTH] that is no leaf."""
    value = torch.randn(
        32, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=grad
    )
    return value * 1.0 if grad else value


def layer(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * WIDTH, WIDTH),
    )


class Stack(nn.Module):
    """Residual layers, checkpointed by `call`."""

    def __init__(self, num_layers: int, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(num_layers))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = x + (block(x) if self.call is None else self.call(block, x))
        return x.square().mean()


def gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Run forward and backward from one seed; return the loss and every gradient, and clear
    them.
    """
    torch.manual_seed(5)
    loss = run()
    loss.backward()
    out = [loss.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return out


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


class Growth:
    """Bytes of the floating-point storages of some size that came since, found without our help
    (random generators' states are 5 KiB each).
    """

    def __init__(self) -> None:
        gc.collect()
        # held: no address of theirs is used again, and what other tests left does not go meanwhile
        self._before = self._live()

    @property
    def bytes(self) -> int:
        return sum(
            storage.nbytes()
            for address, storage in self._live().items()
            if address not in self._before
        )

    @staticmethod
    def _live(at_least: int = 4096) -> dict[int, torch.UntypedStorage]:
        found = {}
        for thing in gc.get_objects():
            if (
                type(thing) in (torch.Tensor, nn.Parameter)
                and thing.is_floating_point()
                and thing.device == CPU
                and thing.layout is torch.strided
            ):
                storage = thing.untyped_storage()
                if storage.nbytes() >= at_least:
                    found[storage.data_ptr()] = storage
        return found


# --------------------------------------------------------------------------------------------- bits


def _nested_containers(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    def fn(
        pair: Any, *, extra: dict[str, Any], scale: float, flag: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
        a, (b, mask) = pair
        assert flag and type(extra) is dict and type(extra["list"]) is list
        hidden = torch.tanh(a @ b.t()) @ extra["list"][0] * scale
        return hidden.masked_fill(mask, 0.0), {"more": hidden * 2, "less": hidden[:, :1]}, "text"

    mask = torch.arange(32)[:, None] % 3 == 0
    y, parts, text = call(fn, (x, (x * 0.5, mask)), extra={"list": [x + 1]}, scale=0.1, flag=True)
    assert text == "text"
    return y + parts["more"] * parts["less"]


def _strides(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([x, x * 2], 1)

    def fn(
        transposed: torch.Tensor,
        gapped: torch.Tensor,
        expanded: torch.Tensor,
        shifted: torch.Tensor,
    ) -> torch.Tensor:
        assert (transposed.stride(), gapped.stride(), expanded.stride()) == (
            (1, WIDTH),
            (2 * WIDTH, 1),
            (WIDTH, 0),
        )
        return torch.tanh(transposed.t() + gapped) * expanded * shifted

    return call(
        fn,
        x.t(),
        wide[:, :WIDTH],
        x[:, 0, None].expand(32, WIDTH),
        wide.view(-1)[7 : 7 + 32 * WIDTH].view(32, WIDTH),
    )


def _dtypes(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    def fn(
        half: torch.Tensor, double: torch.Tensor, order: torch.Tensor, small: torch.Tensor
    ) -> torch.Tensor:
        return (half.double() * double)[order].float() * small

    return call(
        fn,
        x.bfloat16(),
        x.double(),
        torch.arange(32 * WIDTH).view(32, WIDTH)[:, 0] // WIDTH,
        x[:1, :1] * 2,
    )


def _parameters(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    weight = _parameters.weight  # type: ignore[attr-defined]
    return call(
        lambda h, w, t, bias: torch.tanh(h @ w @ t) + bias, x, weight, weight.t(), weight[0]
    )


def _random(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = call(lambda h: nn.functional.dropout(h, 0.4) * torch.rand(()), x)
    return x


def _autocast(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(lambda h: torch.tanh(h @ h.t()) @ h, x).float()


def _used_twice(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    y = call(lambda a, b: torch.tanh(a) * b, x, x)
    return call(torch.sin, y) + call(torch.cos, y) + call(lambda a, b: a * b, x, y)


def _no_gradient_in(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return x * call(lambda h: torch.tanh(h) * torch.tanh(h), x.detach())


def _nested(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    def fn(h: torch.Tensor) -> torch.Tensor:
        return call(torch.tanh, call(torch.sin, h * 2) * 3)

    return call(fn, call(fn, x))


def _inside_torchs(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    for use_reentrant in (False, True):
        x = torch_checkpoint(lambda h: call(torch.tanh, h * 2) * 3, x, use_reentrant=use_reentrant)
    return call(lambda h: torch_checkpoint(torch.sin, h, use_reentrant=False), x)


FORMS = {
    "containers and keywords": _nested_containers,
    "strides": _strides,
    "dtypes": _dtypes,
    "parameters": _parameters,
    "random numbers": _random,
    "autocast": _autocast,
    "used twice": _used_twice,
    "an input without gradient": _no_gradient_in,
    "nested": _nested,
    "inside and around torch's": _inside_torchs,
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_have_the_bits_of_a_plain_call(
    name: str, tier: str, where: Callable[[str], dict[str, Any]]
) -> None:
    form = FORMS[name]
    _parameters.weight = weight = nn.Parameter(
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    )  # type: ignore[attr-defined]
    leaf = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    seen = []
    for call in (
        lambda fn, *args, **kwargs: fn(*args, **kwargs),
        lambda fn, *args, **kwargs: checkpoint(fn, *args, **where(tier), **kwargs),
    ):
        torch.manual_seed(3)
        y = form(call, leaf * 1.5)
        drawn = torch.rand(())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
        seen.append([y.detach(), drawn, leaf.grad, *([] if weight.grad is None else [weight.grad])])
        leaf.grad = weight.grad = None
    assert same(*seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", TIERS)
def test_without_gradients_it_is_a_plain_call(
    tier: str, where: Callable[[str], dict[str, Any]], host: ActivationStore
) -> None:
    with torch.no_grad():
        y = checkpoint(torch.sin, activation(), **where(tier))
    assert not y.requires_grad and torch.equal(y, activation().sin())
    assert host.store.account.peak == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_backward_may_run_twice_and_be_differentiated(
    tier: str, where: Callable[[str], dict[str, Any]]
) -> None:
    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaf = torch.randn(
            32, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True
        )
        y = call(lambda h: torch.tanh(h) * h, call(lambda h: torch.sin(h) * h, leaf * 2)).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(y, leaf, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), leaf)
        return [leaf.grad, slope.detach(), curve]  # type: ignore[list-item]

    assert same(
        run(lambda fn, *args: fn(*args)),
        run(lambda fn, *args: checkpoint(fn, *args, **where(tier))),
    )


def test_two_forwards_before_the_backwards_in_either_order(host: ActivationStore) -> None:
    model = Stack(3, lambda fn, x: checkpoint(fn, x, tier="host"))
    plain = Stack(3)

    def run(model: Stack, order: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        losses = [model(activation(seed)) for seed in (1, 2)]
        for loss in losses[::order]:
            loss.backward()
        out = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return out

    for order in (1, -1):
        assert same(run(model, order), run(plain, order))
    host.collect()
    assert host.used == 0


# -------------------------------------------------------------------------------------------- bytes


def test_the_inputs_and_nothing_else_are_put_away(
    host: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[int, ...]] = []
    pack = shelf.Shelf.pack
    monkeypatch.setattr(
        shelf.Shelf,
        "pack",
        lambda self, tensor: (packed.append(tuple(tensor.shape)), pack(self, tensor))[1],
    )
    block, weight = layer(), nn.Parameter(torch.ones(WIDTH, WIDTH))
    frozen = nn.Parameter(torch.ones(32, WIDTH), requires_grad=False)
    shapes = [(32, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (32,), (32, WIDTH), (WIDTH, 32)]
    y = checkpoint(
        lambda h, w, t, i, f, g: block(h) @ w @ t + i[:, None] + f + g.t(),
        activation(), weight, weight.t(), torch.arange(32), frozen, frozen.t(), tier="host",
    )  # fmt: skip
    if torch.__version__ < (2, 13):
        shapes.insert(0, (0,))  # torch's own
    assert packed == shapes
    assert host.used == shelf.size_class(4 * 32 * WIDTH), (
        "the intermediate tensors of [32, 256] are not kept, and parameters stay"
    )
    y.sum().backward()
    assert packed == shapes


class Census:
    """Which of the storages that it was shown are alive."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[torch.UntypedStorage]] = []

    def show(self, tensor: torch.Tensor) -> None:
        self._seen.append(weakref.ref(tensor.untyped_storage()))

    @property
    def alive(self) -> int:
        return len(
            {id(storage) for reference in self._seen if (storage := reference()) is not None}
        )


@pytest.mark.parametrize("tier", TIERS)
def test_between_forward_and_backward_the_device_holds_no_input(
    tier: str, where: Callable[[str], dict[str, Any]], host: ActivationStore
) -> None:
    depth, one = 12, 4 * 32 * WIDTH
    census, counts = Census(), []

    def call(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def run(h: torch.Tensor) -> torch.Tensor:
            census.show(h)
            counts.append(census.alive)
            return fn(h)

        return checkpoint(run, x, **where(tier))

    model = Stack(depth, call)
    growth = Growth()
    loss = model(activation())
    ours = 2 * one  # a leaf of this test, and what the loss saves
    if tier == "device":
        assert census.alive == depth and growth.bytes == depth * one + ours
        return
    store = activation_store_for(Tier(tier), CPU, where(tier).get("disk_path"))
    deadline = time.monotonic() + 300
    while census.alive and time.monotonic() < deadline:
        store.poll()
    assert census.alive == 0 and growth.bytes == ours, "all of it is away"
    # this one, and the first: the model's caller holds it
    assert max(counts) <= 2 + (0 if tier == "host" else shelf._MOST_LEAVING), counts
    counts.clear()
    loss.backward()
    assert len(counts) == depth and max(counts) <= 2, counts
    assert store.most_used == depth * shelf.size_class(one)


def test_steps_that_repeat_use_the_same_storages(host: ActivationStore) -> None:
    model = Stack(4, lambda fn, x: checkpoint(fn, x, tier="host"))
    for step in range(6):
        model(activation(step)).backward()
        assert (host._num_storages, host.store.account.live) == (
            4,
            4 * shelf.size_class(4 * 32 * WIDTH),
        )


def test_sizes_that_change_take_no_more_than_the_most_that_was_used_at_once(
    host: ActivationStore,
) -> None:
    most = 0
    for step in range(40):
        rows = 32 + 29 * step % 97
        xs = [torch.randn(rows + 3 * index, WIDTH) for index in range(4)]
        most = max(most, sum(shelf.size_class(4 * x.numel()) for x in xs))
        weight = torch.ones((), requires_grad=True)
        sum(
            checkpoint(lambda h, w=weight: (h * w).sin().sum(), x, tier="host") for x in xs
        ).backward()
    assert host.store.account.peak <= most


def test_a_graph_that_dies_without_backward_gives_its_storages_back(host: ActivationStore) -> None:
    model = Stack(4, lambda fn, x: checkpoint(fn, x, tier="host"))
    loss = model(activation())
    assert host.used > 0
    gc.disable()
    try:
        del loss
        host.collect()
        assert host.used == 0, "only the garbage collector would free it"
    finally:
        gc.enable()


def test_a_backward_frees_input_after_input(host: ActivationStore) -> None:
    held: list[int] = []

    def looked(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def run(h: torch.Tensor) -> torch.Tensor:
            host.collect()
            held.append(host.used)
            return fn(h)

        return checkpoint(run, x, tier="host")

    Stack(4, looked)(activation()).backward()
    one = shelf.size_class(4 * 32 * WIDTH)
    assert held[4:] == [4 * one, 3 * one, 2 * one, one]


def test_one_tensor_that_many_calls_are_given_is_stored_once_until_it_is_written_to(
    host: ActivationStore,
) -> None:
    x, shared = activation(), activation(1)
    y = x
    for _ in range(5):
        y = checkpoint(lambda a, b: torch.tanh(a + b), y, shared, tier="host")
    one = shelf.size_class(4 * 32 * WIDTH)
    assert host.used == 6 * one
    with torch.no_grad():
        shared.mul_(2)
    y = checkpoint(lambda a, b: torch.tanh(a + b), y, shared, tier="host")
    assert host.used == 8 * one
    y.sum().backward()
    assert all(len(known) <= 2 for known in shelf._stored.values())


def test_inside_another_checkpoint_inputs_are_not_put_away(host: ActivationStore) -> None:
    one = shelf.size_class(4 * 32 * WIDTH)

    def inner(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, h * 2, tier="host") * 3

    y = checkpoint(inner, activation(), tier="host")
    assert host.used == one
    y.sum().backward()
    assert host.most_used == one
    del y
    host.collect()
    host.most_used = 0
    for use_reentrant in (False, True):
        torch_checkpoint(inner, activation(), use_reentrant=use_reentrant).sum().backward()
    assert host.most_used == 0


class Failing:
    """A function that fails on its `at`-th run."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("as asked")
        return torch.tanh(x) * x


@pytest.mark.parametrize(
    "at",
    [pytest.param(at, marks=[pytest.mark.slow] * (at != 3)) for at in range(1, 7)],
    ids=lambda at: f"run {at}",
)
def test_after_an_exception_nothing_is_left(at: int, host: ActivationStore) -> None:
    growth, fails = Growth(), Failing(at)
    with pytest.raises(ValueError, match="as asked"):
        x = activation()
        for _ in range(3):
            x = checkpoint(fails, x, tier="host")
        x.sum().backward()
    x = None
    gc.collect()  # the traceback held it
    host.collect()
    assert host.used == 0 and growth.bytes == 0
    y = checkpoint(Failing(0), activation(), tier="host")
    y.sum().backward()


# ---------------------------------------------------------------------------- copies beside compute


class Recording:
    """A store that notes when copies start and end; they take no time."""

    tier = Tier.HOST

    def __init__(self) -> None:
        self.store = HostStore(CPU)
        self.account = self.store.account
        self.events: list[str] = []
        self.written: list[str] = []  # storages, in the order of the last writes
        self.fail: str | None = None

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> Any:
        if self.fail == "storage":
            raise StorageError(f"{key}: full")
        storage = self.store.allocate(key, numel, dtype)
        read, write = storage.read, storage.write

        def noted(what: str, copy: Callable[..., Work]) -> Callable[..., Work]:
            def start(start: int, stop: int, tensor: torch.Tensor) -> Work:
                if what == "write":
                    self.written.append(key)
                self.events.append(f"{what} {key}")
                if self.fail == "start":
                    raise StorageError(f"{key}: cannot be written")
                copy(start, stop, tensor)
                return _Failed() if self.fail == what else DoneWork()

            return start

        storage.read, storage.write = noted("read", read), noted("write", write)  # type: ignore[method-assign]
        return storage

    def close(self) -> None:
        self.store.close()


class _Failed:
    def wait(self) -> None:
        raise StorageError("the disk is gone")

    def done(self) -> bool:
        return True


def test_the_read_of_the_call_before_starts_before_a_call_is_computed_again() -> None:
    store = Recording()
    with using(ActivationStore(store, CPU)):

        def call(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda h: (store.events.append("run"), fn(h))[1], x, tier="host")

        model = Stack(4, call)
        for _ in range(2):
            store.events.clear()
            store.written.clear()
            model(activation()).backward()
        a, b, c, d = store.written
    forward, backward = store.events[:8], store.events[8:]
    assert forward == [
        f"write {a}",
        "run",
        f"write {b}",
        "run",
        f"write {c}",
        "run",
        f"write {d}",
        "run",
    ]
    assert backward == [
        f"read {d}",
        f"read {c}",
        "run",
        f"read {b}",
        "run",
        f"read {a}",
        "run",
        "run",
    ]


@pytest.mark.parametrize(
    "overlaps", [True, False], ids=["a link that overlaps", "a link that does not"]
)
def test_an_input_travels_while_other_calls_compute(overlaps: bool) -> None:
    link = Endless(overlaps=overlaps)
    in_flight: list[tuple[int, int]] = []

    def call(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda h: (
                in_flight.append((link.in_flight("to_host"), link.in_flight("to_device"))),
                fn(h),
            )[1],
            x,
            tier="host",
        )

    with using(ActivationStore(HostStore(CPU, link=link), CPU)):
        model = Stack(6, call)
        first = gradients(model, lambda: model(activation()))
    model = Stack(6)
    assert same(first, gradients(model, lambda: model(activation())))
    leaving, coming = [there for there, _ in in_flight[:6]], [back for _, back in in_flight[6:]]
    assert leaving == ([1, 2, 3, 3, 3, 3] if overlaps else [0] * 6), (
        "of the call itself and of two before it"
    )
    assert coming == ([0, 0, 1, 1, 1, 0] if overlaps else [0] * 6), (
        "of the call computed next, where its input has left"
    )


def test_a_link_slower_than_compute_holds_back_the_forward_instead_of_the_memory() -> None:
    # a copy ends where it is waited for
    with using(ActivationStore(HostStore(CPU, link=Held()), CPU)) as store:
        census, counts = Census(), []
        x = activation()
        for _ in range(10):
            census.show(x)
            counts.append(census.alive)
            x = checkpoint(torch.tanh, x, tier="host")
        assert max(counts) == shelf._MOST_LEAVING + 2, counts
        x.sum().backward()
        del x
        store.collect()
        assert store.used == 0


class Held:
    """A link whose copies are made when `go` is set."""

    def __init__(self) -> None:
        self.go = False

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: str) -> Work:
        return _HeldCopy(self, lambda: out.copy_(source))

    def close(self) -> None: ...


class _HeldCopy:
    def __init__(self, link: Held, copy: Callable[[], object]) -> None:
        self._link = link
        # None once it is over, so that it keeps no tensor
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def done(self) -> bool:
        if self._link.go:
            self.wait()
        return self._copy is None


@pytest.mark.parametrize("landed", [False, True])
def test_an_input_written_to_while_its_copy_is_under_way_is_refused_in_backward(
    landed: bool,
) -> None:
    link, leaf = Held(), torch.randn(32, WIDTH, requires_grad=True)
    with using(ActivationStore(HostStore(CPU, link=link), CPU)) as store:
        x = leaf * 1
        y = checkpoint(lambda h: torch.tanh(h) * 2, x, tier="host").sum()
        link.go = landed
        store.poll()
        with torch.no_grad():
            x.zero_()
        link.go = True
        if not landed:
            with pytest.raises(StateError, match="written to in place while its copy"):
                y.backward()
            return
        y.backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 2 * (1 - torch.tanh(leaf.detach()) ** 2))


# --------------------------------------------------------------------------------- failures, misuse


@pytest.mark.parametrize("fail", ["storage", "start", "write", "read"])
def test_a_tier_that_fails_says_so_and_leaves_nothing(fail: str) -> None:
    recording = Recording()
    with using(ActivationStore(recording, CPU)) as store:
        recording.fail = fail
        with pytest.raises(StorageError):
            x = activation()
            for _ in range(3):
                x = checkpoint(torch.tanh, x, tier="host")
            x.sum().backward()
        x, recording.fail = None, None
        gc.collect()
        store.collect()
        assert store.used == 0
        checkpoint(torch.tanh, activation(), tier="host").sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "nvme"}, r"tier='nvme' is not a tier: use 'device', 'host' or 'disk'"),
        ({"tier": "disk"}, "tier='disk' and disk_path="),
        ({"tier": "host", "disk_path": "/somewhere"}, "tier='disk' and disk_path="),
        ({"partition": [0, 1]}, "partition is a list, not a torch ProcessGroup"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint(torch.sin, activation(), **options)
    with pytest.raises(ConfigError, match=message):
        checkpoint_blocks(make_model(), **options)


def test_a_cache_among_the_inputs_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(
        ConfigError,
        match=(
            "given a DynamicCache, which would be filled twice: call the model with use_cache=False"
        ),
    ):
        checkpoint(lambda x, cache: x, activation(), cache=transformers.DynamicCache())


def test_activation_stores_are_few_and_idle_ones_make_room(tmp_path: Path) -> None:
    before = dict(shelf._stores)
    shelf._stores.clear()
    try:
        held = []
        for number in range(shelf._MOST_STORES + 4):
            path = tmp_path / str(number)
            path.mkdir()
            y = checkpoint(torch.tanh, activation(), tier="disk", disk_path=str(path))
            y.sum().backward()
            del y
            assert len(shelf._stores) <= shelf._MOST_STORES
        assert sum(1 for path in tmp_path.iterdir() if list(path.iterdir())) == shelf._MOST_STORES
        with pytest.raises(ConfigError, match="use fewer values of disk_path"):
            for number in range(shelf._MOST_STORES + 4):
                held.append(
                    checkpoint(
                        torch.tanh, activation(), tier="disk", disk_path=str(tmp_path / str(number))
                    )
                )
        assert len(held) == shelf._MOST_STORES
        del held
    finally:
        shelf._close_all()
        shelf._stores.update(before)
    assert not any(list(path.iterdir()) for path in tmp_path.iterdir())


@pytest.mark.slow
def test_files_are_gone_when_the_program_ends_in_the_middle(tmp_path: Path) -> None:
    code = f"""
import torch, zeroshard as zs
x = torch.randn(32, 64, requires_grad=True) * 2
y = zs.nn.checkpoint(torch.tanh, x, tier="disk", disk_path={str(tmp_path)!r})
import os; assert os.listdir({str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- slices on ranks


@pytest.mark.parametrize("tier", ["device", "host"])
@on_ranks(2)
def test_ranks_with_equal_inputs_keep_a_slice_each(tier: str) -> None:
    """Look at the bytes of an odd-sized input at rest, alone and in slices, and whether the
    gradients have equal bits.
    """
    store = ActivationStore(HostStore(CPU), CPU)
    out: dict[str, Any] = {}
    with using(store):
        group = dist.group.WORLD
        weight = torch.randn(
            333, 333, generator=torch.Generator().manual_seed(0), requires_grad=True
        )

        def run(**options: Any) -> list[torch.Tensor]:
            growth = Growth()
            h = torch.randn(111, 333, generator=torch.Generator().manual_seed(1)) @ weight
            before = growth.bytes - 4 * h.numel()
            for _ in range(4):
                h = checkpoint(lambda x, w: torch.tanh(x @ w) + x, h, weight, **options)
            out["held"] = growth.bytes - before - 4 * h.numel() + store.used
            (grad,) = torch.autograd.grad(h.square().sum(), weight)
            return [h.detach(), grad]

        plain = run()
        out["whole"] = out["held"]
        out["same"] = same(plain, run(tier=tier, partition=group))
        out["used"] = store.store.account.peak
    one = 4 * 111 * 333
    assert out["same"] and out["whole"] == 4 * one
    assert 2 * one <= out["held"] <= 1.13 * 2 * one + 4096, out
    assert (out["used"] > 0) == (tier == "host")


# -------------------------------------------------------------------------------- blocks of a model


def test_blocks_are_those_that_shard_finds_and_the_switch_can_be_undone(
    host: ActivationStore,
) -> None:
    model = make_model(width=WIDTH)
    reference = gradients(model, lambda: model(*batch(0, 0)))
    names = checkpoint_blocks(model, tier="host")
    assert names == [f"blocks.{index}" for index in range(4)]
    assert same(reference, gradients(model, lambda: model(*batch(0, 0)))) and host.most_used > 0
    with pytest.raises(ConfigError, match=r"block 'blocks.0' is checkpointed already"):
        checkpoint_blocks(model)
    used = host.store.account.peak
    assert uncheckpoint_blocks(model) == names and uncheckpoint_blocks(model) == []
    host.store.account.peak = 0
    assert (
        same(reference, gradients(model, lambda: model(*batch(0, 0))))
        and host.store.account.peak == 0 < used
    )
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert checkpoint_blocks(model, blocks=["blocks.2"]) == ["blocks.2"] and checkpoint_blocks(
        model, blocks=[nn.Embedding]
    ) == ["embed"]
    assert uncheckpoint_blocks(model) == ["embed", "blocks.2"]
    with pytest.raises(ConfigError, match="blocks: 'layers' matches no module of Net"):
        checkpoint_blocks(model, blocks=["layers"])
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        checkpoint_blocks(nn.Linear(3, 3))


def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights(
    host: ActivationStore,
) -> None:
    model = make_model()
    # a forward of the block's own, bound to it
    model.blocks[0].forward = MethodType(Block.forward, model.blocks[0])
    checkpoint_blocks(model, tier="host")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(
        gradients(twin, lambda: twin(*batch(0, 0))),
        gradients(fresh := make_model(), lambda: fresh(*batch(0, 0))),
    )
    assert uncheckpoint_blocks(twin) == uncheckpoint_blocks(model)


def test_a_forward_of_the_blocks_own_is_kept_and_given_back(host: ActivationStore) -> None:
    model = make_model()
    own = model.blocks[0].forward
    model.blocks[0].forward = doubled = lambda x: 2 * own(x)
    reference = gradients(model, lambda: model(*batch(0, 0)))
    checkpoint_blocks(model, tier="host")
    assert same(reference, gradients(model, lambda: model(*batch(0, 0))))
    uncheckpoint_blocks(model)
    assert model.blocks[0].forward is doubled
    checkpoint_blocks(model, tier="host")
    model.blocks[1].forward = doubled
    with pytest.raises(StateError, match=r"block 'blocks.1' has been given another forward since"):
        uncheckpoint_blocks(model)


def _wide() -> Net:
    return make_model(width=2 * WIDTH)


def _checkpointed() -> Net:
    model = _wide()
    checkpoint_blocks(model, tier="host")
    return model


@on_ranks(2)
def test_checkpointed_blocks_train_to_ddps_bits_in_every_row(rank: int) -> None:
    """Train with checkpointed blocks; compare with torch's DDP without."""
    reference = train(rank, "torch-ddp", 3, model=_wide)
    options = {row: {"comm": zs.Comm(transport="shared_memory")} for row in ROWS} | {
        "zero3 on gloo": {"comm": zs.Comm(transport="gloo")}
    }
    found = {}
    with using(ActivationStore(HostStore(CPU), CPU)) as store:
        for name, option in options.items():
            found[name] = train(
                rank, name.split()[0], 3, model=_checkpointed, **option
            ).differs_from(reference)
        assert store.most_used == 4 * shelf.size_class(4 * 3 * 8 * 2 * WIDTH), store.most_used
    assert not any(found.values()), found


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@on_ranks(2)
def test_blocks_of_a_sharded_model_are_switched_on_and_off(rank: int, transport: str) -> None:
    """Look at losses and weights at stage 3, switched on and off between steps or never."""
    runs = []
    with using(ActivationStore(HostStore(CPU), CPU)):
        for switches in (False, True):
            model = _wide()
            optimizer = two_groups(model)
            engine = zs.shard(
                model, optimizer, stage=3, comm=zs.Comm.model_validate({"transport": transport})
            )
            losses = []
            for step in range(6):
                if switches:
                    (
                        checkpoint_blocks(model, tier="host")
                        if step % 2 == 0
                        else uncheckpoint_blocks(model)
                    )
                loss = model(*batch(rank, step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            runs.append(losses + list(engine.full_state_dict(rank0_only=False).values()))
            engine.close()
    plain, switched = runs
    assert same(plain, switched)


class Scaled(Block):
    """A block with parameters of its own, beside those of its submodules; only a part of it is
    recomputed.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, tier="host") * self.scale


def _scaled() -> Net:
    model = _wide()
    model.blocks = nn.ModuleList(Scaled(2 * WIDTH) for _ in range(4))
    return model


@on_ranks(2)
def test_checkpoints_inside_blocks_find_the_weights_at_every_row(rank: int) -> None:
    reference = train(rank, "torch-ddp", 3, model=_scaled)
    kinds = dict.fromkeys(ROWS, "shared_memory")
    found = {
        row: train(
            rank, row, 3, model=_scaled, comm=zs.Comm.model_validate({"transport": kinds[row]})
        )
        for row in ROWS
    }
    found["zero3 on gloo"] = train(rank, "zero3", 3, model=_scaled, comm=zs.Comm(transport="gloo"))
    found = {kind: run.differs_from(reference) for kind, run in found.items()}
    assert not any(found.values()), found


# ------------------------------------------------------------------------------------- Transformers


def _prepare(model: Any, *, use_reentrant: bool | None) -> None:
    model.config.use_cache = False
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
    assert len(checkpoint_blocks(model, tier="host")) >= 2


@pytest.mark.parametrize(
    ("name", "use_reentrant", "stages"),
    [
        ("Llama", None, STAGES),
        ("GPT-2 (tied head)", None, STAGES),
        ("LoRA on fp32", None, (3,)),
        ("Llama", False, (3,)),
        ("Llama", True, (3,)),
    ],
    ids=[
        "Llama",
        "GPT-2",
        "LoRA",
        "beside Transformers' own",
        "beside Transformers' own, reentrant",
    ],
)
def test_transformers_models_train_to_ddps_bits(
    name: str, use_reentrant: bool | None, stages: tuple[int, ...]
) -> None:
    prepare = functools.partial(_prepare, use_reentrant=use_reentrant)
    for differences in run_ranks(2, compare, name, 2, stages, prepare, timeout=100):
        assert not any(differences.values()), differences


# ---------------------------------------------------------------------------- one sum per gradient


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class _NeverCalled(nn.Module):
    """Reads the weight of a module that it does not call, as ``nn.MultiheadAttention`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.out.weight, self.out.bias))


class _Ends(nn.Module):
    """Its output is that of a checkpoint: the backward begins with it."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch_checkpoint(block, x, use_reentrant=True)
        return x


def _two_forwards(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x).square().mean() + model(2 * x).square().mean()]


def _three_forwards(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([model(scale * x) for scale in (1, 2, 3)]).square().mean()]


def _read_ahead(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """A weight of the checkpoint that comes first in the backward is read before all others."""
    last = model.blocks[-1]
    own = next(iter(last.parameters()))
    return [model(nn.functional.linear(x, own)).square().mean()]


def _again(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Two backwards through one graph, which begin in a checkpoint."""
    loss = _two_forwards(model, x)[0]
    return [loss, loss * 0.3]


def _penalty_and_again(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Two backwards through one graph."""
    loss = _two_forwards(model, x)[0]
    loss = loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())
    return [loss, loss * 0.3]


@pytest.mark.parametrize(
    ("block", "losses", "units"),
    [
        (block, losses, units)
        for block in (_Two, _NeverCalled)
        for losses in (
            *("_two_forwards", "_three_forwards", "_read_ahead"),
            *("_again", "_penalty_and_again"),
        )
        for units in (False, True)
        # docs/not-tested.md: a module of a unit of its own that nothing calls, and a penalty
        if (block, losses, units) != (_NeverCalled, "_penalty_and_again", True)
    ],
)
@on_ranks(2)
def test_gradients_of_reentrant_checkpoints_are_summed_here_before_they_leave(
    rank: int, block: type[nn.Module], losses: str, units: bool
) -> None:
    def backwards(model: nn.Module, reduce: Callable[[], None]) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        told = globals()[losses](model, x)
        for loss in told:
            loss.backward(retain_graph=loss is not told[-1])
            reduce()

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return _Ends(block)

    plain = seeded()
    sums = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}

    def reduce() -> None:
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            sums[name] += parameter.grad
            parameter.grad = None

    backwards(plain, reduce)
    out = {}
    for row in ("zero1", "zero3"):
        model = seeded()
        chosen = {"units": lambda name, module: any(True for _ in module.parameters())}
        engine = zs.shard(
            model, torch.optim.SGD(model.parameters(), 0.5), policy=row, **(chosen if units else {})
        )
        backwards(model, lambda: None)
        grads = {name: engine.full_grad(parameter) for name, parameter in model.named_parameters()}
        out[row] = [name for name, grad in grads.items() if not torch.equal(grad, sums[name] / 2)]
        engine.close()
    assert not any(out.values()), out


def test_a_gradient_that_begins_in_a_checkpoint_leaves_before_the_others_come() -> None:
    torch.manual_seed(0)
    model = _Ends(_Two)
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), 0.5), policy="zero2")
    events: list[tuple[str, str]] = []
    with inside.traced(engine, lambda what, name: events.append((what, name))):
        model(torch.ones(4, 8)).sum().backward()
    order = [name for what, name in events if what == "reduce"]
    assert order[:2] == ["blocks.1", "blocks.0"]
    engine.close()


class _Within(nn.Module):
    """A block that runs its own layer inside a reentrant checkpoint, and what follows outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch_checkpoint(self.first, hidden, use_reentrant=True)
        return self.second(hidden).relu()


class _BackwardInside(_Within):
    """A block whose forward runs a backward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        super().forward(hidden).sum().backward()
        return hidden


@pytest.mark.parametrize(
    ("block", "counted"), [(_Within, [1, 1, 0, 0]), (_BackwardInside, [1, 0, 0, 0])]
)
def test_forwards_inside_a_unit_that_a_reentrant_checkpoint_will_run_again_are_counted(
    block: type[nn.Module], counted: list[int]
) -> None:
    """`counted` for the second block: in the forward, after it, where it has run again, at last."""
    model = nn.Sequential(block(), block())
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), 0.5), stage=3, units=[block])
    unit = inside.unit(engine, "1")
    counts: list[int] = []

    def note(*given: object) -> None:
        counts.append(unit.residency.counts[Use.REPEATED])

    model[1].first.register_forward_hook(note)  # in the forward, and where it runs again
    loss = model(torch.ones(4, 8, requires_grad=True)).sum()
    note()
    if block is not _BackwardInside:
        loss.backward()
    note()
    assert counts == counted
    engine.close()
