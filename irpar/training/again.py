"""The training step of a plan, made again of the model that the plan names."""

from pathlib import Path
from typing import TYPE_CHECKING

from irpar.ir import Module
from irpar.output.plan_record import Plan

from .arguments import settings_of
from .step import make_step

if TYPE_CHECKING:
    from irpar.verification import Original


def original_step(plan: Plan, path: str | Path | None = None) -> "Original":
    """The step of one device, as ONNX Runtime can run it.

    Args:
        plan: of a training step.
        path: the model that it was made of, if not where it was.

    Raises:
        VerificationError: the model is missing, or another one.
    """
    from irpar.verification import Original

    given = Original.of_file(path, plan.source)
    step = step_again(plan, given.module)
    return Original.of_module(step)


def step_again(plan: Plan, model: Module) -> Module:
    """The module of the step.

    Args:
        plan: of it.
        model: what it was made of, as it is loaded.

    Raises:
        IrparError: it is another model.
    """
    from irpar.inputs.fixed import fix_inputs, fixed_of_plan
    from irpar.passes.bind_dims import BindDims

    assert plan.training is not None
    if plan.training["bind"]:
        BindDims(sizes=plan.training["bind"]).run(model)
    fixed = fixed_of_plan(plan.inputs)
    known = {value.source_name for value in model.graph.inputs}
    if fixed:
        fix_inputs(model, {name: value for name, value in fixed.items() if name in known})
    return make_step(model, settings_of(plan.training["settings"]), plan.training["bind"])[0]
