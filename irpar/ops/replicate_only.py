"""Operators that run whole on every device whatever they read, and why.

    NonZero                      the size of its result depends on data
    com.microsoft.BeamSearch     it runs other graphs in a loop of its own

Every operator of ONNX, and of ONNX Runtime's com.microsoft, has a rule or stands here.
"""

from collections.abc import Iterable, Iterator

SIZE = "the size of its result depends on data"
SEQUENCE = "sequences, optionals and maps are held whole"
RANDOM = "each device would draw random numbers of its own"
BODY = "its body runs whole on every device"
MADE = "it makes a tensor from a few numbers: made once, it is a constant"
SHAPE = "it reads a shape, which is the same on every device: of a known size, it is a constant"
PLACE = "each element of its result depends on its place in the whole"
SCALE = "its scale comes from the greatest and smallest of all elements"
FILE = "it reads a file format as a whole"
SEARCH = "it runs other graphs in a loop of its own"
PACKED = "its rows are packed: where a sequence starts depends on data"
LAYOUT = "ONNX Runtime makes it for a layout or a device of its own, models do not have it"
ORDER = "each step needs the one before"
HASH = "it hashes neighbours together"
GRADIENT = "it stands for a graph that computes gradients, which is not made yet"
NO_KERNEL = "it has no kernel on CPUs, so that no rule of it could be proven"
ROUTING = "which expert a row goes to depends on data, and weights of experts are packed"
BLOCKS = "its blocks of packed weights run across rows"
PADS = "its padding is computed, and so is the size of its result"

_ONNX: dict[str, tuple[str, ...]] = {
    SIZE: ("NonMaxSuppression", "NonZero", "StringNormalizer", "StringSplit", "Unique"),
    SEQUENCE: (
        *("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt"),
        *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
        "SplitToSequence",
    ),
    RANDOM: (*("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),),
    BODY: ("If", "Loop", "Scan", "SequenceMap"),
    MADE: ("BlackmanWindow", "Constant", "HammingWindow", "HannWindow", "MelWeightMatrix", "Range"),
    SHAPE: ("Shape", "Size"),
    PLACE: ("EyeLike",),
    SCALE: ("DynamicQuantizeLinear",),
    FILE: ("ImageDecoder",),
}
_OTHERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("ai.onnx.ml", SEQUENCE): ("CastMap", "DictVectorizer", "ZipMap"),
    ("ai.onnx.preview", BODY): ("FlexAttention",),
    ("ai.onnx.preview.training", GRADIENT): ("Gradient",),
}


def _entries() -> Iterator[tuple[str, str, str]]:
    for why, names in _ONNX.items():
        yield from (("", name, why) for name in names)
    for (domain, why), names in _OTHERS.items():
        yield from ((domain, name, why) for name in names)


def _table(entries: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for domain, name, why in entries:
        assert (domain, name) not in found, f"{domain}.{name} stands here twice"
        found[domain, name] = why
    return found


REPLICATE_ONLY: dict[tuple[str, str], str] = _table(_entries())
"""(domain, operator) to the reason, in words that follow "because"."""


def why_replicated(domain: str, op_type: str) -> str | None:
    """Why an operator always runs whole on every device; None for one that has a rule, or that nobody knows."""
    return REPLICATE_ONLY.get((domain, op_type))
