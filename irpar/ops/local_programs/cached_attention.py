"""The local program of Attention over a cache that is sharded: new keys and values join the blocks that they fall into.

y, pk, pv = Attention(q : [1, 8, 1, 64], k : [1, 8, 1, 64], v : [1, 8, 1, 64], past_k : [1, 8, 4095@sp, 64], past_v)
                                     4 devices hold 1024, 1024, 1024 and 1023 keys; the last takes the new one, and all
                                     score theirs as in `.attention`. Of 4096 keys before, a device would hand on those
                                     that its block of 4097 no longer has, 3 at most
"""

from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Value
from irpar.sharding.exchange import FILL, Exchange

from ..attention_sizes import Places, attention_sizes, static
from ..facts import needed, operand, tensor_of
from .attention import attended, is_covered, split_heads, statistics
from .exchange import MOST_PLACES, blocks_of, own, own_devices, perform, planned
from .exchange import sends as sends_of
from .program import Cuts, LocalProgram, ProgramWriter, Sent, Shape

_DIM = 2
"""The dim of keys in caches."""
_PASTS = (4, 5)
"""The operands that are caches, of keys and of values."""


def cache_dims(node: Node) -> Sequence[int] | None:
    """That of keys in the past ones, where the present ones are results as well."""
    if operand(node, 4) is None or not is_covered(node) or len(node.results) < 3:
        return None
    return (_DIM,) if static(attention_sizes(node).keys) <= MOST_PLACES else None


def _plan(node: Node, parts: int) -> Exchange:
    """Past keys to the blocks of present ones; new ones are missing."""
    past, present = needed(node, 4).shape[_DIM], static(attention_sizes(node).keys)
    places = [np.asarray(block, np.int64) for block in blocks_of(present, parts)]
    return planned([past], [np.where(block < past, block, FILL) for block in places], zero_fill=True)


def _sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    """What changes blocks, of keys and of values, and what `.attention` sends."""
    exchange = _plan(node, cuts[_DIM])
    moved = [sends_of(exchange, blocks[place] or (), _DIM, tensor_of(node, place).dtype.bits) for place in _PASTS]
    return [*moved[0], *moved[1], *statistics(node, blocks, cuts)]


def _write(program: ProgramWriter) -> list[Value]:
    of = attention_sizes(program.whole)
    key, value = (
        _appended(program, place, split_heads(program, needed(program.local, new), static(size)))
        for place, new, size in ((4, 1, of.head), (5, 2, of.value_head))
    )
    keys = Places(key.shape[_DIM], static(of.keys), program.lies.axes[_DIM])
    return [attended(program, key, value, keys), key, value]


def _appended(program: ProgramWriter, place: int, new: Value) -> Value:
    """The device's block of past keys or values and new ones."""
    past, parts = program.origin.shape[_DIM], program.lies.dim_parts(_DIM)
    ours = own_devices(program, _DIM)
    own_past, of = needed(program.local, place), needed(program.whole, place)
    held = perform(program, _plan(program.whole, parts), [own_past], _DIM, None, of)
    blocks = blocks_of(static(attention_sizes(program.whole).keys), parts)
    if all(blocks[at].stop <= past for at in ours):
        return held
    rows = [np.clip(np.asarray(block, np.int64) - past, 0, new.shape[_DIM] - 1) for block in blocks]
    added = program.op("Gather", [new, own(program, rows, _DIM, ours, "places")], {"axis": _DIM}, shape=held.shape)
    is_new = own(program, [np.asarray(block)[:, None] >= past for block in blocks], _DIM, ours, "is_new")
    return program.op("Where", [is_new, added, held], shape=held.shape, dtype=held.dtype)


CACHED = LocalProgram(_sends, _write, cache_dims, operand=4)
"""Along the keys of a past, which are reduced."""
