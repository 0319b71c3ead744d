"""Operators that run replicated on every device whatever they read, and why.

    NonZero                      the size of its result depends on data
    com.microsoft.BeamSearch     it runs other graphs in a loop of its own

Every operator of ONNX 1.23, and of com.microsoft in ONNX Runtime 1.32, has a rule or stands here, but those of
OPEN_BODIES, which are as their bodies are. What a later release brings has no rule yet: it runs whole, and the plan
says so.
"""

from collections.abc import Iterable, Iterator

SIZE = "the size of its result depends on data"
SEQUENCE = "sequences, optionals and maps are held in full"
RANDOM = "each device would draw random numbers of its own"
BODY = "its body runs replicated on every device"
MADE = "it makes a tensor from a few numbers: made once, it is a constant"
SCALE = "its scale comes from the greatest and smallest of all elements"
FILE = "it reads a file format as a whole"
GRADIENT = "it stands for a graph that computes gradients, which is not made yet"
SEARCH = "it belongs to a search over words that runs on one device"
PACKED = "its rows are packed: where a sequence starts depends on data"
LAYOUT = "its tensors have a layout of one kind of device, which ONNX Runtime makes on its own"
ORDER = "each step needs the one before"
NO_KERNEL = "it has no kernel on a CPU, so that no rule of it could be proven"
WEIGHTS = "its weights are packed for one device"
PADS = "its padding is computed, and so is the size of its result"
OLD = "it is an old name of FusedMatMul, which has a rule"
RARE = "no exporter is known to write it"
MEMORY = "it writes into memory of one device, at addresses or offsets that data give"
SPARSE = "its operand is a sparse tensor"

_ONNX: dict[str, tuple[str, ...]] = {
    SIZE: ("NonMaxSuppression", "NonZero", "StringNormalizer", "StringSplit", "Unique"),
    SEQUENCE: (
        *("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt"),
        *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
        "SplitToSequence",
    ),
    RANDOM: (*("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),),
    BODY: ("SequenceMap",),
    MADE: ("BlackmanWindow", "Constant", "HammingWindow", "HannWindow", "MelWeightMatrix", "Range"),
    FILE: ("ImageDecoder",),
}
_MICROSOFT: dict[str, tuple[str, ...]] = {
    SIZE: ("Tokenizer", "Unique"),
    RANDOM: ("BiasDropout", "BitmaskBiasDropout", "BitmaskDropout"),
    MADE: ("Range", "RelativePositionBias"),
    SCALE: ("DynamicQuantizeLSTM",),
    SEARCH: (
        *("BeamSearch", "BifurcationDetector", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"),
        *("GreedySearch", "NGramRepeatBlock", "Sampling", "WhisperBeamSearch"),
    ),
    PACKED: (
        *("PackedAttention", "PackedMultiHeadAttention", "PackedSparseAttentionIndexer", "PagedAttention"),
        *("RemovePadding", "RestorePadding", "SparsePagedAttention", "VarlenCausalConvWithState"),
        "VarlenNGramHashMapping",
    ),
    LAYOUT: (
        *("DequantizeWithOrder", "EPContext", "NhwcConv", "NhwcFusedConv", "QOrderedAttention", "QOrderedGelu"),
        *("QOrderedLayerNormalization", "QOrderedLongformerAttention", "QOrderedMatMul", "QuantizeWithOrder", "Snpe"),
    ),
    ORDER: ("AttnLSTM", "DynamicTimeWarping"),
    WEIGHTS: (
        *("DequantizeBFP", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "MatMulFpQ4"),
        *("MatMulNBitsMlp", "MatMulNBitsQkv", "QuantizeBFP"),
    ),
    PADS: ("ConvTransposeWithDynamicPads",),
    OLD: ("TransposeMatMul",),
    MEMORY: ("ConvStateReplay", "GatedDeltaNetStateReplay", "SpeculativePrefixCommit"),
    SPARSE: ("SparseToDenseMatMul",),
    NO_KERNEL: (
        *("BiasSoftmax", "DecoderAttention", "DynamicSparseAttention", "FusedMatMulActivation", "GatedDeltaNet"),
        *("GatedRelativePositionBias", "GemmFastGelu", "GemmFloat8", "GemmaRotaryEmbedding", "IsAllFinite"),
        *("HyperConnectionLowRankMix", "LongformerAttention", "Mamba2Verify", "MatMulNBitsQLoRA", "MatMulPacked"),
        *("MoEPacked", "MulInteger", "PackedSparseAttentionIndexerMerge", "QLinearReduceMean", "RMSNormRotary"),
        *("ReduceSumInteger", "SparseAttentionIndexer", "TorchEmbedding"),
    ),
    RARE: (
        *("EngramGate", "HyperConnectionPostMix", "HyperConnectionPreMix", "MaxpoolWithMask", "NGramHashMapping"),
        *("QEmbedLayerNormalization", "SampleOp", "SparseAttention", "WordConvEmbedding"),
    ),
}
_OTHERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("ai.onnx.ml", SEQUENCE): ("CastMap", "DictVectorizer", "ZipMap"),
    ("ai.onnx.preview", BODY): ("FlexAttention",),
    ("ai.onnx.preview.training", GRADIENT): ("Gradient",),
}


def _entries() -> Iterator[tuple[str, str, str]]:
    for why, names in _ONNX.items():
        yield from (("", name, why) for name in names)
    for why, names in _MICROSOFT.items():
        yield from (("com.microsoft", name, why) for name in names)
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
    """Why an operator always runs replicated on every device; None for one that has a rule, or that nobody knows."""
    return REPLICATE_ONLY.get((domain, op_type))
