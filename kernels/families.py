"""Which family of kernels, a file of this folder, has which operators: what is asked for is loaded, and no more."""

from .table import operators_of

_FAMILIES = {
    "activation": (
        "Celu:12 Elu:6 Gelu:20 HardSigmoid:6 HardSwish:14 LeakyRelu:6 Mish:18 PRelu:7 Relu:6 Selu:6 Shrink:9 "
        "Sigmoid:6 Softplus:1 SwiGLU:28 Swish:24 ThresholdedRelu:10"
    ),
    "attention": "Attention:23 RotaryEmbedding:23",
    "attention_gradient": "irpar::AttentionForward:1 irpar::AttentionGradient:1",
    "block_quantized": "com.microsoft::MatMulNBits:1",
    "cast": "BitCast:26 Cast:6 CastLike:15",
    "channels_last": "irpar::ConvChannelsLast:1 irpar::GroupNormChannelsLast:1 irpar::PoolChannelsLast:1",
    "convolution": "Col2Im:18 Conv:1 ConvInteger:10 ConvTranspose:1 QLinearConv:10",
    "cross_entropy": "irpar::CrossEntropyForward:1 irpar::CrossEntropyGradient:1",
    "elementwise": (
        "Abs:6 Acos:7 Acosh:9 Add:7 Asin:7 Asinh:9 Atan:7 Atanh:9 BitShift:11 Ceil:6 Clip:6 Cos:7 Cosh:9 "
        "Det:11 Div:7 Erf:9 Exp:6 Floor:6 Log:6 Max:8 Mean:8 Min:8 Mod:10 Mul:7 Neg:6 Pow:7 Reciprocal:6 "
        "Round:11 Sign:9 Sin:7 Sinh:9 Softsign:1 Sqrt:6 Sub:7 Sum:8 Tan:7 Tanh:6"
    ),
    "fourier": "com.microsoft::Irfft:1 com.microsoft::Rfft:1",
    "fused": (
        "SimplifiedLayerNormalization:1 com.microsoft::BiasAdd:1 com.microsoft::BiasGelu:1 "
        "com.microsoft::BiasSplitGelu:1 com.microsoft::ComplexMul:1 com.microsoft::ComplexMulConj:1 "
        "com.microsoft::FastGelu:1 com.microsoft::FusedMatMul:1 com.microsoft::Gelu:1 "
        "com.microsoft::GroupNorm:1 com.microsoft::QuickGelu:1 com.microsoft::SkipGroupNorm:1 "
        "com.microsoft::SkipLayerNormalization:1 com.microsoft::SkipSimplifiedLayerNormalization:1"
    ),
    "fused_expression": "irpar::Fused:1 irpar::FusedEach:1",
    "fused_matmul": "irpar::FusedMatMul:1",
    "gated": "com.microsoft::RouterGateUpProj:1 com.microsoft::SwiGLU:1",
    "generate": "Constant:1 ConstantOfShape:9 Dropout:7 EyeLike:9 Range:11",
    "indexing": (
        "ArgMax:1 ArgMin:1 Compress:9 CumProd:26 CumSum:11 Gather:1 GatherElements:11 GatherND:11 NonZero:9 "
        "OneHot:9 ReverseSequence:10 Scatter:9 ScatterElements:11 ScatterND:11 TensorScatter:24 TopK:10 "
        "Unique:11 ai.onnx.ml::ArrayFeatureExtractor:1 irpar::AddRows:1"
    ),
    "linear_attention": (
        "CausalConvWithState:27 LinearAttention:27 com.microsoft::CausalConvWithState:1 "
        "com.microsoft::LinearAttention:1"
    ),
    "logic": (
        "And:7 BitwiseAnd:18 BitwiseNot:18 BitwiseOr:18 BitwiseXor:18 Equal:7 Greater:7 GreaterOrEqual:12 "
        "IsInf:10 IsNaN:9 Less:7 LessOrEqual:12 Not:1 Or:7 Where:9 Xor:7"
    ),
    "loss": "NegativeLogLikelihoodLoss:12 SoftmaxCrossEntropyLoss:12",
    "matmul": "Einsum:12 Gemm:7 MatMul:1 MatMulInteger:10",
    "normalization": (
        "BatchNormalization:9 GroupNormalization:18 Hardmax:1 InstanceNormalization:6 LRN:1 "
        "LayerNormalization:17 LogSoftmax:1 LpNormalization:1 MeanVarianceNormalization:9 RMSNormalization:23 "
        "Softmax:1"
    ),
    "optimizer": (
        "ai.onnx.preview.training::Adagrad:1 ai.onnx.preview.training::Adam:1 ai.onnx.preview.training::Momentum:1"
    ),
    "pad": "CenterCropPad:18 Pad:2",
    "pooling": "AveragePool:7 GlobalAveragePool:1 GlobalLpPool:2 GlobalMaxPool:1 LpPool:2 MaxPool:1 MaxUnpool:9",
    "quantization": (
        "DequantizeLinear:10 DynamicQuantizeLinear:11 QLinearMatMul:10 QuantizeLinear:10 "
        "com.microsoft::QuantizeLinear:1"
    ),
    "recurrent": "GRU:7 LSTM:7 RNN:7",
    "reduction": (
        "ReduceL1:1 ReduceL2:1 ReduceLogSum:1 ReduceLogSumExp:1 ReduceMax:1 ReduceMean:1 ReduceMin:1 "
        "ReduceProd:1 ReduceSum:1 ReduceSumSquare:1"
    ),
    "resize": "Resize:11 Upsample:9",
    "shared_matmul": "irpar::SharedMatMul:1",
    "shape": (
        "Concat:4 DepthToSpace:1 Expand:8 Flatten:1 Identity:1 Reshape:5 Shape:1 Size:1 Slice:1 "
        "SpaceToDepth:1 Split:2 Squeeze:1 Tile:6 Transpose:1 Trilu:14 Unsqueeze:1 com.microsoft::Trilu:1 "
        "irpar::JoinHeads:1"
    ),
    "signal": "BlackmanWindow:17 DFT:17 HammingWindow:17 HannWindow:17 MelWeightMatrix:17 STFT:17",
    "vision": "AffineGrid:20 GridSample:16 NonMaxSuppression:10 RoiAlign:10",
}
"""Family to its operators (`domain::operator` those of other domains), each with the first version that it computes."""

OPERATORS = operators_of(_FAMILIES)
"""(domain, operator) to its family, and to the first version that there is a kernel of."""
