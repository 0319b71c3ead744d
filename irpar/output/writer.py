"""Writing a partition: out/plan.json, and for each part its model and its slices of the weights."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx

from irpar.ir import DType, Graph, Module, Tensor, Value
from irpar.ir.data_file import DataFile
from irpar.ir.tensor import place_of
from irpar.onnx_io.dialects import add_stubs, say_in
from irpar.onnx_io.proto import replace_data, replace_metadata, set_metadata, to_proto
from irpar.onnx_io.save import EXTERNAL_BYTES, external_tensor, serialized, sizes_pieces
from irpar.onnx_io.tensors import write_tensor
from irpar.ops.collectives import DIALECTS, OWN, Dialect

from .fingerprint import fingerprint, whole_digest
from .fresh import Progress, WriteReport, check_room, fresh_partition, write_data_files
from .parts import Part
from .plan_record import Plan, field_text, plan_text
from .safetensors import write_safetensors
from .target import MODEL_FILE, PLAN_FILE, STATE_FILE, WEIGHTS_FILE, source_files

Weights = Literal["copy", "none"]
PART, PARTITION = "irpar.part", "irpar.partition"
"""Metadata of a part's model: its number, and the id of the plan that it belongs to."""
_ID_BYTES = 16


def write_partition(
    folder: Path,
    module: Module,
    parts: Sequence[Part],
    plan: Plan,
    *,
    weights: Weights = "copy",
    force: bool = False,
    collectives: str = OWN,
    stubs: bool = False,
    progress: Progress | None = None,
    beside: Callable[[Path], None] | None = None,
) -> Plan:
    """Write plan, programs and weights of a local module.

    Everything is written into a folder beside the target, which then takes its name; when anything fails before that,
    nothing is left and the target is as it was.

    Args:
        folder: the target.
        module: after localize.
        parts: its parts.
        plan: its plan.
        weights: "copy" writes each part's slices, "none" writes plan and programs only.
        force: replace a target that holds a partition and nothing else.
        collectives: whose operators say them: "irpar", or one of `DIALECTS`.
        stubs: with functions that stand in for irpar's operators.
        progress: told about written bytes.
        beside: writes what belongs to it into the folder, before that takes its name.

    Returns:
        The plan as written: with the partition's id, and the size and digest of each part's program and weights.

    Raises:
        OutputError: the target exists (and is not to be replaced), there is not enough room, or the system refuses.
    """
    plan = replace(plan, dialect=collectives)
    sources = source_files(module)
    with fresh_partition(folder, force, sources) as fresh:
        layouts = [_Layout(part) for part in parts]
        state = first_tensors(module.graph)
        state_bytes = sum(tensor.nbytes for tensor in state.values())
        total = sum(layout.file.size for layout in layouts) + state_bytes if weights == "copy" else 0
        check_room(fresh, total)
        report = WriteReport(progress, total)
        programs = _write_programs(module, layouts, fresh, DIALECTS.get(collectives), stubs)
        texts = _bare(plan).field_texts()
        written = replace(plan, id=_partition_id(texts, programs))
        models = [_folder_of(layout.part, fresh) / MODEL_FILE for layout in layouts]
        for path in models:
            _append_id(path, written)
        facts = _write_weights(layouts, fresh, report) if weights == "copy" else [None] * len(layouts)
        if state and weights == "copy":
            write_safetensors(fresh / STATE_FILE, state, progress=report)
        written.state = [{**entry, "file": STATE_FILE if entry["input"] in state else None} for entry in plan.state]
        written.parts = [
            {**entry, "program": {"size": path.stat().st_size, "digest": whole_digest(path)}, "weights": fact}
            for entry, path, fact in zip(plan.parts, models, facts, strict=True)
        ]
        # The lists of a large plan are long: what the id is a digest of is not made again.
        texts.update({name: field_text(getattr(written, name)) for name in ("id", "parts", "state")})
        (fresh / PLAN_FILE).write_text(plan_text(texts), encoding="utf-8")
        if beside is not None:
            beside(fresh)
    return written


def _folder_of(part: Part, folder: Path) -> Path:
    """Where the files of a part are, in the folder of its partition."""
    return folder / f"part{part.index}"


def _write_programs(
    module: Module, layouts: "Sequence[_Layout]", folder: Path, dialect: Dialect | None, stubs: bool
) -> bytes:
    """Write the programs of all parts; returns a digest over them."""
    programs = hashlib.blake2b(digest_size=_ID_BYTES)
    for layout, model in _models(module, layouts):
        target = _folder_of(layout.part, folder)
        target.mkdir()
        _finish(model, module, layout.part, dialect, stubs)
        data = serialized(model)
        (target / MODEL_FILE).write_bytes(data)
        programs.update(hashlib.blake2b(data).digest())
    return programs.digest()


