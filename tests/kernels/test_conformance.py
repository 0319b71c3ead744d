"""Every kernel against ONNX's own backend cases, on read-only operands."""

import numpy as np
import pytest

from .conformance import Case, cases

# Cases whose data is not what irpar gives, and why.
EXCLUDED = {
    **dict.fromkeys(
        (
            "test_training_dropout",
            "test_training_dropout_default",
            "test_training_dropout_default_mask",
            "test_training_dropout_mask",
        ),
        "training draws random numbers; the kernel refuses it",
    ),
    **dict.fromkeys(
        (
            "test_resize_downsample_scales_linear_align_corners",
            "test_resize_downsample_scales_cubic_align_corners",
        ),
        "the data aligns the corner of a fractional length; the operator's text and ONNX Runtime align the whole one",
    ),
}

# Cases whose data was rounded to a small float at every step, where the kernels accumulate in float32: two units apart.
_BFLOAT16_RTOL = 2 * 2.0**-7
_FLOAT16_RTOL = 2 * 2.0**-10
ROUNDED_AT_EVERY_STEP = {
    "test_attention_3d_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_3d_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_attn_mask_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_attn_mask_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_causal_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_causal_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_causal_fp16_expanded": _FLOAT16_RTOL,
    "test_attention_4d_causal_padded_kv_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_causal_padded_kv_bf16_expanded": _BFLOAT16_RTOL,
    "test_attention_4d_padded_kv_bf16": _BFLOAT16_RTOL,
    "test_attention_4d_padded_kv_bf16_expanded": _BFLOAT16_RTOL,
}

FEWEST_CASES = 1720
FEWEST_OPERATORS = 175


@pytest.fixture(scope="module")
def all_cases() -> list[Case]:
    return list(cases())


def test_cases_give_the_case_data(all_cases):
    failures = []
    checked = [case for case in all_cases if case.name not in EXCLUDED]
    for case in checked:
        try:
            _check(case)
        except (AssertionError, ValueError) as error:
            failures.append(f"{case.name}: {error}")
    assert not failures, "\n".join(failures)
    assert len(checked) >= FEWEST_CASES
    assert len({call.kernel.op_type for case in checked for call in case.calls}) >= FEWEST_OPERATORS


def test_excluded_cases_do_fail(all_cases):
    found = {case.name: case for case in all_cases if case.name in EXCLUDED}
    assert found.keys() == EXCLUDED.keys()
    for case in found.values():
        with pytest.raises((AssertionError, ValueError)):
            _check(case)


def _check(case: Case) -> None:
    rtol = ROUNDED_AT_EVERY_STEP.get(case.name, case.rtol)
    results = case.run()
    for name, expected in case.outputs.items():
        result = results[name]
        assert result.dtype == expected.dtype, f"{result.dtype} instead of {expected.dtype}"
        assert result.shape == expected.shape, f"shape {result.shape} instead of {expected.shape}"
        if expected.dtype == object:
            assert result.tolist() == expected.tolist()
            continue
        if expected.dtype.kind == "V":  # a type of ml_dtypes, which NumPy's comparison does not know
            result, expected = result.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=case.atol)
