"""Which dimensions of a mesh are data parallel, and where a rank is along the others."""

from __future__ import annotations

import pytest

from zeroshard.comm.device_mesh import Dims
from zeroshard.core.placement import Mesh, MeshPlace, OtherAxis
from zeroshard.errors import ConfigError


@pytest.mark.parametrize("names", [None, ("dp",), ("fsdp",), ("tp",)])
def test_a_mesh_of_one_dimension_is_data_parallel_whatever_its_name(
    names: tuple[str, ...] | None,
) -> None:
    dims = Dims.of(names, (4,))
    assert (dims.data, dims.beside, dims.others, len(dims.places)) == ((0,), (), (), 1)
    assert dims.place((3,)) == MeshPlace()


@pytest.mark.parametrize(
    ("names", "sizes", "data", "beside", "node_size"),
    [
        (("dp", "pp"), (2, 3), (0,), (1,), None),
        (("pp", "dp"), (3, 2), (1,), (0,), None),
        (("pp", "dp_shard", "tp"), (2, 4, 2), (1,), (0, 2), None),
        (("dp_replicate", "tp"), (2, 2), (0,), (1,), None),
        (("pp", "dp_replicate", "dp_shard", "tp"), (2, 3, 4, 2), (1, 2), (0, 3), 4),
        (("dp_replicate", "dp_shard"), (1, 4), (1,), (), None),  # one node
        (("dp_replicate", "dp_shard"), (4, 1), (0,), (), None),
        (("dp_replicate", "dp_shard", "pp"), (1, 1, 2), (0,), (2,), None),
        (("pp", "dp", "tp"), (1, 4, 1), (1,), (), None),  # axes of one rank are nothing
        (("dp", "cp", "tp"), (2, 2, 2), (0, 1), (2,), None),
        (("dp_replicate", "dp_shard", "cp"), (2, 4, 2), (0, 1, 2), (), 8),
    ],
)
def test_dimensions_are_found_by_name_in_any_order(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    data: tuple[int, ...],
    beside: tuple[int, ...],
    node_size: int | None,
) -> None:
    dims = Dims.of(names, sizes)
    assert (dims.data, dims.beside, dims.node_size) == (data, beside, node_size)
    assert [axis.name for axis in dims.others] == [names[index] for index in beside]


def test_the_mesh_counts_data_parallel_ranks_and_knows_the_other_axes() -> None:
    others = Dims.of(("pp", "dp", "tp"), (2, 8, 4)).others
    assert others == (OtherAxis("pp", 2, alike=False), OtherAxis("tp", 4, alike=True))
    mesh = Mesh.of(8, 4, others)
    assert (mesh.size, mesh.num_nodes, mesh.others) == (8, 2, others)


def test_a_place_tells_groups_apart_and_counts_replicas_once() -> None:
    dims = Dims.of(("pp", "dp", "tp"), (2, 2, 2))
    places = {(pp, tp): dims.place((pp, dp, tp)) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)}
    assert places[1, 0] == MeshPlace("pp=1, tp=0", "pp=1", frozenset({"tp"}), is_first=True)
    assert places[1, 1] == MeshPlace("pp=1, tp=1", "pp=1", frozenset(), is_first=False)
    assert [place.is_first for place in places.values()] == [True, False, True, False]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "2 dimensions without names"),
        (("dp", "dp"), "several dimensions 'dp'"),
        (("pp", "tp"), r"no data parallel dimension, only \['pp', 'tp'\]"),
        (("dp", "ep"), "mesh dimension 'ep' is not known"),
        (("dp", "dp_shard"), r"data parallel dimensions \['dp', 'dp_shard'\]: name one"),
        (("dp_shard", "dp_replicate"), "in this order"),
    ],
)
def test_several_dimensions_say_which_are_data_parallel(
    names: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Dims.of(names, (2, 2))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("dp", "sizes", "data", "node_size"),
    [
        ("data", (2, 3, 2), (1,), None),
        (("data",), (2, 3, 2), (1,), None),
        (("hosts", "data"), (2, 3, 2), (0, 1), 3),
        (("hosts", "data"), (1, 3, 2), (1,), None),
        (("hosts", "data"), (2, 1, 2), (0,), None),
    ],
)
def test_dimensions_of_any_name_are_data_parallel_where_they_are_named(
    dp: str | tuple[str, ...], sizes: tuple[int, ...], data: tuple[int, ...], node_size: int | None
) -> None:
    names = ("hosts" if "hosts" in dp else "pp", "data", "tp")
    dims = Dims.of(names, sizes, dp)
    assert (dims.data, dims.node_size) == (data, node_size)


@pytest.mark.parametrize(
    ("dp", "message"),
    [
        ("rows", r"dp=\['rows'\]: mesh has no dimension 'rows', only \['data', 'dp', 'tp'\]"),
        ((), "names no dimension"),
        (("dp", "data"), "in another order than the mesh"),
        ("tp", "'tp' is the name of an axis along which nothing is reduced"),
        ("dp", "mesh dimension 'data' is not known"),
    ],
)
def test_names_of_dimensions_that_the_mesh_does_not_have_so_are_refused(
    dp: str | tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Dims.of(("data", "dp", "tp"), (2, 2, 2), dp)
    assert "\n" not in str(refused.value)