def weights_file(part: Part) -> DataFile:
    """What lies where in the weights.bin of a part."""
    return _Layout(part).file


def first_tensors(graph: Graph) -> dict[str, Tensor]:
    """What states begin with, whole, by the names of their inputs; without those that begin as zeros."""
    return {value.source_name: state.data for value, state in graph.states.items() if state.data is not None}


def _bare(plan: Plan) -> Plan:
    """A plan without what is known once all is written."""
    return replace(plan, id=None, parts=[{**entry, "program": None, "weights": None} for entry in plan.parts])


def _partition_id(texts: Mapping[str, str], programs: bytes) -> str:
    """A digest over the bare plan and the programs: equal where all of both is equal."""
    return hashlib.blake2b(plan_text(texts).encode() + programs, digest_size=_ID_BYTES).hexdigest()


def _append_id(path: Path, plan: Plan) -> None:
    """Make a written model say which partition it is of; protobuf joins the repeated fields of what is put together."""
    entry = onnx.ModelProto()
    set_metadata(entry, {PARTITION: str(plan.id)})
    with open(path, "ab") as file:
        file.write(entry.SerializeToString())


def _write_weights(layouts: "Sequence[_Layout]", folder: Path, report: WriteReport) -> list[Any]:
    """Write the weights of all parts; returns what plan.json says of each file."""
    paths = [_folder_of(layout.part, folder) / WEIGHTS_FILE for layout in layouts]
    write_data_files(zip(paths, (layout.file for layout in layouts), strict=True), report)
    return [
        {"size": layout.file.size, "digest": fingerprint(path)} for layout, path in zip(layouts, paths, strict=True)
    ]


class _Layout:
    """Which constants of a part go to weights.bin, and where."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.file = DataFile()
        self.tensors = {value: part.tensor(value) for value in part.graph.constants}
        self.places: dict[Value, int] = {}
        for value, tensor in self.tensors.items():
            if tensor.dtype is not DType.STR and tensor.nbytes > EXTERNAL_BYTES and not sizes_pieces(value):
                self.places[value] = self.file.place(tensor)

    def proto(self, value: Value) -> onnx.TensorProto:
        """How model.onnx refers to a constant."""
        made = onnx.TensorProto(name=value.name)
        tensor = self.tensors.get(value, value.data)
        assert tensor is not None
        if value in self.places:
            external_tensor(made, tensor, WEIGHTS_FILE, self.places[value])
        else:
            write_tensor(tensor, made)
        return made

    def refers_alike(self, other: "_Layout", value: Value) -> bool:
        """Whether model.onnx refers to a constant as that of another part with the same graph does."""
        place, ours, theirs = self.places.get(value), self.tensors[value], other.tensors[value]
        if place != other.places.get(value):
            return False
        if place is None:
            return place_of(ours) == place_of(theirs)
        return ours.dtype is theirs.dtype and ours.shape == theirs.shape


def _models(module: Module, layouts: Sequence[_Layout]) -> Iterator[tuple[_Layout, onnx.ModelProto]]:
    """The programs of the parts: those with the same graph are made once, and differ in their constants."""
    first: dict[Graph, tuple[_Layout, onnx.ModelProto]] = {}
    left = Counter(layout.part.graph for layout in layouts)
    for layout in layouts:
        graph = layout.part.graph
        if graph not in first:
            first[graph] = layout, to_proto(module, graph, constant=layout.proto)
        left[graph] -= 1
        if not left[graph]:
            like, model = first.pop(graph)
        else:
            like, known = first[graph]
            model = onnx.ModelProto()
            model.CopyFrom(known)
        # The graph's constants come first; behind them stand those of expanded updates, the same in all parts.
        for value, tensor in zip(graph.constants, model.graph.initializer, strict=False):
            if layout is not like and not layout.refers_alike(like, value):
                replace_data(tensor, layout.proto(value))
        yield layout, model


def _finish(model: onnx.ModelProto, module: Module, part: Part, dialect: Dialect | None, stubs: bool) -> None:
    """Say in the program of a part whose it is, and speak of collectives as its reader does."""
    replace_metadata(model, {PART: str(part.index), "irpar.ranks": json.dumps(list(part.ranks))})
    if dialect is not None:
        say_in(dialect, model, module, part.graph, part.ranks)
    elif stubs:
        add_stubs(model, module, part.graph)
