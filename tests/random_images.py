"""How to draw nodes on images and signals, losses, and products of quantised operands."""

import math

import numpy as np

from .random_graphs import F32, I8, I32, I64, U8, GraphMaker, Tensor, UnfitError


def _image(m: GraphMaker, rank: int = 4) -> Tensor:
    return m.tensor(least=rank, most=rank, dtypes=(F32,), fits=lambda shape: len(shape) == rank and 0 not in shape)


# -- images ---------------------------------------------------------------------------------------------------------


def affine_grid(m: GraphMaker) -> None:
    batch, height, width = m.number(1, 6), m.number(1, 4), m.number(1, 4)
    sizes = m.const([batch, m.number(1, 3), height, width])
    # Of a single place the corners are: -1 for ONNX, 1 for ONNX Runtime, 0 for PyTorch.
    aligned = m.number(0, 1) if min(height, width) > 1 else 0
    m.node("AffineGrid", [m.of_shape([batch, 2, 3]), sizes], align_corners=aligned)


def grid_sample(m: GraphMaker) -> None:
    data = _image(m)
    grid = m.of_shape([data.shape[0], m.size(), m.number(1, 4), 2], F32, -2, 2)
    modes = {"mode": "bilinear" if m.opset < 20 else "linear", "padding_mode": m.one_of(["zeros", "border"])}
    m.node("GridSample", [data, grid], **modes, align_corners=m.number(0, 1))


def roi_align(m: GraphMaker) -> None:
    data = _image(m)
    count = m.size()
    corners = np.random.default_rng(count).integers(0, 8, (count, 2)) / 4
    regions = m.given(np.concatenate([corners, corners + 1.5], 1).astype(np.float32), m.coin())
    of = m.of_shape([count], I64, 0, data.shape[0] - 1)
    m.node("RoiAlign", [data, regions, of], output_height=m.number(1, 3), output_width=2, sampling_ratio=2)


def col2im(m: GraphMaker) -> None:
    block = [m.number(1, 2), m.number(1, 2)]
    image = [m.number(2, 4), m.number(2, 4)]
    places = math.prod(size - reach + 1 for size, reach in zip(image, block, strict=True))
    data = m.of_shape([m.size(), m.number(1, 6) * math.prod(block), places])
    m.node("Col2Im", [data, m.const(image), m.const(block)])


def center_crop_pad(m: GraphMaker) -> None:
    data = m.tensor(least=1, fits=lambda shape: 0 not in shape)
    if m.coin():
        axes = m.axes(len(data.shape))
        m.node("CenterCropPad", [data, m.const([m.size() for _ in axes])], axes=axes)
    else:
        m.node("CenterCropPad", [data, m.const([size if m.coin() else m.size() for size in data.shape])])


def det(m: GraphMaker) -> None:
    size = m.number(1, 4)
    data = m.of_shape([*m.shape(0, 2), size, size], F32, -3, 3)
    m.node("Det", [data])


def max_pool_positions(m: GraphMaker) -> None:
    """The greatest of each window and where it is; at times put back where it was."""
    data = m.tensor(least=3, dtypes=(F32,), exact=True, fits=lambda shape: len(shape) > 2 and 0 not in shape)
    kernel = [m.number(1, min(size, 2)) for size in data.shape[2:]]
    windows = {"kernel_shape": kernel, "strides": kernel}
    values, positions = m.node("MaxPool", [data], 2, **windows)
    if m.coin():
        operands = [values, positions]
        if all(size % reach == 0 for size, reach in zip(data.shape[2:], kernel, strict=True)):
            operands += [m.const(list(data.shape))] if m.coin() else []
            m.node("MaxUnpool", operands, **windows)


def max_unpool(m: GraphMaker) -> None:
    """Every value at the first place of its window."""
    data = m.tensor(least=3, dtypes=(F32,), fits=lambda shape: len(shape) > 2 and 0 not in shape)
    whole = tuple(size if dim < 2 else 2 * size for dim, size in enumerate(data.shape))
    places = np.arange(math.prod(whole)).reshape(whole)
    for axis in range(2, len(whole)):
        places = places.take(range(0, whole[axis], 2), axis)
    kernel = [2] * (len(whole) - 2)
    m.node("MaxUnpool", [data, m.given(places, m.coin())], kernel_shape=kernel, strides=kernel)


# -- signals --------------------------------------------------------------------------------------------------------


