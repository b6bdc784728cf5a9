"""A state in two parts, on the device and on another tier, is one state: any range reads, writes
and lends as of one tensor.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.endless_link import Endless
from zeroshard.tier.host import HostStore
from zeroshard.tier.link import Direct
from zeroshard.tier.shelf import Shelf

CPU = torch.device("cpu")
NUMEL = 50


@pytest.mark.parametrize("split", [0, 1, 20, 50])
@pytest.mark.parametrize("link", [Direct(), Endless(overlaps=True)], ids=["direct", "over a link"])
def test_ranges_on_either_side_of_the_split_and_over_it_are_those_of_one_tensor(
    split: int, link: Direct | Endless
) -> None:
    store = HostStore(CPU, link=link)
    shelf = Shelf(
        torch.zeros(split) if split else None,
        store.slab("state", NUMEL - split, torch.float32) if split < NUMEL else None,
        link=link,
    )
    plain = torch.zeros(NUMEL)
    for work in shelf.write(0, NUMEL, plain):
        work.wait()
    draw, generator = random.Random(split), torch.Generator().manual_seed(split)
    for _ in range(200):
        start, stop = sorted(draw.choices(range(NUMEL + 1), k=2))
        values = torch.randn(stop - start, generator=generator)
        match draw.randrange(4):
            case 0:
                for work in shelf.write(start, stop, values):
                    work.wait()
                plain[start:stop] = values
            case 1:
                with shelf.borrowed(start, stop, write=True) as lent:
                    assert torch.equal(lent, plain[start:stop])
                    lent.copy_(values)
                plain[start:stop] = values
            case 2:
                with shelf.borrowed(start, stop, write=False) as lent:
                    assert torch.equal(lent, plain[start:stop])
            case 3:
                out = torch.empty(stop - start)
                for work in shelf.read(start, stop, out):
                    work.wait()
                assert torch.equal(out, plain[start:stop])
    store.close()
