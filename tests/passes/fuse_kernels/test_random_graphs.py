"""fuse-kernels: random graphs compute the same, fused in place and by stand-ins."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from tests.budget import budget

from ..golden import read, run_pipeline
from .texts import computed, graph

SIZES = ((6, 8), (6, 1), (1, 8), (8,), (), (6, 8, 4), (6, 8, 1))
ONE = ("Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Softplus", "Erf")
TWO = ("Add", "Sub", "Mul", "Max", "Min")


def random_graph(draw: Any) -> str:
    """Nodes of any of the values before them: elementwise, of rows, products, views; several results."""
    values = {
        f"v{place}": shape for place, shape in enumerate(draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4)))
    }
    takes = ", ".join(f"%{name}: {typed(shape)}" for name, shape in values.items())
    lines = ["%axes = constant : i64[1] [-1]"]
    backward = draw(st.integers(1, 14))
    for place in range(draw(st.integers(3, 14))):
        name, kind = (
            f"t{place}",
            draw(st.sampled_from(("one", "two", "two", "softmax", "mean", "norm", "product", "turn"))),
        )
        first, shape = draw(st.sampled_from(sorted(values.items())))
        if kind == "two":
            second, other = draw(st.sampled_from(sorted(values.items())))
            if not fits(shape, other):
                continue
            made, text = np.broadcast_shapes(shape, other), f"{draw(st.sampled_from(TWO))}(%{first}, %{second})"
        elif kind == "softmax" and shape:
            made, text = shape, f"Softmax(%{first}) {{axis={draw(st.integers(-len(shape), -1))}}}"
        elif kind == "mean" and shape:
            keeps = draw(st.booleans())
            made = (*shape[:-1], 1) if keeps else shape[:-1]
            text = f"ReduceMean(%{first}, %axes) {{keepdims={int(keeps)}}}"
        elif kind == "norm" and (8,) in values.values() and shape[-1:] == (8,):
            scale = next(name for name, other in values.items() if other == (8,))
            made, text = shape, f"LayerNormalization(%{first}, %{scale}) {{axis=-1}}"
        elif kind == "product" and len(shape) == 2 and shape[1] == 8:
            made, text = (shape[0], shape[0]), f"MatMul(%{first}, %{first}_t)"
            turned = f"%{first}_t = Transpose(%{first}) : {typed(shape[::-1])}"
            lines += [turned] if turned not in lines else []
        elif kind == "turn" and len(shape) == 2:
            made, text = shape[::-1], f"Transpose(%{first})"
        else:
            made, text = shape, f"{draw(st.sampled_from(ONE))}(%{first})"
        if place >= backward:
            text = f"{text[:-1]} | phase=backward}}" if text[-1] == "}" else f"{text} {{| phase=backward}}"
        lines.append(f"%{name} = {text} : {typed(made)}")
        values[name] = made
    own = [name for name in values if name[0] == "t"] or [*values]
    gives = draw(st.lists(st.sampled_from(own), min_size=1, max_size=4, unique=True))
    return graph(*lines, takes=takes, gives=", ".join(f"%{name}" for name in gives))


def typed(shape: tuple[int, ...]) -> str:
    return f"f32[{', '.join(map(str, shape))}]"


def fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        return False
    return True


@settings(max_examples=budget(300), deadline=None)
@given(st.data())
def test_random_graphs_compute_the_same(data: st.DataObject) -> None:
    text = random_graph(data.draw)
    module = read(text)
    fused_module = read(text)
    run_pipeline("fuse-kernels", fused_module)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=value.shape).astype("f4") for value in module.graph.inputs]
    expected = computed(module, inputs)
    graph = module.graph
    nodes = stand_ins(Stretch(list(graph), set(graph.outputs)))
    for found in (computed(fused_module, inputs), computed(module, inputs, nodes)):
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=2e-4, atol=2e-5, err_msg=text)
