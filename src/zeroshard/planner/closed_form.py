"""Activations of a decoder whose sizes are known, without its code: a trace in closed form.

arXiv 2205.05198, section 4.1, without dropout and with attention that keeps no s x s matrix. With
`checkpointing` every layer keeps its input, and the one under way everything. A model of which
nothing is known but its parameters has a trace without activations.

Cost: at most 9 layers are walked, whatever the model's depth: between the first and the last of
them everything grows or shrinks evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zeroshard.planner.activation_trace import ActivationTrace, Moment
from zeroshard.planner.model import Decoder, ModelShape, UnitShape
from zeroshard.planner.training import Training

_SHOWN = 8  # equal layers that are walked one by one; those between them are taken as one


def layer_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes that the forward of one layer leaves for its backward.

    Per token: the inputs of both norms, of the projections and of the MLP, q, k, v and the
    attention's output; of the MLP what goes into its activation and out of it, of a gated one both
    factors as well.
    """
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = 3 * decoder.hidden + 2 * q + 2 * kv
    mlp = decoder.hidden + (4 if decoder.gated else 2) * decoder.ffn
    return (attention + mlp) * training.tokens * _itemsize(training)


def kept_bytes(decoder: Decoder | None, training: Training) -> int:
    """Return the bytes of one layer that stay between its forward and its backward."""
    if decoder is None:
        return 0
    if training.checkpointing:  # its input
        return decoder.hidden * training.tokens * _itemsize(training)
    return layer_bytes(decoder, training)


def logit_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes of the logits in the compute dtype, in fp32, and of their gradient."""
    return decoder.vocab * training.tokens * (_itemsize(training) + 8)


def closed_form(model: ModelShape, training: Training) -> ActivationTrace:
    """Return the trace of a model whose units run in order, the layers of its decoder as
    `layer_bytes` says. Without a decoder there are no activations in it.
    """
    decoder = model.decoder
    layer = 0 if decoder is None else layer_bytes(decoder, training)
    kept = kept_bytes(decoder, training)
    logits = 0 if decoder is None else logit_bytes(decoder, training)

    order = list(_in_order(model.units, 0 if decoder is None else decoder.layers))
    forward, held = [], 0
    for unit, repeats, is_layer in order:
        inside = held + (layer if is_layer else 0)
        forward.append(Moment("gather", unit, 0, inside, 0, repeats))
        held += kept * repeats if is_layer else 0
        forward.append(Moment("release", unit, 0, held, 0, repeats))
    turn = Moment("turn", activations=held + logits, logits=logits)
    backward = []
    for unit, repeats, is_layer in reversed(order):
        # the logits' gradient lives until the unit that made them is done
        loss = logits if unit == order[-1][0] else 0
        extra = layer - kept if is_layer else 0
        first, held = held + extra, held - (kept * repeats if is_layer else 0)
        last = held + (layer if is_layer else 0)
        backward.append(Moment("gather", unit, 0, first + loss, loss, repeats))
        for number, group in enumerate(model.units[unit].groups):
            if group.trained:
                backward.append(Moment("gradient", unit, number, first + loss, loss, repeats))
        backward.append(Moment("reduce", unit, 0, last, 0, repeats))
        backward.append(Moment("release", unit, 0, held, 0, repeats))
    moments = (*forward, turn, *backward, Moment("end"))
    return ActivationTrace(moments, training.tokens, training.checkpointing)


def _in_order(units: Sequence[UnitShape], layers: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the units that are walked: number, how many equal ones it stands for, and whether it
    is a layer.
    """
    shapes = [tuple(_sizes(group.shapes) for group in unit.groups) for unit in units]
    common, count = Counter(shapes).most_common(1)[0]
    run = [number for number, shape in enumerate(shapes) if shape == common]
    skipped = run[_SHOWN // 2 : -_SHOWN // 2] if len(run) > _SHOWN + 1 else []
    if run != list(range(run[0], run[0] + len(run))):
        skipped = []
    left_out = set(skipped[1:])
    for number in range(len(units)):
        if number not in left_out:
            is_layer = bool(layers) and (count != layers or shapes[number] == common)
            yield number, len(skipped) if skipped[:1] == [number] else 1, is_layer


def _sizes(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for _, shape in shapes)


def _itemsize(training: Training) -> int:
    return round(training.formats(None).weight.bytes_per_element)