def dft(m: GraphMaker) -> None:
    parts = m.number(1, 2)
    data = m.of_shape([*m.shape(1, 3), parts], F32, -3, 3)
    axis = m.number(0, len(data.shape) - 2)
    length = m.const(m.number(1, 8)) if m.coin() else None
    onesided = {"onesided": 1} if parts == 1 and m.coin() else {"inverse": m.number(0, 1)}
    if m.opset >= 20:
        m.node("DFT", [data, length, m.const(axis)], **onesided)
    else:
        m.node("DFT", [data, length], axis=axis, **onesided)


def stft(m: GraphMaker) -> None:
    signal = m.of_shape([m.size(), m.number(8, 16), 1], F32, -3, 3)
    frame = m.number(2, 6)
    window = m.of_shape([frame], F32, -3, 3) if m.coin() else None
    length = [] if window is not None else [m.const(frame)]
    m.node("STFT", [signal, m.const(m.number(1, 4)), window, *length], onesided=m.number(0, 1))


# -- losses ---------------------------------------------------------------------------------------------------------


def loss(op: str, m: GraphMaker) -> None:
    scores = m.tensor(least=2, low=-20, high=20, dtypes=(F32,), fits=lambda shape: len(shape) > 1 and 0 not in shape)
    classes = scores.shape[1]
    labels = m.of_shape([scores.shape[0], *scores.shape[2:]], m.one_of([I64, I32]), 0, classes - 1)
    weights = [m.of_shape([classes], F32, 0.25)] if m.number(0, 2) == 0 else []
    attributes = {"reduction": m.one_of(["none", "sum", "mean", "mean"])}
    if m.number(0, 4) == 0:
        attributes["ignore_index"] = -100
    results = m.number(1, 2) if op == "SoftmaxCrossEntropyLoss" else 1
    m.node(op, [scores, labels, *weights], results, **attributes)


# -- products of quantised operands ---------------------------------------------------------------------------------


def _scale(m: GraphMaker, count: int | None = None) -> Tensor:
    """Powers of two: nothing is lost on the way to a result that is rounded."""
    if count is None:
        return m.const(m.one_of([0.25, 0.5, 1.0]), F32)
    return m.given(np.resize(np.asarray([0.25, 0.5, 1.0, 2.0], np.float32), count), m.coin())


def qlinear_matmul(m: GraphMaker) -> None:
    a = m.tensor(least=2, most=3, dtypes=(U8,), fits=lambda shape: len(shape) > 1 and 0 not in shape)
    b = m.fresh([a.shape[-1], m.size()], U8, 0, 9)
    count = b.shape[1] if m.coin() else None
    points = m.fresh([count], U8, 0, 3) if count else m.const(1, U8)
    left = [a, _scale(m), m.const(m.number(0, 3), U8)]
    m.node("QLinearMatMul", [*left, b, _scale(m, count), points, _scale(m), m.const(m.number(0, 9), U8)])


def _kernel(m: GraphMaker, data: Tensor, dtype: np.dtype) -> tuple[Tensor, int]:
    """A kernel for the data, and how many groups it has."""
    channels, places = data.shape[1], data.shape[2:]
    group = m.one_of([count for count in range(1, channels + 1) if channels % count == 0])
    sizes = [m.number(1, min(size, 3)) for size in places]
    return m.fresh([group * m.number(1, 3), channels // group, *sizes], dtype, -9, 9), group


def conv_integer(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(U8,), fits=lambda shape: len(shape) > 2 and 0 not in shape)
    kernel, group = _kernel(m, data, U8)
    points = [m.const(m.number(0, 3), U8), m.const(m.number(0, 3), U8)]
    pads = [m.number(0, 1) for _ in range(2 * len(kernel.shape[2:]))]
    m.node("ConvInteger", [data, kernel, *points[: m.number(0, 2)]], group=group, pads=pads)


def qlinear_conv(m: GraphMaker) -> None:
    data = m.tensor(least=3, dtypes=(U8,), fits=lambda shape: len(shape) > 2 and 0 not in shape)
    kernel, group = _kernel(m, data, I8)
    count = kernel.shape[0] if m.coin() else None
    points = m.given(np.zeros(count, np.int8), True) if count else m.const(0, I8)
    bias = [m.fresh([kernel.shape[0]], I32, -20, 20)] if m.coin() else []
    if math.prod(kernel.shape[1:]) > 1000:
        raise UnfitError
    operands = [data, _scale(m), m.const(m.number(0, 3), U8), kernel, _scale(m, count), points]
    m.node("QLinearConv", [*operands, _scale(m), m.const(m.number(0, 9), U8), *bias], group=group)
