"""A state in parts, on the device and on other tiers, is one state: any range reads, writes and
lends as of one tensor.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from tests.support.endless_link import Endless
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Mesh
from zeroshard.state.state import FullBuffer, State
from zeroshard.tier.store import Direct
from zeroshard.tier.stores import HostStore

CPU = torch.device("cpu")
NUMEL = 50


@pytest.mark.parametrize("cuts", [(0, 50), (1, 50), (20, 50), (50,), (20, 33, 50), (0, 10, 11, 50)])
@pytest.mark.parametrize("link", [Direct(), Endless(overlaps=True)], ids=["direct", "over a link"])
def test_ranges_on_either_side_of_a_cut_and_over_it_are_those_of_one_tensor(
    cuts: tuple[int, ...], link: Direct | Endless
) -> None:
    """The first cut is where the device tensor ends; after it each part is a storage of its own."""
    store = HostStore(CPU, link=link)
    near = torch.zeros(cuts[0]) if cuts[0] else None
    away = [store.allocate("state", high - low, torch.float32) for low, high in pairwise(cuts)]
    state = State(near, *away, link=link)
    assert (state.numel, state.split, state.on_device) == (NUMEL, cuts[0], not away)
    plain = torch.zeros(NUMEL)
    for work in state.write(0, NUMEL, plain):
        work.wait()
    draw, generator = random.Random(cuts[0]), torch.Generator().manual_seed(cuts[0])
    for _ in range(200):
        start, stop = sorted(draw.choices(range(NUMEL + 1), k=2))
        values = torch.randn(stop - start, generator=generator)
        match draw.randrange(4):
            case 0:
                for work in state.write(start, stop, values):
                    work.wait()
                plain[start:stop] = values
            case 1:
                with state.borrowed(start, stop, write=True) as lent:
                    assert torch.equal(lent, plain[start:stop])
                    lent.copy_(values)
                plain[start:stop] = values
            case 2:
                with state.borrowed(start, stop, write=False) as lent:
                    assert torch.equal(lent, plain[start:stop])
            case 3:
                out = torch.empty(stop - start)
                for work in state.read(start, stop, out):
                    work.wait()
                assert torch.equal(out, plain[start:stop])
    store.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_gathered_buffer_keeps_its_storage_but_where_a_view_of_it_has_left(leaves: bool) -> None:
    layout = Layout.build([("a", (3, 4)), ("b", (5,))], Mesh(1, 1))
    buffer = FullBuffer(layout, [(4, 1), (1,)], torch.bfloat16, CPU)
    storage = buffer.storage
    assert buffer.is_forgotten and storage.nbytes() == 0
    with torch.no_grad():  # whatever refers to it is a view that has left
        storage.resize_(buffer.num_bytes)
        buffer.tensor.fill_(2.0)
        assert buffer.bytes.view(torch.bfloat16).equal(buffer.tensor)
        left = buffer.views[1][1:] if leaves else None
        assert buffer.release() == buffer.num_bytes
    assert (buffer.storage is not storage) == leaves == bool(storage.nbytes())
    assert buffer.is_forgotten and buffer.storage.nbytes() == 0
    assert left is None or left.tolist() == [2.0] * 4
