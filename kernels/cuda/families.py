"""Which family of CUDA kernels, a file of this folder, has which operators: as `irpar.kernels.families`."""

from ..table import operators_of

_FAMILIES: dict[str, str] = {
    "attention": "Attention:23",
    "attention_gradient": "irpar::AttentionForward:1 irpar::AttentionGradient:1",
    "block_quantized": "com.microsoft::MatMulNBits:1",
    "channels_last": "irpar::ConvChannelsLast:1",
    "convolution": "Conv:1",
    "copies": "Concat:4 Reshape:5 irpar::JoinHeads:1",
    "cross_entropy": "irpar::CrossEntropyForward:1 irpar::CrossEntropyGradient:1",
    "fused": "irpar::Fused:1 irpar::FusedEach:1",
    "group_norm_last": "irpar::GroupNormChannelsLast:1",
    "indexing": "Gather:1 OneHot:9 ScatterND:16 irpar::AddRows:1",
    "losses": "SoftmaxCrossEntropyLoss:12",
    "pooling": "AveragePool:7 MaxPool:1",
    "pooling_channels_last": "irpar::PoolChannelsLast:1",
    "rotary": "RotaryEmbedding:23",
    "shared_matmul": "irpar::SharedMatMul:1",
    "sums": "ReduceMean:18 ReduceSum:13",
}
"""Family to its operators (`domain::operator` those of other domains), each with the first version that it computes."""

OPERATORS = operators_of(_FAMILIES)
"""(domain, operator) to its family, and to the first version that there is a kernel of."""
