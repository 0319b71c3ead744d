"""The fewest annotations that come to the same: of dims that lie alike one is enough where completion finds the rest.

x : [8@dp, 64] and mask : [8@dp] go together, so that one line says it; w1 : [64, 256@tp] says w2 : [256@tp, 64] too.
What completion would decide otherwise, and worse, stays said.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from irpar.ir import Value

from .cut_classes import CutClasses
from .file import Spec

_V = TypeVar("_V")
Missing = Callable[[_V], Sequence[str] | None]
"""Which entries a result lacks, given or not; None where it is what it should be."""


def alike(
    tensors: Mapping[str, Spec], values: Mapping[str, Sequence[Value]], classes: Sequence[CutClasses]
) -> dict[str, Hashable]:
    """For each entry what it has in common with those that completion may derive from it.

    Args:
        tensors: the entries.
        values: by name.
        classes: for each list of axes that cut something.
    """
    return {name: _key(name, spec, values.get(name, ()), classes) for name, spec in tensors.items()}


def _key(name: str, spec: Spec, values: Sequence[Value], classes: Sequence[CutClasses]) -> Hashable:
    for dim, axes in enumerate(spec):
        for known in classes if axes else ():
            if tuple(map(str, known.axes)) != axes:
                continue
            for value in values:
                held = known.class_of(value, dim)
                if held is not None:
                    return axes, held.number
    return name


def fewest(
    tensors: Mapping[str, Spec],
    keys: Mapping[str, Hashable],
    run: Callable[[dict[str, Spec]], _V],
    missing: Missing[_V],
) -> _V | None:
    """What the fewest entries come to that give the same as all.

    Args:
        tensors: the entries, in order of the model: of entries that are alike the first stays.
        keys: equal for those that are alike.
        run: what some entries come to.
        missing: says which entries that result lacks.

    Returns:
        None where no fewer entries were found.
    """
    first: dict[Hashable, str] = {}
    for name in tensors:
        first.setdefault(keys[name], name)
    kept = dict.fromkeys(first.values())
    count = 1
    while len(kept) < len(tensors):
        found = run({name: spec for name, spec in tensors.items() if name in kept})
        lacks = missing(found)
        if lacks is None:
            return found
        back: Counter[Hashable] = Counter()
        for name in lacks:
            if name in tensors and name not in kept and back[keys[name]] < count:
                back[keys[name]] += 1
                kept[name] = None
        if not back:
            return None
        # Of a class that does not hang together one by one would take as many rounds as it has entries.
        count *= 2
    return None


def without_needless(
    entries: Mapping[str, Spec], order: Sequence[str], is_enough: Callable[[dict[str, Spec]], bool], tries: int
) -> dict[str, Spec]:
    """What is left of entries, of which any that can be is left out: twice as many at once after each that could.

    Args:
        entries: that are enough.
        order: of their names, those first that are needed least.
        is_enough: says whether some of the entries come to the same.
        tries: how often it may be asked.
    """
    kept = dict(entries)
    start, count = 0, 1
    while start < len(order) and tries > 0:
        group = order[start : start + count]
        rest = {name: spec for name, spec in kept.items() if name not in group}
        tries -= 1
        if is_enough(rest):
            kept = rest
            start, count = start + len(group), 2 * count
        elif len(group) > 1:
            count = 1
        else:
            start += 1
    return kept
