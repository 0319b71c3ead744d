"""com.microsoft's kernels: against ONNX Runtime where its CPU provider has the operator, else against ONNX's operators."""

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.ir import plain_attribute
from irpar.kernels import KernelError, lookup
from tests.ops.rule_proof import Array, Sample
from tests.ops.samples import SAMPLES

DOMAIN = "com.microsoft"
ON_CPU = {
    (found.domain, found.op_name)
    for found in runtime.get_all_opkernel_def()
    if found.provider == "CPUExecutionProvider"
}
SAME = [
    sample
    for sample in SAMPLES
    if (sample.domain, sample.op) in ON_CPU
    and (sample.domain == DOMAIN or sample.op == "SimplifiedLayerNormalization")
    and lookup(sample.domain, sample.op, sample.version)
]


def computed(
    op: str, *operands: Array | None, domain: str = DOMAIN, version: int = 1, results: int = 1, **attributes: object
) -> list[Array]:
    """The results of a kernel."""
    kernel = lookup(domain, op, version)
    assert kernel is not None
    return list(kernel(np, list(operands), attributes, results))


def normal(*shape: int) -> Array:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("sample", SAME, ids=str)
def test_as_onnx_runtime(sample: Sample) -> None:
    attributes = {name: plain_attribute(value) for name, value in sample.node.attributes.items()}
    found = computed(
        sample.op, *sample.arrays, domain=sample.domain, version=sample.version, results=sample.results, **attributes
    )
    named = [index for index, array in enumerate(sample.whole) if array.size]
    assert named
    for index in named:
        assert found[index].dtype == sample.whole[index].dtype
        np.testing.assert_allclose(found[index], sample.whole[index], rtol=1e-4, atol=1e-5)


def test_operators_that_onnx_runtime_has_too() -> None:
    assert {sample.op for sample in SAME} >= {"FastGelu", "FusedMatMul", "Gelu", "QuickGelu", "SkipLayerNormalization"}


def test_a_split_gelu_is_half_times_gelu_of_half() -> None:
    x, bias = normal(2, 3, 8), normal(8)
    left, right = np.split(x + bias, 2, axis=-1)
    (gelu,) = computed("Gelu", right, domain="", version=20)
    np.testing.assert_allclose(computed("BiasSplitGelu", x, bias)[0], left * gelu, rtol=1e-5)
    np.testing.assert_allclose(computed("BiasAdd", x, bias, x)[0], x + bias + x, rtol=1e-6)


def test_a_clamped_swiglu() -> None:
    gate, up = normal(3, 8) * 3, normal(3, 8)[::-1] * 3
    left, right = np.minimum(gate, 1), np.clip(up, -1, 1)
    expected = left / (1 + np.exp(-1.7 * left)) * (right + 0.5)
    settings = {"activation_alpha": 1.7, "activation_beta": 0.5, "limit": 1.0}
    np.testing.assert_allclose(computed("SwiGLU", gate, up, **settings)[0], expected, rtol=1e-5)
    np.testing.assert_allclose(computed("SwiGLU", np.concatenate([gate, up], -1), **settings)[0], expected, rtol=1e-5)
    (plain,) = computed("SwiGLU", gate, up, domain="", version=28, alpha=1.7)
    np.testing.assert_array_equal(computed("SwiGLU", gate, up, activation_alpha=1.7)[0], plain)
    half = computed("SwiGLU", gate.astype(np.float16), up.astype(np.float16), round_activation=1)[0]
    gated = computed("QuickGelu", gate.astype(np.float16), alpha=1.0)[0]
    np.testing.assert_array_equal(half, gated * up.astype(np.float16))
    with pytest.raises(KernelError, match="two halves"):
        computed("SwiGLU", normal(3, 5))


def test_the_first_product_of_experts_is_matmul_split_and_swiglu() -> None:
    x, weight = normal(2, 3, 4), normal(4, 3 + 2 * 5)
    columns = x @ weight
    router, activated = computed("RouterGateUpProj", x, weight, results=2, router_size=3, limit=1.0)
    np.testing.assert_allclose(router, columns[..., :3], rtol=1e-5)
    np.testing.assert_allclose(activated, computed("SwiGLU", columns[..., 3:], limit=1.0)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelError, match="two halves"):
        computed("RouterGateUpProj", x, weight, results=2, router_size=4)


def test_complex_products() -> None:
    a, b = normal(3, 4, 2), normal(3, 4, 2)[::-1].copy()
    x, y = (parts[..., 0] + 1j * parts[..., 1] for parts in (a, b))
    for op, expected in (("ComplexMul", x * y), ("ComplexMulConj", x * np.conj(y))):
        np.testing.assert_allclose(computed(op, a, b)[0], np.stack([expected.real, expected.imag], -1), rtol=1e-5)
    with pytest.raises(KernelError, match="2 parts of a number"):
        computed("ComplexMul", normal(3, 4), normal(3, 4))


@pytest.mark.parametrize("last", [0, 1])
def test_group_norm_is_that_of_onnx(last: int) -> None:
    image, gamma, beta, skip = normal(2, 8, 3, 5), normal(8), normal(8)[::-1].copy(), normal(2, 8)

    def placed(array: Array) -> Array:
        return np.moveaxis(array, 1, -1) if last else array

    attributes = {"num_groups": 4, "epsilon": 1e-5}
    expected = computed("GroupNormalization", image, gamma, beta, domain="", version=21, **attributes)[0]
    named = {"groups": 4, "activation": 0, "channels_last": last}
    np.testing.assert_allclose(
        computed("GroupNorm", placed(image), gamma, beta, **named)[0], placed(expected), atol=1e-5
    )
    silu = computed("GroupNorm", placed(image), gamma, beta, **{**named, "activation": 1})[0]
    np.testing.assert_allclose(silu, placed(expected / (1 + np.exp(-expected))), atol=1e-5)
    total = image + skip[:, :, None, None] + gamma[:, None, None]
    expected = computed("GroupNormalization", total, gamma, beta, domain="", version=21, **attributes)[0]
    y, found = computed("SkipGroupNorm", placed(image), gamma, beta, skip, gamma, results=2, **named)
    np.testing.assert_allclose(y, placed(expected), atol=1e-4)
    np.testing.assert_allclose(found, placed(total), rtol=1e-6, atol=1e-6)


def test_spectra_are_those_of_onnx() -> None:
    signal = normal(3, 8)
    (spectrum,) = computed("Rfft", signal, signal_ndim=1, onesided=1, normalized=0)
    (expected,) = computed("DFT", signal[..., None], None, np.asarray(1), domain="", version=20, onesided=1)
    np.testing.assert_allclose(spectrum, expected, atol=1e-5)
    np.testing.assert_allclose(computed("Irfft", spectrum, signal_ndim=1)[0], signal, atol=1e-5)
    with pytest.raises(KernelError, match="one-sided"):
        computed("Rfft", signal, signal_ndim=1, normalized=1)
