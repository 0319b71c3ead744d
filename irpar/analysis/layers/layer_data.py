"""The numbers of one layer in the place of those of another."""

from collections.abc import Hashable

from irpar.analysis.equal_nodes import MAX_ELEMENTS, numbers_key
from irpar.ir import ExternalTensor, LazyTensor, SlicedTensor, Tensor, Value, place_of

from .chain import MODEL, Chain


class LayerData:
    """The numbers of a layer in the place of those of the one that stands for it.

    Args:
        chain: with the layers.
        layer: which.
    """

    def __init__(self, chain: Chain, layer: int) -> None:
        pairs = zip(chain.own_of(MODEL), chain.own_of(layer), strict=True)
        held = [(mine.data, other.data) for mine, other in pairs if mine.data is not None]
        self._known = {id(mine): other for mine, other in held}
        self._places: dict[Hashable, Tensor | None] = {}
        for mine, other in held:
            # Several constants may lie at one place: which of them is meant nobody knows then.
            self._places[_elements(mine)] = None if _elements(mine) in self._places else other
        self._shared = chain.reshaped

    def of(self, data: Tensor) -> Tensor | None:
        """The numbers that stand for some of the layer; None where these are not its own."""
        known = self._known.get(id(data))
        if known is not None:
            return known
        if isinstance(data, SlicedTensor):
            base = self.of(data.base)
            return None if base is None else SlicedTensor(base, data.region)
        known = self._places.get(_elements(data))
        return None if known is None else self._reshaped(known, data.shape)

    def _reshaped(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        known = self._shared.get((id(data), shape))
        if known is None:
            known = self._shared[id(data), shape] = data.reshaped(shape)
        return known

    def are_alike(self, value: Value, other: Value) -> bool:
        """Whether a constant has the numbers that another one should have."""
        data, its = value.data, other.data
        if data is None or its is None:
            return data is its  # Inputs.
        wanted = self.of(data)
        if wanted is None:
            key = numbers_key(data) if data.size <= MAX_ELEMENTS else None
            return key is not None and key == numbers_key(its)
        return place_of(wanted) == place_of(its)


def _elements(data: Tensor) -> Hashable:
    """Equal for tensors that have the same elements, under whatever shape: they lie at one place, or are of one."""
    if isinstance(data, ExternalTensor):
        return data.path, data.offset, data.length, data.dtype
    return id((data.origin if isinstance(data, LazyTensor) else None) or data)
