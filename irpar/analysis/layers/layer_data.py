"""The numbers of one layer in the place of those of another."""

from irpar.analysis.equal_nodes import MAX_ELEMENTS, numbers_key
from irpar.ir import SlicedTensor, Tensor, Value

from .chain import MODEL, Chain


class LayerData:
    """The numbers of a layer in the place of those of the one that stands for it.

    Args:
        chain: with the layers.
        layer: which.
    """

    def __init__(self, chain: Chain, layer: int) -> None:
        pairs = zip(chain.own_of(MODEL), chain.own_of(layer), strict=True)
        self._known = {id(mine.data): other.data for mine, other in pairs if mine.data is not None}

    def of(self, data: Tensor) -> Tensor | None:
        """The numbers that stand for some of the layer; None where these are not its own."""
        known = self._known.get(id(data))
        if known is None and isinstance(data, SlicedTensor):
            base = self._known.get(id(data.base))
            return None if base is None else SlicedTensor(base, data.region)
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
        return wanted is its or (
            isinstance(wanted, SlicedTensor)
            and isinstance(its, SlicedTensor)
            and (wanted.base, wanted.region) == (its.base, its.region)
        )
