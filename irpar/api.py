"""What people call from Python: load a model, partition it, run, verify and save the partition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from irpar.annotations.named import infer_where_annotated
from irpar.ir import Module, clone_module
from irpar.ir.collector import collector_off
from irpar.module_pipeline import default_pipeline
from irpar.output.parts import Part, parts_of
from irpar.output.plan import make_plan
from irpar.output.plan_reading import read_plan
from irpar.output.plan_record import Plan
from irpar.output.plan_source import ReadFiles, check_unchanged, files_of, original_of, source_of
from irpar.pass_manager.default_pipeline import NORMALISING
from irpar.sharding import ArgumentError, IrparError, Mesh, require, spelled
from irpar.units import count_text

from .api_arguments import (
    check_annotations,
    check_collectives,
    check_comparison,
    check_inputs,
    check_model,
    check_partition,
    check_path,
    check_run,
    check_sizes,
    check_values,
    check_weights,
)

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np

    from irpar.analysis.cost.network import Network
    from irpar.onnx_io import Source
    from irpar.pass_manager import PassManager, PipelineResult, PipelineRun
    from irpar.runtime.engines.base import Results
    from irpar.runtime.executor import Executor
    from irpar.runtime.launch.environment import World
    from irpar.runtime.session import Session
    from irpar.training.schedule import Schedule
    from irpar.training.trainer import Trainer
    from irpar.verification import Bisection, Original, Verification

Engine = Literal["ort", "numpy", "cupy"]
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def load(
    model: "Source",
    *,
    bind: Mapping[str, int] | None = None,
    set: Mapping[str, Any] | None = None,
    configuration: str | None = None,
    mesh: Mesh | Mapping[str, int] | str | None = None,
) -> Module:
    """Read an ONNX model; weights are not read until something needs them.

    Where nodes say how their tensors lie on devices (ONNX's multi-device annotations), the module is annotated so.

    Args:
        model: the path of the .onnx file; or its content, as bytes or a ModelProto, without external data.
        bind: sizes for symbolic dims, e.g. `{"batch": 8, "seq": 128}`.
        set: values of inputs that are to have no other, e.g. `{"sr": 16000}`: what depends on them is folded, and the
            inputs stay, but take that value alone.
        configuration: the device configuration whose annotations are read; None: the only one; "none": none.
        mesh: what those annotations are said with; None: axes d0, d1 ..., or those that the file names if irpar wrote
            it.

    Raises:
        IrparError: the file is no valid ONNX model, a symbol of `bind` is not in it, a value of `set` does not fit an
            input, or annotations cannot be read.
        ArgumentError: an argument has the wrong type.
    """
    from irpar.onnx_io import load as read
    from irpar.onnx_io.device_annotations import NO_CONFIGURATION, DeviceAnnotations

    check_model(model)
    check_sizes(bind)
    check_values(set)
    if configuration is not None:
        require("configuration", configuration, str, 'name one of the model, or "none"')
    if mesh is not None:
        mesh = Mesh.of(mesh)
    devices = None if configuration == NO_CONFIGURATION else DeviceAnnotations(configuration)
    module = read(model, devices=devices)
    if bind:
        from irpar.passes.bind_dims import BindDims

        BindDims(sizes={name: int(size) for name, size in bind.items()}).run(module)
    if set:
        from irpar.inputs.fixed import fix_inputs

        fix_inputs(module, set)
    if devices is not None and devices.names:
        from irpar.annotations.onnx_annotations import apply

        apply(module, devices, mesh)
    return module


def partition(
    module: "Module | Source",
    mesh: Mesh | Mapping[str, int] | str | None = None,
    *,
    pipeline: "str | PassManager | None" = None,
    network: "str | Path | Network | None" = None,
    max_redistribution_mb: float | None = None,
    bind: Mapping[str, int] | None = None,
) -> "Partition":
    """Shard a module over a mesh. The module itself stays as it is.

    Args:
        module: from `load`, annotated with `module.shard(...)`; or what `load` takes.
        mesh: the devices, as a Mesh, as `{"dp": 2, "tp": 4}` or as `"dp=2,tp=4"`; may be left out where the
            annotations came with one.
        pipeline: passes to run instead of the default ones; must end with a local module.
        network: what communication costs: the name of a preset, the path of a network file, or a Network; None: that
            of the module, which is `bytes` where nothing else was said.
        max_redistribution_mb: megabytes that a device may send for any one redistribution, the reduction of partial
            values aside; None: any number.
        bind: sizes for symbolic dims, as for `load`.

    Raises:
        IrparError: a symbolic dim is not bound, an annotation does not fit, the pipeline does not localize, there is no
            such network, or a redistribution sends more than is allowed.
        ArgumentError: an argument has the wrong type.
    """
    from irpar.pass_manager import PassManager

    check_partition(pipeline, network, max_redistribution_mb)
    module = module_of(module, bind)
    if not module.graph.outputs:
        raise IrparError("the model has no outputs, so there is nothing to compute", do="export it again with outputs")
    with collector_off():
        work = _prepared(module, mesh, network)
        work.mesh  # noqa: B018 - refuses a module without a mesh before anything runs
        chosen = pipeline or default_pipeline(work)
        manager = chosen if isinstance(chosen, PassManager) else PassManager.parse(chosen)
        source = source_of(module)
        original, run = _shard(manager, work, lambda: _prepared(module, mesh, network))
        work = run.module
        made = Partition._made(module, work, str(manager), source, original, run.result)
    if max_redistribution_mb is not None:
        from irpar.advice.redistribution_limit import check_redistributions

        check_redistributions(
            work, made.plan, max_redistribution_mb, lambda: _prepared(module, mesh, network), manager.passes
        )
    return made


def module_of(model: "Module | Source", bind: Mapping[str, int] | None = None) -> Module:
    """A module as it is, or loaded; with `bind` a copy in which symbols have these sizes.

    Raises:
        IrparError: as from `load`.
        ArgumentError: it is no model at all.
    """
    if not isinstance(model, Module):
        if isinstance(model, Partition):
            raise ArgumentError("the model is a Partition", do="give the module that it was made of, or load the model")
        return load(model, bind=bind)
    check_sizes(bind)
    if not bind:
        return model
    from irpar.passes.bind_dims import BindDims

    copy = clone_module(model)
    BindDims(sizes={name: int(size) for name, size in bind.items()}).run(copy)
    return copy


def _prepared(
    module: Module, mesh: Mesh | Mapping[str, int] | str | None, network: "str | Path | Network | None"
) -> Module:
    """A copy of a module with all that `partition` was told of it."""
    given = None if mesh is None else Mesh.of(mesh)
    work = clone_module(module)
    if network is not None:
        from irpar.analysis.cost.network_file import find_network

        work.network = find_network(network).text
    if given is not None:
        infer_where_annotated(work, work.annotations)
        work.set_mesh(given)
    return work


def _shard(manager: "PassManager", work: Module, again: Callable[[], Module]) -> "tuple[dict[str, Any], PipelineRun]":
    """Normalise, measure what the whole model costs one device, and make programs of it.

    Args:
        manager: the passes.
        work: what they change.
        again: makes it once more, where a pass fails.

    Returns:
        What it costs, and the pipeline at its end, with the programs.
    """
    from irpar.folded_layers import plan_layers_once

    run = manager.start(work, again)
    run.advance(lambda pass_: pass_.name in NORMALISING)
    original = original_of(work) if len(run.result.records) < len(manager.passes) else {}
    plan_layers_once(run)
    run.advance()
    if not run.module.is_local:
        raise IrparError(
            f'the pipeline "{manager}" leaves the module in global view',
            do="end it with complete-sharding,insert-redistribution,localize",
        )
    return original, run


_Ran = tuple[str, str, str]
"""Engine, group and results of an executor."""


@dataclass(frozen=True, eq=False)
class _Opened:
    """An executor of a partition.

    Attributes:
        executor: it.
        files: those of the model from which it reads weights; None: it reads those of the partition.
    """

    executor: "Executor"
    files: ReadFiles | None = None


class Partition:
    """A model cut over a mesh: per-part programs, their plan, and what runs them.

    Attributes:
        module: the local module; None for a partition opened from disk.
        plan: the contents of plan.json.
        parts: the programs with their shards; none for a partition opened from disk.
        passes: what the passes that made it did; None for a partition opened from disk.
        folder: where it was opened from.
    """

    def __init__(self, plan: Plan, *, module: Module | None = None, whole: Module | None = None) -> None:
        self.plan = plan
        self.module = module
        self.passes: PipelineResult | None = None
        self.folder: Path | None = None
        self._whole = whole
        self.parts: list[Part] = parts_of(module, module.mesh) if module is not None else []
        self._opened: dict[_Ran, _Opened] = {}

    def __repr__(self) -> str:
        totals, mesh = self.plan.totals, self.plan.mesh_of_ranks
        return (
            f"<partition over {mesh}: {count_text(mesh.size, 'rank')}, {count_text(len(self.plan.parts), 'part')}, "
            f"{count_text(totals['collectives'], 'collective')} that send {totals['sent_bytes']:,} bytes a device>"
        )

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    @classmethod
    def _made(
        cls,
        whole: Module,
        local: Module,
        pipeline: str,
        source: dict[str, Any],
        original: dict[str, Any],
        passes: "PipelineResult",
    ) -> "Partition":
        parts = parts_of(local, local.mesh)
        plan = make_plan(local, local.mesh, parts, pipeline=pipeline, source=source, original=original)
        made = cls(plan, module=local, whole=whole)
        made.passes = passes
        return made

    @classmethod
    def open(cls, folder: str | Path) -> "Partition":
        """Open what `save` wrote.

        Raises:
            IrparError: the folder holds no plan.json, or one that cannot be read.
        """
        check_path("folder", folder)
        folder = Path(folder)
        made = cls(read_plan(folder))
        made.folder = folder
        return made

    def save(
        self,
        folder: str | Path,
        *,
        weights: Literal["copy", "none"] = "copy",
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
        evaluation: "Partition | None" = None,
        collectives: str = "irpar",
        stubs: bool = False,
    ) -> None:
        """Write plan.json and the parts; see `irpar.output.writer.write_partition`.

        The plan gets the id and the facts about weights that were written. Beside a training step stands its
        evaluation program, where one is given. The collectives are irpar's, or those of another runtime:
        "com.microsoft" or "tensorrt", whose programs name the ranks of groups, so that the parts may become more. With
        `stubs`, functions in the models give tools that know no irpar the types of its collectives.

        Raises:
            IrparError: the folder exists, the weights cannot be read, or a collective cannot be said.
        """
        from irpar.output.group_parts import by_groups, names_ranks
        from irpar.output.writer import write_partition

        check_path("folder", folder)
        check_weights(weights)
        check_collectives(collectives, stubs)
        if self.module is None:
            raise IrparError("a partition opened from disk is saved already", do="copy its folder")
        beside = None
        if evaluation is not None:
            from irpar.output.target import EVALUATION

            beside = partial(_save_beside, evaluation, EVALUATION, collectives, stubs)
        parts, plan = self.parts, self.plan
        if names_ranks(collectives):
            parts, plan = by_groups(self.module, parts, plan)
        self.plan = write_partition(
            Path(folder),
            self.module,
            parts,
            plan,
            weights=weights,
            force=force,
            collectives=collectives,
            stubs=stubs,
            progress=progress,
            beside=beside,
        )
        self.parts = parts

    def default_engine(self, world: "World | None" = None) -> Engine:
        """The engine that runs the parts where none is asked for; see `irpar.runtime.engines.base.default_engine`."""
        from irpar.runtime.engines.base import default_engine

        return default_engine([rank["peak_bytes"] for rank in self.plan.ranks], world)

    def executor(
        self,
        engine: Engine | None = None,
        group: str = "threads",
        timeout: float | None = None,
        strict: bool = False,
        tf32: bool = False,
        results: "Results" = "host",
    ) -> "Executor":
        """What runs the parts; made once for each engine, group and kind of results, and again once that is closed, or
        one is asked for that is strict or takes TF32, and that is not.

        Args:
            engine: what computes between collectives; None: "cupy" on a GPU that has the memory, else "ort".
            group: what moves data between ranks: "threads" has all of them in this process. With another one this is
                one process of many that a launcher started: rank 0 runs, verifies and bisects, the others call
                `executor(...).serve()`, until rank 0 closes.
            timeout: seconds that a rank waits for others at a collective, from when they meet; see
                `irpar.runtime.groups.make_group`.
            strict: refuse nodes that the engine "cupy" would compute on the host.
            tf32: let the engine "cupy" multiply float32 with operands rounded to TF32 (10 bits of mantissa).
            results: what runs give: "host": numpy arrays. For one rank of the engine "cupy" also arrays of CuPy, which
                may then be given as inputs too: "owned" ones are the caller's to keep; "borrowed" ones are valid until
                the next run, which writes over them: they are never copied. Work with either on the stream that is
                current when the run is asked for.

        Raises:
            IrparError: the parts cannot be run, the other ranks cannot be met, or weights were written to after the
                model was partitioned.
        """
        from irpar.runtime.launch.environment import World

        check_run(engine, group, timeout, results)
        if engine is None:
            engine = self.default_engine(None if group == "threads" else World.of_environment())
        options: dict[str, Any] = {"engine": engine, "group": group, "timeout": timeout}
        options |= {"strict": strict, "tf32": tf32, "results": results}
        key = engine, group, results
        self._let_go(key, strict=strict, tf32=tf32)
        known = self._opened.get(key)
        if known is None:
            known = self._opened[key] = self._open_parts(options)
        elif known.files is not None:
            known.files.check()
        return known.executor

    def _let_go(self, key: _Ran, *, strict: bool, tf32: bool) -> None:
        """Let go of an executor that is closed, or that is not as strict or quick as is asked for.

        Raises:
            IrparError: it is in a group that cannot be joined again.
        """
        known = self._opened.get(key)
        if known is None:
            return
        executor = known.executor
        if not executor.is_open:
            del self._opened[key]
            return
        lacks = [
            *(["strict=True"] * (strict and not executor.is_strict)),
            *(["tf32=True"] * (tf32 and not executor.is_tf32)),
        ]
        if not lacks:
            return
        if key[1] != "threads":
            raise IrparError(f"the ranks have met already, and without {lacks[0]}", do=f"ask for {lacks[0]} at once")
        self._opened.pop(key).executor.close()

    def _open_parts(self, options: Mapping[str, Any]) -> _Opened:
        """An executor of the parts, in memory or in the folder."""
        from irpar.runtime.executor import Executor

        if self.module is None:
            assert self.folder is not None
            return _Opened(Executor.open(self.folder, plan=self.plan, **options))
        files = files_of(self.module)
        check_unchanged(self.plan.source, files)
        read = ReadFiles(files)
        fixed = {name: tensor.numpy() for name, tensor in self.module.fixed.items()}
        return _Opened(Executor(self.module, self.module.mesh, parts=self.parts, fixed=fixed, **options), read)

    def close(self) -> None:
        """Let go of what runs the parts; ranks in other processes end."""
        while self._opened:
            self._opened.popitem()[1].executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        while self._opened:
            self._opened.popitem()[1].executor.__exit__(kind, error, trace)

    def run(
        self,
        inputs: Arrays,
        *,
        engine: Engine | None = None,
        group: str = "threads",
        results: "Results" = "host",
    ) -> "dict[str, np.ndarray[Any, Any]]":
        """Run all ranks.

        Args:
            inputs: full arrays by input name; they are scattered by their shardings.
            engine: what computes between collectives; see `executor`.
            group: what moves data between ranks; see `executor`.
            results: where the arrays are that it gives, and how long they are valid; see `executor`.

        Returns:
            Whole arrays by output name.

        Raises:
            IrparError: inputs that do not fit, or a rank failed.
        """
        check_inputs(inputs)
        return self.executor(engine, group, results=results).run(inputs)

    def session(
        self,
        *,
        engine: Engine | None = None,
        group: str = "threads",
        timeout: float | None = None,
        results: "Results" = "host",
    ) -> "Session":
        """Begin a sequence of runs whose state stays on its ranks; it begins as the program says.

        Args:
            engine, group, timeout, results: see `executor`.

        Raises:
            IrparError: the program has no state, or the parts cannot be run.
        """
        from irpar.runtime.session import Session

        if not self.plan.state:
            raise IrparError(
                "the program has no state: each run would be like the first",
                do='name what stays before partitioning, module.add_state("past", "present"); or use run()',
            )
        return Session(self.executor(engine, group, timeout, results=results))

    def trainer(
        self,
        *,
        schedule: "Schedule | None" = None,
        learning_rate: float | None = None,
        engine: Engine | None = None,
        group: str = "threads",
        timeout: float | None = None,
    ) -> "Trainer":
        """Begin training; it begins as the program says.

        Args:
            schedule: of the learning rate; None: `learning_rate` throughout.
            learning_rate: None: what `train_step` was told.
            engine, group, timeout: see `executor`.

        Raises:
            IrparError: the program is no training step, or the parts cannot be run.
        """
        from irpar.training.schedule import Schedule
        from irpar.training.trainer import Trainer

        facts = self.plan.training
        if facts is None:
            raise IrparError(
                "the program is no training step",
                do=spelled("make one: irpar train MODEL ...", "make one: irpar.train_step(module, ...)"),
            )
        if schedule is None:
            schedule = Schedule(facts["learning_rate"] if learning_rate is None else learning_rate)
        return Trainer(self.executor(engine, group, timeout), facts, schedule)  # type: ignore[arg-type]

    def original(self, path: str | Path | None = None) -> "Original":
        """The model that the partition was made of, as ONNX Runtime can run it.

        Raises:
            IrparError: it is not there any more, or is not the same file.
        """
        from irpar.verification import Original

        is_step = self.plan.training is not None
        if path is None and self._whole is not None and (is_step or self._whole.source is None):
            return Original.of_module(self._whole)
        if is_step:
            from irpar.training.again import original_step

            return original_step(self.plan, path)
        state = [entry["input"] for entry in self.plan.state]
        return Original.of_file(path, self.plan.source, state)

    def verify(
        self,
        inputs: Arrays | None = None,
        *,
        engine: Engine | None = None,
        group: str = "threads",
        tolerance: float | None = None,
        seed: int = 0,
        model: str | Path | None = None,
    ) -> "Verification":
        """Compare the partition with ONNX Runtime on the original model.

        Args:
            inputs: full arrays by input name; those that are left out are drawn at random, several times where one
                draw does not reach all branches and loops.
            engine: what runs the partition; see `executor`.
            group: what moves data between ranks; see `executor`.
            tolerance: largest |a - b| / (1 + |b|) that counts as equal; None: what rounding explains, as
                `irpar.verification.yardstick` finds it out.
            seed: for the random inputs.
            model: where the original is, if not where it was.

        Raises:
            IrparError: the original is missing or another one, a side cannot run, or weights that it would read from
                the model's files were written to after the model was partitioned.
        """
        from irpar.verification import check_fits, verify

        check_comparison(inputs, tolerance, seed, model)
        original = self.original(model)
        check_fits(self.plan)
        return verify(self.executor(engine, group), original, inputs, tolerance=tolerance, seed=seed)

    def bisect(
        self,
        inputs: Arrays | None = None,
        *,
        engine: Engine | None = None,
        group: str = "threads",
        tolerance: float | None = None,
        seed: int = 0,
        model: str | Path | None = None,
    ) -> "Bisection":
        """Find the first tensor of the model, in its order, that differs; arguments as in `verify`."""
        from irpar.verification import bisect, check_fits

        check_comparison(inputs, tolerance, seed, model)
        original = self.original(model)
        check_fits(self.plan)
        return bisect(self.executor(engine, group), original, inputs, tolerance=tolerance, seed=seed)


def _save_beside(partition: Partition, name: str, collectives: str, stubs: bool, folder: Path) -> None:
    partition.save(folder / name, collectives=collectives, stubs=stubs)


def annotate(module: Module, annotations: Mapping[str, Sequence[Any] | Mapping[str, Any]]) -> None:
    """Annotate several tensors at once: name or glob to one entry a dim, as in a `--shardings` file.

    An entry may also be `{"cut": [...], "priority": 1}`.

    Raises:
        IrparError: a name matches nothing, or an entry does not fit.
    """
    check_annotations(module, annotations)
    for pattern, spec in annotations.items():
        if isinstance(spec, Mapping):
            if "cut" not in spec or set(spec) - {"cut", "priority"}:
                raise IrparError(
                    f'"{pattern}" has the keys {", ".join(map(str, spec)) or "none"}',
                    do='write a list of dims, or {"cut": [...], "priority": 1}',
                )
            module.shard(pattern, spec["cut"], priority=spec.get("priority", 0))
        else:
            module.shard(pattern, spec)
