"""Dependencies point strictly down, read from the source: every import statement counts, also
those inside functions.

The layers are those of the design; within one layer a room may use another only in one direction.
Beside the engine lie the planner, the launcher, the commands that launch nothing, DeepSpeed's
stand-in and the formats of other programs (docs/design/README.md): the engine never imports them,
but for the doors named here.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "zeroshard"
TREES = {
    path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
}

LAYERS = {
    "_version": 0,
    "errors": 0,
    "core": 0,
    "memory": 0,
    "system": 0,
    "comm": 1,
    "tier": 1,
    "state": 2,
    "runtime": 3,
    "optim": 3,
    "nn": 3,
    "checkpoint": 4,
    "config": 4,
    "batches": 5,
    "sharding": 5,
    "hetero": 5,
    "zeroshard": 5,  # the package itself names what sharding/api.py offers
    # beside the engine; a folder in one of them may be a room of its own
    "terminal": 6,
    "planner": 6,
    "planner/modules": 6,
    "planner/activations": 6,
    "planner/plan_command": 6,
    "planner/plan_table": 6,
    "planner/walk_command": 6,
    "planner/film": 6,
    "deepspeed": 6,
    "deepspeed/keys": 6,
    "formats": 6,
    "commands": 6,
    "launch": 6,
    "launch/cli": 6,
    "integrations": 6,
    "integrations/deepspeed": 6,
    "__main__": 6,
}
ENGINE = {room for room, layer in LAYERS.items() if layer < 6}
STRANGERS = {("comm", "tier"), ("tier", "comm")}  # they meet in state/ and runtime/
# whose imports are named one by one
ONLY = {
    "core": {"errors"},
    "system": {"errors"},
    "terminal": {"core", "errors", "system"},
    "planner": {"core", "errors", "system"},
    # cuts a module as `shard` does, and reads this machine's free memory
    "planner/modules": {
        "_version", "config", "core", "errors", "hetero", "nn", "optim", "planner",
        "planner/activations", "runtime", "system", "tier",
    },
    "planner/activations": {"core", "errors", "planner", "runtime"},
    "planner/plan_command": {"core", "planner", "planner/modules", "planner/plan_table", "terminal",
        "zeroshard"},
    "planner/plan_table": {"core", "planner", "terminal", "zeroshard"},
    # reads whole weights from checkpoints, DeepSpeed's among them; its ranks meet without an engine
    "deepspeed": {
        "comm", "config", "core", "deepspeed/keys", "formats", "optim", "system", "zeroshard"
    },
    "deepspeed/keys": {"config", "errors"},
    # writes steps, and fills the shards of an engine
    "formats": {"_version", "checkpoint", "core", "errors", "nn", "runtime", "state", "system"},
    # what they show: steps, traces, trails, keys, this machine's rates, a model's text
    "commands": {
        "_version", "checkpoint", "comm", "config", "core", "deepspeed", "deepspeed/keys",
        "errors", "formats", "integrations", "memory", "planner", "sharding", "system", "terminal",
        "tier", "zeroshard",
    },
    # runs jobs, and prints nothing else; the program that gathers all commands is launch/cli
    "launch": {"deepspeed", "system", "terminal"},
    "integrations": {"zeroshard"},
    "integrations/deepspeed": {"deepspeed"},
}  # fmt: skip
# what the engine imports of the rooms beside it, inside functions or for type checking alone
DOORS = {
    "__init__.py": {"deepspeed", "deepspeed/keys", "formats", "planner", "planner/modules"},
    "config/native.py": {"deepspeed/keys"},  # for a configuration with a key that is not ours
    "config/reference.py": {"deepspeed/keys"},  # for the page about its keys
    "sharding/request.py": {"planner/modules"},  # for policy="auto"
}
# `core` decides from what it is given: it meets no other process and no operating system
IMPURE = re.compile(
    r"(ctypes|fcntl|glob|io|mmap|multiprocessing|os|pathlib|resource|secrets|select|selectors"
    r"|shutil|signal|socket|subprocess|tempfile|threading"
    r"|torch\.(cuda|distributed|multiprocessing))\b"
)

PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
PICKLING_CALLS = {f"{what}_object" for what in ("all_gather", "gather")} | {
    f"{what}_object_list" for what in ("broadcast", "scatter", "send", "recv")
}
MODULE_HOOKS = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
}
SHARED_HOOKS = {  # an optimizer has hooks of the same names, which are not meant
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
}


def _room_of(name: str) -> str:
    """What a file belongs to: ``comm/gloo.py`` -> ``comm``, ``planner/modules.py`` ->
    ``planner/modules``, ``errors.py`` -> ``errors``, ``__init__.py`` -> ``zeroshard``.
    """
    parts = name.removesuffix(".py").split("/")
    inner = "/".join(parts[:2])
    if inner in LAYERS:
        return inner
    return "zeroshard" if parts[0] == "__init__" else parts[0]


def _imports(tree: ast.AST, file_name: str) -> Iterator[str]:
    """Absolute names of what the file imports, wherever the statement stands."""
    here = ["zeroshard", *file_name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _rooms(tree: ast.AST, file_name: str) -> set[str]:
    """The rooms of ours that the file imports, its own included."""
    ours = {
        _room_of("/".join(name.split(".")[1:]))
        for name in _imports(tree, file_name)
        if name.split(".")[0] == "zeroshard"
    }
    return {room if room in LAYERS else "zeroshard" for room in ours}


def _edges(tree: ast.AST, file_name: str) -> set[str]:
    """The rooms of ours that the file uses, its own and those behind its doors excluded."""
    return _rooms(tree, file_name) - {_room_of(file_name)} - DOORS.get(file_name, set())


def _violations(tree: ast.AST, file_name: str) -> list[str]:
    room = _room_of(file_name)
    found = []
    for target in sorted(_edges(tree, file_name)):
        if LAYERS[target] > LAYERS[room]:
            beside = target not in ENGINE and room in ENGINE
            found.append(
                f"{file_name}: {room} (layer {LAYERS[room]}) imports {target} (layer"
                f" {LAYERS[target]}), which is {'beside the engine' if beside else 'above it'}"
            )
        if (room, target) in STRANGERS:
            found.append(f"{file_name}: {room} and {target} never import each other")
        if room in ONLY and target not in ONLY[room]:
            found.append(
                f"{file_name}: {room} may import {', '.join(sorted(ONLY[room]))} only, not {target}"
            )
    return found


def _impurities(tree: ast.AST, file_name: str) -> list[str]:
    """Return the imports and calls by which a file reaches out of its process."""
    found = [name for name in _imports(tree, file_name) if IMPURE.match(name)]
    calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return found + [called for called in calls if called == "open" or IMPURE.match(called)]


def _loaded(tree: ast.Module) -> ast.Module:
    """The file without its functions and without what is for type checkers alone."""

    class Loaded(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.If | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return Loaded().visit(ast.parse(ast.unparse(tree)))  # a copy


def _module_hooks(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, receiver = node.func.attr, ast.unparse(node.func.value)
        is_hook = name in MODULE_HOOKS or name.startswith("register_module_")
        if is_hook or (name in SHARED_HOOKS and not receiver.endswith("optimizer")):
            yield f"line {node.lineno}: {receiver}.{name}"


def _offers_nothing(tree: ast.Module) -> bool:
    return len(tree.body) == 1  # the docstring


def _imported(tree: ast.Module) -> set[str]:
    return {
        one.asname or one.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }


def _offered(tree: ast.Module) -> set[str] | None:
    """Return the names in ``__all__``, None where a module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name, _, value = ast.unparse(node).partition(" = ")
            if name.partition(":")[0] == "__all__":
                return set(re.findall(r"'(\w+)'", value))
    return None


