"""The transport of CPU ranks: near peers share memory with us, far peers exchange messages
(gloo); every pair of ranks is one or the other.

"shared_memory" is the case without far peers, "gloo" the one without near peers, "mixed" has both;
there is one implementation. A gather copies (or aliases) near slices and receives far ones
(``windows.py``). A reduce announces our slot to near peers, sends slices to far peers, and sums our
slice of everybody's part in the canonical order once it is complete (``collectives.py``,
``ordered.py``). Both wait through the control plane (``control.py``).

Invariant: every blocking call serves the near peers while it waits (those of all engines of the
process), so ranks may run units in different order. One-sided without far peers: a gather needs
nothing from the peers' programs but that they have published. With far peers the n-th operation of
a key meets the n-th.

Cost per rank, N equal shares, buffer of B bytes: a gather and a reduce bring ``B (N-1)/N`` each; of
that, near gathers of aliased windows move nothing. One control record per near peer and operation,
one message per far peer. Calls are for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.comm.cpu.collectives import Collectives
from zeroshard.comm.cpu.control import PeerControl
from zeroshard.comm.cpu.windows import Windows
from zeroshard.comm.transport import CommSpec
from zeroshard.core.digest import Digest


class PairedTransport:
    """A Transport over shared memory, gloo messages, or both, as `control` is connected."""

    def __init__(self, control: PeerControl, spec: CommSpec) -> None:
        self.control = control
        self.rank = control.rank
        self.size = control.size
        self.name = control.name
        self.one_sided = not control.far
        self.keyed = True
        self.traffic = control.traffic
        self.windows = windows = Windows(control, alias=spec.alias)
        self.collectives = collectives = Collectives(control, pool_bytes=spec.pool_bytes)
        # the calls of the protocol are theirs
        self.window = windows.make
        self.begin_write = windows.begin_write
        self.register = control.messages.register
        self.grad_buffer = collectives.grad_buffer
        self.return_buffer = collectives.slots.give
        self.reduce = collectives.reduce
        self.all_gather = collectives.all_gather
        self.broadcast = collectives.broadcast
        self.progress = control.progress
        self.give_up = control.give_up
        self.abandon = control.abandon
        self.close = control.close

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None: ...
