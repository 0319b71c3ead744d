"""Reading plan.json, and refusing what contradicts itself."""

import json
from pathlib import Path
from typing import Any

from irpar.files.atomic import left_aside, notes_on_aside
from irpar.files.regular_file import read_text
from irpar.ir import dtype_of_text
from irpar.sharding import Axis, IrparError, Mesh, Sharding

from .plan_record import FORMAT
from .plan_record import Plan as Plan
from .plan_schema import misfit


class PlanError(IrparError):
    """A plan.json that cannot be read or does not fit its parts."""


def read_plan(folder: Path) -> Plan:
    """Read and check plan.json of an output folder.

    Raises:
        PlanError: it is missing, is not JSON, is of another format, or a field is missing or is not what it should be.
    """
    path = folder / "plan.json"
    again = "partition the model again"
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise PlanError(
            f"cannot read the plan: {error.strerror}",
            where=str(path),
            notes=notes_on_aside(left_aside(folder)),
            do="give the folder that `irpar partition -o` made",
        ) from error
    except ValueError as error:
        raise PlanError(f"plan.json is not JSON: {error}", where=str(path), do=again) from error
    except RecursionError:
        raise PlanError("plan.json is nested too deep", where=str(path), do=again) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"plan.json has format {found!r}, this irpar reads {FORMAT!r}",
            where=str(path),
            do=f"{again} with this version",
        )
    problem = misfit(data)
    if problem is None:
        plan = Plan(**{name: value for name, value in data.items() if name in Plan.__dataclass_fields__})
        problem = _contradiction(plan)
    if problem is not None:
        raise PlanError(
            f"plan.json cannot be used: {problem}", where=str(path), do=f"{again}; plan.json is not meant to be edited"
        )
    return plan


def _contradiction(plan: Plan) -> str | None:
    """What in a plan contradicts itself."""
    try:
        mesh = plan.mesh_of_ranks
        for spec in (*plan.inputs, *plan.outputs):
            _check_spec(spec, mesh)
        for entry in plan.collectives:
            if (
                "pairs" not in entry
                and mesh.group_size([Axis.parse(axis) for axis in entry["axes"]]) != entry["group_size"]
            ):
                return f"collective {entry['id']} joins another number of ranks than its axes"
    except IrparError as error:
        return error.what
    if [(entry["rank"], tuple(entry["coords"])) for entry in plan.ranks] != list(enumerate(mesh.all_coords())):
        return f"the ranks are not those of mesh {mesh}"
    wrong = _wrong_state(plan)
    if wrong is not None:
        return wrong
    known = {entry["id"] for entry in plan.collectives}
    for entry in plan.functions:
        if not entry["collectives"] or not known.issuperset(entry["collectives"]):
            return f"function {entry['name']} has none of the collectives, or one that is not there"
    if not all(entry["part"] < len(plan.parts) for entry in plan.ranks):
        return f"a rank has a part outside 0 .. {len(plan.parts) - 1}"
    for model in (entry["model"] for entry in plan.parts):
        if Path(model).is_absolute() or ".." in Path(model).parts or "\0" in model:
            return f"a part is outside its folder: {model}"
    return None


def _wrong_state(plan: Plan) -> str | None:
    """What in the entries of state contradicts the rest of a plan."""
    inputs, outputs = ({spec["name"]: spec for spec in specs} for specs in (plan.inputs, plan.outputs))
    for entry in plan.state:
        name = entry["input"]
        if name not in inputs or (entry["output"] is not None and entry["output"] not in outputs):
            return f"state {name} is no input, or {entry['output']}, which replaces it, is no output"
        if entry["file"] not in (None, "state.safetensors"):
            return f"state {name} lies in {entry['file']}, which no partition has"
    return None


def _check_spec(spec: dict[str, Any], mesh: Mesh) -> None:
    """Refuse an input or output whose facts do not fit each other.

    Raises:
        PlanError: saying what.
    """
    if spec["dtype"] is not None and dtype_of_text(spec["dtype"]) is None:
        raise PlanError(f"{spec['name']} has the dtype {spec['dtype']}, which is none")
    if spec["sharding"] is not None:
        sharding = Sharding.of_spec(mesh, spec["sharding"])
        if spec["shape"] is None or sharding.rank != len(spec["shape"]):
            raise PlanError(f"sharding of {spec['name']} has another number of dims than its shape")