def test_every_file_has_a_layer() -> None:
    assert [name for name in TREES if _room_of(name) not in LAYERS] == []


def test_modules_import_only_what_lies_below_them() -> None:
    assert [line for name, tree in TREES.items() for line in _violations(tree, name)] == []


def test_core_touches_no_process_group_socket_or_file() -> None:
    assert [
        f"{name}: {what}"
        for name, tree in TREES.items()
        if _room_of(name) == "core"
        for what in _impurities(tree, name)
    ] == []


def test_what_lies_behind_a_door_is_imported_when_it_is_asked_for() -> None:
    assert {name: _rooms(_loaded(TREES[name]), name) & rooms for name, rooms in DOORS.items()} == {
        name: set() for name in DOORS
    }


def test_within_a_layer_packages_use_each_other_in_one_direction_only() -> None:
    graph: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        room = _room_of(name)
        graph.setdefault(room, set()).update(
            target for target in _edges(tree, name) if LAYERS[target] == LAYERS[room]
        )
    # raises CycleError, which names the cycle
    list(graphlib.TopologicalSorter(graph).static_order())


def test_one_file_names_a_type_of_device() -> None:
    """CUDA and its kin stand in system/device.py; a kernel is written for one type."""
    allowed = {
        "system/device.py": None,
        "comm/kernels.py": None,
        "optim/sealed.py": {'" is_cuda is_cpu"'},  # among the attributes of a tensor
        # among what DeepSpeed says of torch's build
        "deepspeed/helpers.py": {'"cuda_version": torch.version.cuda or "0.0",'},
    }
    assert [
        f"{name}: {line.strip()}"
        for name in TREES
        for line in (SOURCE / name).read_text(encoding="utf-8").splitlines()
        if re.search("cuda", line, re.IGNORECASE)
        and (name not in allowed or line.strip() not in (allowed[name] or {line.strip()}))
    ] == []


