"""Random training steps with ZeRO: a small model of odd sizes, a mesh, annotations, an optimizer; and what must hold of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import onnx

import irpar
from irpar.ir import ArrayTensor, Module, Value, clone_module
from irpar.onnx_io.load import to_module
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import with_zero
from irpar.passes.infer_types import InferTypes
from irpar.passes.zero import STAGES, Zero
from irpar.sharding import Axis, Mesh, Sharding, are_disjoint
from tests.random_programs import MESHES, NETWORKS, Spec, random_spec

Array = np.ndarray[Any, Any]

STEPS = 3
TOLERANCE = 1e-10
"""Largest difference after STEPS steps, over the largest element."""

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
PERCEPTRON = """
    perceptron (double[B, F] x, double[F, H] w, double[H] b, double[H] scale, double[H, C] u, double[1] c) => (double[B, C] y) {
      h = MatMul (x, w)
      i = Add (h, b)
      n = LayerNormalization <axis = -1> (i, scale)
      a = Tanh (n)
      k = MatMul (a, u)
      y = Add (k, c)
    }"""
TIED = """
    tied (int64[B, F] x, double[C, H] table, double[F, H] place, double[H, H] w) => (double[B, F, C] y) {
      e = Gather (table, x)
      p = Add (e, place)
      h = MatMul (p, w)
      a = Tanh (h)
      t = Transpose <perm = [1, 0]> (table)
      y = MatMul (a, t)
    }"""
BODIES = """
    bodies (double[B, F] x, double[F, H] w, double[H, H] v, double[H] b, double[H, C] u) => (double[B, C] y) {
      s0 = MatMul (x, w)
      trips = Constant <value = int64 {3}> ()
      go = Constant <value = bool {1}> ()
      s = Loop (trips, go, s0) <
        body = trip (int64 i, bool on, double[B, H] before) => (bool still, double[B, H] after) {
          still = Identity (on)
          h = MatMul (before, v)
          a = Add (h, b)
          after = Tanh (a)
        }>
      zero = Constant <value = double {0.0}> ()
      sum = ReduceSum <keepdims = 0> (s)
      positive = Greater (sum, zero)
      r = If (positive) <
        then_branch = taken () => (double[B, H] t) { t = Mul (s, b) },
        else_branch = other () => (double[B, H] e) { m = MatMul (s, v)  e = Sin (m) }
      >
      q = Add (r, b)
      y = MatMul (q, u)
    }"""
IMAGES = """
    images (double[B, F, 5, 5] x, double[H, F, 3, 3] w, double[H] g, double[H] b, double[H] mean, double[H] var, double[H, C] u) => (double[B, C] y) {
      h = Conv <pads = [1, 1, 1, 1]> (x, w)
      n = BatchNormalization (h, g, b, mean, var)
      a = Tanh (n)
      last = Constant <value = int64[2] {2, 3}> ()
      p = ReduceMean <keepdims = 0> (a, last)
      y = MatMul (p, u)
    }"""
EXPERTS = """
    experts (double[C, B, F] x, double[C, F, H] w, double[C, 1, H] b, double[C, H, F] u) => (double[C, B, F] y) {
      h = MatMul (x, w)
      i = Add (h, b)
      a = Tanh (i)
      y = MatMul (a, u)
    }"""
MODELS = {"perceptron": PERCEPTRON, "tied": TIED, "bodies": BODIES, "images": IMAGES, "experts": EXPERTS}
PARAMETERS = {
    "perceptron": ("w", "b", "scale", "u", "c"),
    "tied": ("table", "place", "w"),
    "bodies": ("w", "v", "b", "u"),
    "images": ("w", "g", "b", "u"),
    "experts": ("w", "b", "u"),
}
"""Of each model those that are trained where nothing else is said."""
SIZES = {"B": (3, 4, 5, 6, 12), "F": (1, 2, 3, 4, 5, 6), "H": (1, 3, 4, 5, 6, 7, 8, 12), "C": (2, 3, 4, 5, 6, 8)}
"""Odd ones, and some of one element."""
DROPPED = {"perceptron": "a", "tied": "a", "bodies": "q", "images": "a", "experts": "a"}
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd"},
    {"optimizer": "momentum"},
    {"optimizer": "momentum", "nesterov": True},
    {"optimizer": "adam", "eps": 1e-3},
    {"optimizer": "adamw", "eps": 1e-3},
    {"optimizer": "lamb", "eps": 1e-3},
)


@dataclass(frozen=True)
class RandomStep:
    """A step and how it is sharded.

    Attributes:
        model: a name of MODELS.
        sizes: of its symbols.
        options: of `train_step`.
        mesh: the devices.
        zero: the pass.
        annotations: value name to its sharding.
        network: what communication costs.
        fed: a parameter that is an input of the model, and begins as zeros; "": none.
    """

    model: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    mesh: Mesh
    zero: Zero
    annotations: Mapping[str, Spec] = field(default_factory=dict)
    network: str = "bytes"
    fed: str = ""

    def step(self) -> Module:
        """The step, not sharded; its parameters are seeded normals."""
        module = to_module(onnx.parser.parse_model(HEADER + _sized(MODELS[self.model], self.sizes)))
        InferTypes().run(module)
        random = np.random.default_rng(7)
        for value in list(module.graph.inputs):
            if value.source_name not in ("x", self.fed):
                data = random.standard_normal(value.shape) / np.sqrt(value.shape[0])
                # Variances, and what normalised numbers are multiplied with.
                data = np.abs(data) + 1 if value.source_name in ("var", "scale", "g") else data
                module.graph.inputs_to_constants({value: ArrayTensor(data)})
        trainable = PARAMETERS[self.model] if self.fed else ()
        return irpar.train_step(module, trainable=list(trainable), **self.options)

    def batches(self, step: Module) -> list[dict[str, Array]]:
        """Inputs of each step."""
        random = np.random.default_rng(1)
        samples = [value for value in step.graph.inputs if value.source_name in ("x", "target")]
        rate = {"learning_rate": np.asarray(0.05)}
        return [rate | {value.source_name: self._sample(value, random) for value in samples} for _ in range(STEPS)]

    def _sample(self, value: Value, random: np.random.Generator) -> Array:
        if value.dtype.is_float:
            return random.standard_normal(value.shape)
        return random.integers(0, self.sizes["C"], value.shape)

    def partition(self, step: Module) -> irpar.Partition:
        """It on its mesh, the verifier run after every pass."""
        module = clone_module(step)
        for name, spec in self.annotations.items():
            module.shard(name, spec)
        passes = PassManager.parse(with_zero(self.zero), Instrumentation(verify_each=True, reproducer=None))
        return irpar.partition(module, self.mesh, pipeline=passes, network=self.network)


def _sized(text: str, sizes: Mapping[str, int]) -> str:
    """A model with numbers for the symbols of its types."""
    return re.sub(r"(?<=[\[ ])([BFHC])(?=[,\]])", lambda found: str(sizes[found[1]]), text)


def random_step(random: Random) -> RandomStep:
    """A step with odd sizes, on any mesh, at times with annotations of parameters, moments and gradients."""
    model = random.choice(list(MODELS))
    sizes = {name: random.choice(known) for name, known in SIZES.items()}
    names = random.sample(PARAMETERS[model], len(PARAMETERS[model]))
    mesh = Mesh(*random.choice(MESHES))
    made = RandomStep(
        model,
        sizes,
        _options(random, model, names),
        mesh,
        _zero(random, mesh),
        network=random.choice(NETWORKS),
        fed=random.choice(["", "", "", "", names[0]]),
    )
    return replace(made, annotations=_annotations(random, made))


def _options(random: Random, model: str, names: list[str]) -> dict[str, Any]:
    """Options of `train_step`; the first of the names are of parameters that are trained."""
    losses = {"experts": ["mse"]}.get(model, ["mse", "cross_entropy"])
    found = {**random.choice(OPTIMIZERS), "loss": random.choice(losses)}
    more: dict[str, Any] = {
        "clip_norm": random.choice([0.1, 1.0]),
        "lr_scale": {names[0]: 0.5},
        "no_decay": names[:2],
        "freeze": names[2:3],
        "dropout": {DROPPED[model]: 0.3},
    }
    return found | {name: more[name] for name in more if random.random() < 0.2 and name not in _unfit(found)}


def _unfit(options: Mapping[str, Any]) -> tuple[str, ...]:
    return () if options["optimizer"] in ("adamw", "lamb") else ("no_decay",)


def _zero(random: Random, mesh: Mesh) -> Zero:
    """Any stage over axes of the mesh, or over one of them in part."""
    names = list(mesh.axes)
    axes = random.sample(names, random.randint(1, len(names)))
    parts = [f"{name}:({before}){mesh.axes[name] // 2}" for name in names if mesh.axes[name] > 2 for before in (1, 2)]
    parts = [part for part in parts if mesh.axes[part[0]] % 2 == 0]
    if parts and random.random() < 0.4:
        axes = [random.choice(parts)]
    threshold, regather = random.choice([0, 0, 0, 0.05]), random.random() < 0.5
    return Zero(random.choice(STAGES), tuple(axes), threshold, regather)


def _annotations(random: Random, made: RandomStep) -> dict[str, Spec]:
    """Samples are mostly sharded by their first dim."""
    found: dict[str, Spec] = {}
    graph = made.step().graph
    gradients = [value for value in graph.values() if value.source_name.removeprefix("grad.") in PARAMETERS[made.model]]
    for value in dict.fromkeys((*graph.inputs, *gradients)):
        name, rank = value.source_name, len(value.shape)
        if not rank or name in found:
            continue
        if name in ("x", "target") and random.random() < 0.6:
            found[name] = [[random.choice(list(made.mesh.axes))], *[None] * (rank - 1)]
        elif random.random() < 0.2:
            found[name] = random_spec(random, rank, made.mesh)
    return found


def check(made: RandomStep) -> None:
    """Partition the step and run it; its losses and its state must be what the unsharded step gives.

    Raises:
        AssertionError: they are not, the log is not the plan, or the plan says otherwise what is sharded.
    """
    step = made.step()
    batches = made.batches(step)
    losses, state = run(irpar.partition(clone_module(step), "d=1"), batches)
    partition = made.partition(step)
    found, held = run(partition, batches)
    np.testing.assert_allclose(found, losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert held.keys() == state.keys()
    for name, array in state.items():
        size = max(1e-3, float(np.abs(array).max(initial=0)))
        np.testing.assert_allclose(held[name], array, rtol=0, atol=TOLERANCE * size, err_msg=name)
    assert partition.executor("numpy").log.differences(partition.plan.collectives) == []
    _check_shardings(made, partition)


def _check_shardings(made: RandomStep, partition: irpar.Partition) -> None:
    """What the stage shards is sharded over the axes, but for what the plan gives a reason for, and what is annotated."""
    facts = partition.plan.training
    assert facts is not None
    whole = {entry["parameter"] for entry in facts["zero"]["parameters"] if not entry["is_sharded"]}
    for entry in partition.plan.state:
        parameter = entry["parameter"] or entry["name"]
        is_meant = entry["kind"] in ("moment", "master") or (entry["kind"] == "parameter" and made.zero.stage == 3)
        if not is_meant or parameter in whole or entry["name"] in made.annotations:
            continue
        if entry["kind"] == "parameter" and parameter in made.options.get("freeze", ()):
            continue
        lies = Sharding.of_spec(made.mesh, entry["sharding"])
        for axis in map(Axis.parse, made.zero.axes):
            is_cut = made.mesh.axis_size(axis) == 1 or not are_disjoint(made.mesh, [*lies.all_axes, axis])
            assert is_cut, f"{entry} is not sharded over {axis}"


def run(partition: irpar.Partition, batches: list[dict[str, Array]]) -> tuple[list[float], dict[str, Array]]:
    """The loss of each step, and the state after the last one."""
    with partition.session(engine="numpy", timeout=60) as session:
        return [float(session.run(batch)["loss"]) for batch in batches], session.read_all()
