"""Which ranks hold the same parameters, and how these groups lie on nodes."""

from __future__ import annotations

import pytest

from zeroshard.comm.device_mesh import Holders, shared_dims
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError

ACROSS = ((0, 2), (1, 3))  # rank by rank
INSIDE = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("groups", "whole", "expected"),
    [
        (ACROSS, Mesh(1, 4), Mesh(1, 2)),
        (ACROSS, Mesh(2, 2), Mesh(2, 1)),
        (INSIDE, Mesh(2, 2), Mesh(1, 2)),
        (((0,), (1,), (2,), (3,)), Mesh(2, 2), Mesh(1, 1)),
        (((0, 1, 2, 3),), Mesh(2, 2), Mesh(2, 2)),
    ],
)
def test_a_group_has_the_nodes_that_its_ranks_lie_on(
    groups: tuple[tuple[int, ...], ...], whole: Mesh, expected: Mesh
) -> None:
    for rank in range(4):
        holders = Holders(groups, rank)
        assert rank in holders.members and holders.mesh(whole) == expected
        assert holders.differ == (len(groups) > 1)


@pytest.mark.parametrize("groups", [((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 4), (3, 5))])
def test_groups_that_lie_unevenly_on_nodes_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="lie unevenly on nodes of 2 ranks") as refused:
        Holders(groups, 0).mesh(Mesh(3, 2))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("names", "sizes", "expected"),
    [
        (("dp", "ep"), (2, 2), (0,)),
        (("pp", "dp_replicate", "ep", "dp_shard"), (2, 2, 2, 2), (1, 3)),
        (("ep", "dp"), (4, 1), (1,)),
        (("cp", "dp", "experts"), (2, 1, 2), (0,)),
        (("rows",), (4,), (0,)),
        (None, (4,), (0,)),
    ],
)
def test_ranks_have_the_same_parameters_along_the_usual_names(
    names: tuple[str, ...] | None, sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert shared_dims(names, sizes) == expected


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("ep",), (4,), r"no data parallel dimension, only \['ep'\]"),
        (("pp", "ep"), (2, 2), r"no data parallel dimension, only \['pp', 'ep'\]"),
        (None, (2, 2), "2 dimensions without names"),
    ],
)
def test_a_mesh_without_ranks_of_the_same_parameters_is_refused(
    names: tuple[str, ...] | None, sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shared_dims(names, sizes)