def test_only_the_runtimes_hooks_file_registers_module_hooks() -> None:
    assert [
        f"{name}: {hook}"
        for name, tree in TREES.items()
        # those of a trace, and of detect_anomaly(), end with it
        if name not in ("runtime/hooks.py", "runtime/anomaly.py", "planner/activations.py")
        for hook in _module_hooks(tree)
    ] == []


def test_nothing_is_pickled() -> None:
    assert [
        f"{name}: {module}"
        for name, tree in TREES.items()
        for module in _imports(tree, name)
        if module.split(".")[0] in PICKLING
    ] == []


def test_no_object_travels_through_a_process_group() -> None:
    """torch.distributed pickles objects, and a peer's pickle runs what the peer chose."""
    called = [
        f"{name}: {node.attr}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS
    ]
    assert called == []


def test_only_the_command_that_finds_the_benchmarks_imports_what_lies_beside_the_package() -> None:
    beside = {"benchmarks", "examples", "scripts", "tests"}
    assert {
        name
        for name, tree in TREES.items()
        for module in _imports(tree, name)
        if module.split(".")[0] in beside
    } == {"launch/cli.py"}


def test_tests_reach_into_an_engine_through_one_file() -> None:
    parts = ("backward", "balance", "context", "finalizer", "hooks", "scaler", "sharded", "weights")
    private = re.compile(rf"\bengine\._[a-z]|\._({'|'.join(parts)})\b")
    tests = Path(__file__).resolve().parent
    assert [
        f"{path.relative_to(tests)}: {line.strip()}"
        for path in sorted(tests.rglob("*.py"))
        if path != tests / "support" / "inside.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if private.search(line) and "self._" not in line
    ] == []


def test_every_module_says_what_it_is_and_a_package_what_it_offers() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []
    offered = {name: _offered(tree) for name, tree in TREES.items()}
    public = ("__init__.py", "errors.py")
    assert [
        name
        for name, names in offered.items()
        if names is None and name.endswith(public) and not _offers_nothing(TREES[name])
    ] == []
    # another module has a list only where it hands on names of others
    assert [
        name
        for name, names in offered.items()
        if names is not None
        and not (name.endswith(public) or name.startswith("integrations/"))
        and names.isdisjoint(_imported(TREES[name]))
    ] == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("core/layout.py", "import zeroshard.comm.transport", "above"),
        ("core/layout.py", "def late():\n    from ..state.full import FullBuffer", "above"),
        ("runtime/unit.py", "from zeroshard import config", "above"),
        ("runtime/unit.py", "import zeroshard as zs", "above"),
        ("runtime/unit.py", "from zeroshard.planner import Plan", "beside the engine"),
        ("sharding/request.py", "from zeroshard.launch import cli", "beside the engine"),
        ("launch/run.py", "from zeroshard.commands import report", "deepspeed, system, terminal"),
        ("comm/gloo.py", "from zeroshard.tier import store", "never import each other"),
        ("planner/time.py", "from zeroshard.comm import transport", "core, errors, system only"),
        ("planner/time.py", "from zeroshard.launch import cli", "core, errors, system only"),
        (
            "integrations/lightning.py",
            "from zeroshard.runtime.engine import Engine",
            "may import zeroshard only",
        ),
    ],
)
def test_the_rules_catch_what_they_forbid(name: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in _violations(ast.parse(source), name))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("runtime/unit.py", "from . import hooks\nfrom zeroshard.optim.sealed import SealedGrad"),
        ("integrations/lightning.py", "import zeroshard as zs\nfrom zeroshard import Engine"),
        ("__init__.py", "from zeroshard.sharding.api import shard"),
        ("comm/gloo.py", "import torch\nfrom ..core.layout import Range"),
    ],
)
def test_the_rules_allow_what_the_design_allows(name: str, source: str) -> None:
    assert _violations(ast.parse(source), name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import socket",
        "from os import environ",
        "def late():\n    import torch.distributed as dist",
        "from torch import distributed",
        "def late(path):\n    return open(path)",
        "def late():\n    return torch.cuda.device_count()",
    ],
)
def test_the_rule_of_core_catches_what_it_forbids(source: str) -> None:
    assert _impurities(ast.parse(source), "core/layout.py") != []
    assert _impurities(ast.parse("import torch\nfrom math import prod"), "core/layout.py") == []


def test_the_hook_rule_tells_modules_from_optimizers() -> None:
    assert (
        list(
            _module_hooks(
                ast.parse(
                    "module.register_forward_hook(f)\nself.model.register_state_dict_pre_hook(f)"
                )
            )
        )
        != []
    )
    assert (
        list(
            _module_hooks(
                ast.parse(
                    "self.optimizer.register_state_dict_pre_hook(f)\nparameter.register_hook(f)"
                )
            )
        )
        == []
    )
