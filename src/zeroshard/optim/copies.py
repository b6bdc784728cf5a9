"""Copies of the user's optimizer, to step parameters of our own or some of the user's; its modes;
and the check, on a copy, that it may step a parameter in pieces.

``TileOptimizer``: the user's ``optimizer.step()`` walks all param groups at once; state that rests
on another tier can only be stepped a tile at a time. This is the same optimizer (class, attributes)
with param groups and state of its own, so that it may step other parameters, in another thread,
while the user's own step goes on. Options that a step itself changes in its group (a counter) are
changed once per step, by the user's own call.

``state_after_trial``: whether an optimizer can go on from state that was read from somewhere, found
out before anything of its own changes. A copy steps a few elements of our own twice: the state that
it keeps then says which keys it needs and the kind of each.

Invariant: the user's optimizer, its parameters, options, state and hooks, and torch's random number
generators are as they were. Cost: a copy of each group's dictionary per tile; two steps of a few
elements per param group for a trial.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, TypeGuard

import torch
from torch import nn

from zeroshard.core.layout import Range
from zeroshard.core.shares import BLOCKS
from zeroshard.errors import ConfigError
from zeroshard.system.device import undisturbed

TRIAL_SHAPE = (8, 8)  # some rules take matrices alone
_TRIAL_STEPS = 2  # some rules make a buffer at the second step only


class TileOptimizer:
    """A stand-in for `optimizer` with the options that its groups have now; `off_device`: it
    steps on the host what computes on an accelerator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, off_device: bool) -> None:
        self._step = unhooked_step(type(optimizer))
        self._clone = object.__new__(type(optimizer))
        vars(self._clone).update(_attributes(optimizer))
        self._options = [_options(group, off_device) for group in optimizer.param_groups]

    def step(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        states: dict[torch.Tensor, dict[str, Any]],
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Step `parameters`, by the index of their param group, with their `states`; return the
        states afterwards.
        """
        self._clone.param_groups = [
            {**dict(self._options[index]), "params": list(members)}
            for index, members in parameters.items()
        ]
        self._clone.state = defaultdict(dict, states)
        self._step(self._clone)
        return self._clone.state


def _options(group: Mapping[str, Any], off_device: bool) -> dict[str, Any]:
    """Return a group's options for a step on the host.

    A model on an accelerator leaves the choice of kernel to torch, which on the host takes the
    slowest: the fused one is asked for there.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if not off_device:
        return options
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            options[key] = value.cpu()
    if (
        "fused" in options
        and not options["fused"]
        and not options.get("foreach")
        and not options.get("differentiable")
    ):
        options["fused"] = True
    return options


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the class's ``step`` without torch's wrapper around it, which runs the hooks
    registered for all optimizers.
    """
    step: Any = cls.step
    hooked = getattr(step, "hooked", False) and hasattr(step, "__wrapped__")
    return step.__wrapped__ if hooked else step  # type: ignore[no-any-return]


def set_training(optimizer: torch.optim.Optimizer) -> None:
    """Call the ``train()`` of an optimizer that has one: some step only then (schedule-free)."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy without state, groups and hooks, which reaches nothing of the user's.

    By hand: copy.copy() would keep the three attributes of ``Optimizer.__getstate__`` and lose a
    subclass's own. Attributes are copied deeply, but wherever they lead to a parameter of the
    user's they find a placeholder on the meta device.
    """
    clone = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone}
    for group in optimizer.param_groups:
        for param in group["params"]:
            memo[id(param)] = nn.Parameter(
                torch.empty(param.shape, dtype=param.dtype, device="meta"),
                requires_grad=param.requires_grad,
            )
    vars(clone).update(copy.deepcopy(_attributes(optimizer), memo))
    return clone


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that a copy without state and groups needs, with no hooks.

    Attributes that shadow methods are left out: every LR scheduler puts its own ``step`` there.
    """
    return {
        name: OrderedDict() if name.startswith("_optimizer_") and name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not callable(getattr(type(optimizer), name, None))
    }


def state_after_trial(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device,
    shape: Sequence[int] = TRIAL_SHAPE,
) -> dict[str, Any]:
    """Return the state that `optimizer` keeps of a parameter of its own of `dtype` and `shape` on
    `device`, in a param group of `options`, where the model computes on `home`.

    Raises whatever a step with these options raises.
    """
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
    own = _options(options, off_device=device.type != home.type)
    with undisturbed(device), torch.enable_grad():
        grads = [torch.ones_like(parameter)] * _TRIAL_STEPS
        return _step_copy(optimizer, own, {parameter: grads})[0]


def _step_copy(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    gradients: Mapping[nn.Parameter, Iterable[torch.Tensor]],
    state: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Step parameters of ours with each of their `gradients` by a copy of `optimizer`, in a param
    group of `options`, the first one from `state` on; return their states afterwards.
    """
    clone, parameters = bare_copy(optimizer), list(gradients)
    clone.param_groups = [{**copy.deepcopy(options), "params": parameters}]
    clone.state = defaultdict(dict, {parameters[0]: state} if state else {})
    set_training(clone)
    step = unhooked_step(type(clone))
    for grads in zip(*gradients.values(), strict=True):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.view(parameter.shape).clone()
        step(clone)
    return [dict(clone.state[parameter]) for parameter in parameters]


def fitted_state(state: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` in the dtypes and on the devices of `trial`, the state of another
    parameter; empty state stays empty.

    Raises ValueError saying which key is missing, or what kind it is and should be.
    """
    missing = [key for key in trial if key not in state]
    if state and missing:
        raise ValueError(f"{missing[0]!r} is missing")
    return {
        key: _fitted(key, value, trial[key]) if key in trial else value
        for key, value in state.items()
    }


def _fitted(key: str, value: Any, model: Any) -> Any:
    if _kind(value) != _kind(model):
        raise ValueError(f"{key!r} is {_kind(value)}, not {_kind(model)}")
    return value.to(model.device, model.dtype) if isinstance(model, torch.Tensor) else value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        numbers = (
            "floating point"
            if value.is_floating_point()
            else "complex"
            if value.is_complex()
            else str(value.dtype).removeprefix("torch.")
        )
        return f"a tensor of {numbers}" if value.dim() else f"a tensor of one number, {numbers}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a plain number"
    return f"a {type(value).__name__}"


# --------------------------------------------------------------------------- states of other shapes
# What a rule of blocks keeps of a parameter that is cut between blocks: tensors with numbers for
# each of them, which are cut with it, and others that every part has (a table of codes).


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor with memory of its own, not a subclass that wraps others."""
    return isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__")


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a state: itself, or what it wraps or has for items."""
    if is_plain(value):
        yield value
    elif isinstance(value, torch.Tensor):
        for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from plain_tensors(item)


def block_states(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, list[bool]] | None:
    """Return, by state that `optimizer` keeps of flat numbers, which of the tensors in it are cut
    with these; None where one is neither cut nor the same for any number of blocks.
    """
    try:
        with torch.compiler.set_stance("force_eager"):
            few, many = (
                state_after_trial(optimizer, options, dtype, device, device, (count * BLOCKS,))
                for count in (1, 2)
            )
        pairs = {
            key: list(zip(plain_tensors(few[key]), plain_tensors(many[key]), strict=True))
            for key in few
        }
    except Exception:
        return None
    if any(b.shape not in (a.shape, (2 * a.numel(),)) for each in pairs.values() for a, b in each):
        return None
    return {key: [a.shape != b.shape for a, b in each] for key, each in pairs.items()}


def joined(
    parts: Sequence[tuple[Range, Any]],
    here: Range,
    is_cut: Iterator[bool],
    shape: Sequence[int] = (-1,),
) -> Any:
    """Return a state of the elements `here` of a parameter, which have this `shape`, from states of
    `parts` of it, in order, that cover these; `is_cut`: of each tensor in it, `block_states`.
    """
    (_, value), numel = parts[0], here[1] - here[0]
    if is_plain(value):
        if not next(is_cut):
            return value
        rows = list[torch.Tensor]()
        for (start, stop), one in parts:
            low, high = max(start, here[0]) - start, min(stop, here[1]) - start
            length = stop - start
            rows.append(one.reshape(-1)[low * one.numel() // length : high * one.numel() // length])
        flat = torch.cat(rows)
        return flat.view(shape) if flat.numel() == numel else flat

    def inside(take: Callable[[Any], Any]) -> Any:
        return joined([(span, take(one)) for span, one in parts], here, is_cut, shape)

    if isinstance(value, torch.Tensor):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        tensors = {name: inside(attrgetter(name)) for name in names}
        like = torch.empty(numel, device="meta").view(shape)
        if isinstance(context, list | tuple):  # some keep their own shape there
            context = [like.shape if one == value.shape else one for one in context]
        kind: Any = type(value)
        return kind.__tensor_unflatten__(tensors, context, like.shape, like.stride())
    if isinstance(value, Mapping):
        return {key: inside(itemgetter(key)) for key in value}
    if isinstance(value, list | tuple):
        return type(value)(inside(itemgetter(index)) for index in range(len(value)))
    return value


# -------------------------------------------------------------------- modes of the user's optimizer
# Schedule-free optimizers (Defazio et al., The Road Less Scheduled, 2024) train at one point and
# evaluate at another, an average of where they have been. Their ``eval()`` moves the parameters
# there, and ``train()`` back, each element by itself. Here these parameters are shards of the
# masters, so the weights have to follow, on every rank, as after a step.


_MODES = ("train", "eval")


def modes_of(optimizer: torch.optim.Optimizer) -> Sequence[str]:
    """Return the names of ``train()`` and ``eval()`` where the class has both."""
    has_both = all(callable(getattr(type(optimizer), name, None)) for name in _MODES)
    return _MODES if has_both else ()


class HiddenMethod:
    """An entry in an optimizer's instance dictionary that hides a method until it is removed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, name: str, call: Callable[..., Any]
    ) -> None:
        """`call` is called with the method and its arguments."""
        self._entries, self._name, self._call = vars(optimizer), name, call
        self._own, self._method = self._entries.get(name), getattr(optimizer, name)
        # Accelerate reads the signature; the method may be one of these, with entries of its own
        self._entries[name] = update_wrapper(self, self._method, updated=())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(self._method, *arguments, **options)

    def remove(self) -> None:
        """Let the optimizer's own method be seen again."""
        del self._entries[self._name]
        if self._own is not None:
            self._entries[self._name] = self._own


# -------------------------------------------------------------------------------- elementwise rules
# ZeRO, section 5.1, partitions the optimizer: each rank steps flat slices of parameters and sees
# nothing else. That is the same training only if the rule is *elementwise*: a new element depends
# on the old element, its gradient and its moments, never on the shape, the norm or the other
# elements of its parameter. Known classes are looked up; any other is probed on a few thousand
# numbers. State that is older than the sharding is cut into the same slices.
#
# Cost: nothing for the known classes; under a tenth of a second per distinct param group for the
# others. A probe proves nothing: eight steps do not show a rule that looks at norms from its
# hundredth step on.


@dataclass(frozen=True)
class StepKind:
    """A kind of step, and the shares of a parameter with which it has the bits of one process."""

    name: str
    needs: str


@dataclass(frozen=True)
class Rule:
    """The kind of step of a class, and why."""

    kind: StepKind
    why: str


_CUTS_NEEDED = "cuts on multiples of 64 elements"
ELEMENTWISE = StepKind("elementwise", _CUTS_NEEDED)
WITH_MODES = StepKind("elementwise with modes", _CUTS_NEEDED)
BLOCKWISE = StepKind("blockwise", "ownership='whole'")
PER_TENSOR = StepKind("per tensor", "ownership='whole'")
MATRIX = StepKind("matrix", "ownership='whole'")
REFUSED = StepKind("refused", "another optimizer")

_ALONE = "an element depends on itself alone; the last ones of a kernel's vectors round otherwise"
# Classes by package and name, or packages. A subclass is of the same kind, except of an elementwise
# class: it is probed.
_KNOWN = (
    (
        ELEMENTWISE,
        _ALONE,
        "torch.ASGD torch.Adadelta torch.Adagrad torch.Adam torch.AdamW torch.Adamax torch.NAdam"
        " torch.RAdam torch.RMSprop torch.Rprop torch.SGD",
    ),
    (
        BLOCKWISE,
        "it quantises its states in blocks of a whole parameter",
        "torchao.Adam8bit torchao.Adam4bit torchao.AdamFp8 torchao.AdamW8bit torchao.AdamW4bit"
        " torchao.AdamWFp8",
    ),
    (
        PER_TENSOR,
        "it keeps second moments per row and column and scales by norms of whole parameters",
        "torch.Adafactor transformers.Adafactor",
    ),
    (MATRIX, "it orthogonalises whole matrices", "torch.Muon"),
    (
        REFUSED,
        "its history and line search take dot products over all parameters",
        "torch.LBFGS",
    ),
    (
        REFUSED,
        "it reads sparse gradients, and gradients here rest in dense flat buffers",
        "torch.SparseAdam",
    ),
    (
        REFUSED,
        "it steps inside the backward, with the gradients of one rank",
        "lomo_optim transformers.LayerWiseDummyOptimizer",
    ),
    (
        REFUSED,
        "it moves parameters and gradients into tensors of its own",
        "torch_npu",
    ),
    (
        REFUSED,
        "it projects gradients to a low rank by an object in its state, which no checkpoint holds",
        "galore_torch apollo_torch",
    ),
    (
        REFUSED,
        "it nests its states by views of a parameter, which no checkpoint holds",
        "heavyball",
    ),
    (
        REFUSED,
        "its states are in its param groups, where no checkpoint finds them, and it decays by a"
        " parameter's place there",
        "grokadamw.GrokAdamW",
    ),
)
RULES = {name: Rule(kind, why) for kind, why, names in _KNOWN for name in names.split()}

_REMEDY = "use an elementwise optimizer, for example torch.optim.AdamW"
WHOLE = (
    "give each rank whole parameters, with shard(ownership='whole') (DeepSpeed's JSON:"
    ' "zeroshard": {"ownership": "whole"})'
)
# of a state of another shape in equal parts
KEPT_STATES = (
    "let the optimizer keep tensors of the parameter's shape, tensors without dimensions such as"
    f" torch.tensor(0.0), and numbers, take torch.optim.AdamW, or {WHOLE}"
)

# The probe's parameter, as one matrix, one convolution kernel and one vector, and cut as a layout
# cuts it: on multiples of 64, unevenly (so that the blocks of a blockwise rule do not happen to
# match), with a tail that is no multiple of anything.
_SHAPES: tuple[tuple[int, ...], ...] = ((135, 243), (5, 27, 27, 9), (32805,))
_CUTS = ((0, 192), (192, 19264), (19264, 32805))
_BLOCK_CUTS = ((0, BLOCKS), (BLOCKS, 5 * BLOCKS), (5 * BLOCKS, 8 * BLOCKS))
# values and gradients of each piece: norms of pieces must differ from the norm of the whole
_SCALES = (1.0, 0.01, 30.0)
_NUM_STEPS = 8  # RAdam begins at its sixth
_MIN_LR = 1e-3  # a schedule that warms up from 0 would hide everything

# 0-d state of torch.optim that belongs to the whole parameter
SCALARS = frozenset({"eta", "mu", "mu_product", "step"})


def check_rule(
    optimizer: torch.optim.Optimizer, *, whole: bool = False, stacks: Container[int] = ()
) -> None:
    """Raise ConfigError unless `optimizer` gives the same bits on pieces of a parameter as on
    the whole; where each rank owns `whole` ones, on some parameters as on all. `stacks`: by id,
    those that are stepped by what the first dimension counts.

    Classes of torch.optim are known by name. Any other class, subclasses of the known ones
    included, is probed with the options of each param group: eight steps on one parameter whole,
    and on its pieces by optimizers that do not see each other, as on three ranks.
    """
    name, rule = type(optimizer).__qualname__, known_rule(optimizer)
    if rule is not None and rule.kind is ELEMENTWISE:
        return
    if rule is not None and (rule.kind is REFUSED or not whole):
        instead = _REMEDY if rule.kind is REFUSED else f"{WHOLE}, or {_REMEDY}"
        raise ConfigError(f"optimizer {name} cannot be sharded: {rule.why}; {instead}")
    _check_step(optimizer, name)
    probed: list[tuple[str, set[int]]] = []
    for index, group in enumerate(optimizer.param_groups):
        options = repr(
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
        )
        dims = {min(p.dim() - (id(p) in stacks), 4) for p in group["params"]} if whole else set()
        if (options, dims) not in probed:
            probed.append((options, dims))
            told = f"optimizer {name} (param group {index})"
            if whole:
                _probe_whole(optimizer, index, told, dims - {0})
            else:
                _probe(optimizer, index, told)


def known_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the rule of a known class, None of others."""
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        rule = RULES.get(f"{package}.{cls.__qualname__}") or RULES.get(package)
        if rule is not None and (cls is type(optimizer) or rule.kind is not ELEMENTWISE):
            return rule
    return None


def elementwise_rule(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of a class that a probe has found elementwise."""
    if modes_of(optimizer):
        return Rule(WITH_MODES, f"{_ALONE}; the weights follow train() and eval()")
    return Rule(ELEMENTWISE, _ALONE)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is known to step each element by itself."""
    rule = known_rule(optimizer)
    return rule is not None and rule.kind is ELEMENTWISE


def is_repeatable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is known to step by options of its groups, gradients and plain tensors of
    its states alone: taken again, a step has the same bits.
    """
    cls = type(optimizer)
    rule = RULES.get(f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}")
    return rule is not None and rule.kind in (ELEMENTWISE, PER_TENSOR, MATRIX)


def _check_step(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise ConfigError for a class with a ``step()`` that is not one step with one gradient."""
    for key, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer):
            kind = type(inner).__qualname__
            raise ConfigError(
                f"optimizer {name} cannot be sharded: it drives another optimizer, its {key!r}"
                f" ({kind}), which would go on with whole parameters; {_REMEDY}, or that {kind}"
                " alone"
            )
    if unhooked_step(type(optimizer)) is unhooked_step(torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer {name} cannot be sharded: it has no step() of its own, and other methods in"
            f" its place (SAM's first_step() and second_step()) go by norms of all parameters;"
            f" {_REMEDY}"
        )
    needed = [
        one.name
        for one in inspect.signature(type(optimizer).step).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ][1:]
    if needed:
        raise ConfigError(
            f"optimizer {name} cannot be sharded: its step() needs {needed[0]!r}, for gradients"
            f" at other weights than the model's; {_REMEDY}"
        )


def shard_state(
    state: dict[str, Any],
    param_shape: Sequence[int],
    piece_start: int,
    piece_stop: int,
    *,
    stride: Sequence[int] | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Return the part of one parameter's optimizer state that belongs to elements
    ``[piece_start, piece_stop)`` of it.

    Tensors of the parameter's shape are flattened in the order of the parameter's dense `stride`
    (default: row-major) and sliced, bf16 and fp16 ones lifted to fp32 as the master is; tensors of
    one element, numbers and None are copied. The result shares no memory with `state`. Raises
    ConfigError naming the key (and the parameter `name`) for anything else.
    """
    shape = torch.Size(param_shape)
    piece: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.shape == shape and not (value.dim() == 0 and key in SCALARS):
                flat = flatten(value.detach(), stride)[piece_start:piece_stop]
                is_half = value.dtype in (torch.bfloat16, torch.float16)
                piece[key] = flat.to(torch.float32) if is_half else flat.clone()
                continue
            if value.numel() == 1:
                piece[key] = value.detach().clone()
                continue
        elif value is None or isinstance(value, bool | int | float | complex):
            piece[key] = value
            continue
        what = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise ConfigError(
            f"optimizer state {key!r} of parameter {name!r} is {what}, and only tensors of the"
            f" parameter's shape {tuple(shape)}, one-element tensors and numbers can be cut: call"
            " shard() before the first optimizer.step()"
        )
    return piece


def flatten(tensor: torch.Tensor, stride: Sequence[int] | None) -> torch.Tensor:
    """Return the numbers of `tensor` in the order in which a dense `stride` lays them (default:
    row-major): a view, where they lie so.
    """
    if stride is None:
        return tensor.reshape(-1)
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -stride[dim])).reshape(-1)


_Steps = Callable[[tuple[int, ...], int, int], torch.Tensor]


def _trial(
    optimizer: torch.optim.Optimizer, index: int, *, fresh: bool = False
) -> tuple[torch.Tensor, torch.device, _Steps]:
    """Return values, their device, and what steps elements [start, stop) of them as a parameter of
    some shape under the options of param group `index`; `fresh`: from no state.
    """
    group = optimizer.param_groups[index]
    options = _options(group, off_device=False)
    model: Any = next(iter(group["params"]), None)
    device = _device_of(group)
    values, grads = _numbers(device)

    def steps(shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) after the steps of a parameter of `shape`. State that the
        constructor has made is filled with its first value.
        """
        if (lr := options.get("lr")) is not None and float(lr) < _MIN_LR:
            is_tensor = isinstance(lr, torch.Tensor)
            options["lr"] = torch.full_like(lr, _MIN_LR) if is_tensor else _MIN_LR
        parameter = nn.Parameter(values[start:stop].reshape(shape).clone())
        own: dict[str, Any] = {}
        for key, value in ({} if fresh else optimizer.state.get(model, {})).items():
            is_moment = isinstance(value, torch.Tensor) and value.shape == model.shape
            if is_moment and value.numel() > 0 and value.dim() > 0:
                first = value.detach().reshape(-1)[0].item()
                own[key] = torch.full(shape, first, dtype=value.dtype, device=device)
            else:
                own[key] = copy.deepcopy(value)
        _step_copy(optimizer, options, {parameter: grads[:, start:stop]}, own)
        return parameter.detach().reshape(-1)

    return values, device, steps


def _device_of(group: Mapping[str, Any]) -> torch.device:
    model = next(iter(group["params"]), None)
    return torch.device("cpu") if model is None or model.is_meta else model.device


def _probe(optimizer: torch.optim.Optimizer, index: int, name: str) -> None:
    """Raise ConfigError unless whole and pieces end with the same bits under the options of
    param group `index`.
    """
    values, device, steps = _trial(optimizer, index)
    with undisturbed(device):
        try:
            pieces = [steps((stop - start,), start, stop) for start, stop in _CUTS]
            wholes = {shape: steps(shape, 0, len(values)) for shape in _SHAPES}
        except Exception as error:
            said = f": {error}" if str(error) else ""
            raise ConfigError(
                f"{name} is not known to be elementwise, and a trial step raised"
                f" {type(error).__name__}{said}; {_REMEDY}"
            ) from error
    cut = torch.cat(pieces)
    if torch.equal(cut, values):
        raise ConfigError(
            f"{name} is not known to be elementwise, and a trial step changed nothing; {_REMEDY}"
        )
    for shape, whole in wholes.items():
        if not torch.isfinite(whole).all():
            raise ConfigError(
                f"{name} is not known to be elementwise, and a trial step gave numbers that are not"
                f" finite; {_REMEDY}"
            )
        differ = int((whole.view(torch.int32) != cut.view(torch.int32)).sum())
        if differ:
            raise ConfigError(
                f"{name} is not elementwise: in {_NUM_STEPS} trial steps {differ} of {cut.numel()}"
                f" elements of a parameter of shape {shape} came out differently when it was"
                f" stepped in pieces, as ZeRO does; {_REMEDY}, or {WHOLE}"
            )


def tried_rule(optimizer: torch.optim.Optimizer, index: int) -> Rule:
    """Return the rule that trial steps show of a class that is not known and passes `check_rule`,
    with the options of param group `index`.
    """
    for fresh in (True, False):  # a state may have blocks of another parameter
        values, device, steps = _trial(optimizer, index, fresh=fresh)
        with undisturbed(device):
            try:
                *shaped, flat = (steps(shape, 0, len(values)) for shape in _SHAPES)
                fine = torch.cat([steps((stop - start,), start, stop) for start, stop in _CUTS])
                break
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"
    else:
        return Rule(MATRIX, f"a trial step of a vector raised {raised}")
    if torch.equal(fine, flat) and all(torch.equal(one, flat) for one in shaped):
        return elementwise_rule(optimizer)
    if not all(torch.allclose(one, flat, rtol=1e-3) for one in shaped):
        return Rule(MATRIX, "a matrix is stepped otherwise than the vector of its numbers")
    if steps_blocks(optimizer, index):
        return Rule(BLOCKWISE, "pieces of whole blocks have the same bits")
    return Rule(PER_TENSOR, "pieces of a parameter come out otherwise")


def cuts_blocks(optimizer: torch.optim.Optimizer, index: int) -> bool:
    """Whether a parameter of param group `index` may be cut on multiples of `BLOCKS` elements: it
    has states in bytes, and trials keep the same ones of matrices and of flat numbers.
    """
    rule, options = known_rule(optimizer), optimizer.param_groups[index]
    if rule is not None:  # torchao's, which would be compiled for each trial
        return rule.kind is BLOCKWISE and not BLOCKS % getattr(optimizer, "block_size", BLOCKS)
    device, numel = _device_of(options), 2 * BLOCKS
    flags = block_states(optimizer, options, torch.float32, device) or {}

    def kept(*shape: int) -> dict[str, list[tuple[torch.dtype, int]]]:
        state = state_after_trial(optimizer, options, torch.float32, device, device, shape)
        tensors = {key: plain_tensors(value) for key, value in state.items()}
        return {key: [(one.dtype, one.numel()) for one in found] for key, found in tensors.items()}

    flat = kept(numel) if flags else {}
    pairs = chain.from_iterable(zip(flat[key], flags[key], strict=True) for key in flags)
    if not any(is_cut and dtype.itemsize == 1 for (dtype, _), is_cut in pairs):
        return False
    return flat == kept(64, numel // 64) and steps_blocks(optimizer, index)


def steps_blocks(optimizer: torch.optim.Optimizer, index: int) -> bool:
    """Whether trial steps with the options of param group `index` give the same bits on pieces of
    whole blocks as on a parameter.
    """
    _, device, steps = _trial(optimizer, index, fresh=True)
    numel = _BLOCK_CUTS[-1][1]
    with undisturbed(device):
        try:
            whole = [
                steps(shape, 0, numel) for shape in ((numel,), (BLOCKS // 16, numel * 16 // BLOCKS))
            ]
            pieces = [steps((stop - start,), start, stop) for start, stop in _BLOCK_CUTS]
        except Exception:
            return False
    return all(torch.equal(one, torch.cat(pieces)) for one in whole)


def _probe_whole(
    optimizer: torch.optim.Optimizer, index: int, name: str, dims: Iterable[int]
) -> None:
    """Raise ConfigError unless two parameters of these `dims` end with the same bits alone and
    together, under the options of param group `index`.
    """
    options = _options(optimizer.param_groups[index], off_device=False)
    values, grads = _numbers(torch.device("cpu"))

    def steps(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Return parameters of these shapes after the steps, beside one another."""
        own = {}
        for shape in shapes:
            numel = math.prod(shape)
            own[nn.Parameter(values[:numel].reshape(shape).clone())] = grads[:, :numel]
        _step_copy(optimizer, options, own)
        return [parameter.detach() for parameter in own]

    with undisturbed(torch.device("cpu")):
        for dim in sorted(dims):
            pair = (24, 16, 3, 3)[:dim], (8, 40, 3, 3)[:dim]
            try:
                together, alone = steps(*pair), [steps(shape)[0] for shape in pair]
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be sharded: a trial step on parameters of {dim} dimension(s)"
                    f" raised {type(error).__name__}: {error}"
                ) from error
            if not all(map(torch.equal, together, alone)):
                raise ConfigError(
                    f"{name} goes by numbers of all parameters together: in {_NUM_STEPS} trial"
                    f" steps one came out otherwise beside another; {_REMEDY}"
                )


def _numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [numel] and gradients [steps, numel], the same every time."""
    generator = torch.Generator().manual_seed(0)
    numel = _CUTS[-1][1]
    scale = torch.cat(
        [
            torch.full((stop - start,), size)
            for (start, stop), size in zip(_CUTS, _SCALES, strict=True)
        ]
    )
    values = torch.randn(numel, generator=generator) * scale
    grads = torch.randn(_NUM_STEPS, numel, generator=generator) * scale
    return values.to(device), grads.to(device)
