"""The command line's commands, put together. Each is imported when it is asked for: `irpar --help` needs none."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error about the command line itself; its module has moved between versions of Typer."""

COMMANDS: Mapping[str, str] = {
    "inspect": "Show what a model is made of, what cannot be sharded and why, and (--suggest) what to shard.",
    "partition": "Shard a model over a mesh of devices and write a program for each, with explicit communication.",
    "pack": "Pack what some ranks need to run: plan.json, their parts, and checksums, which irpar run compares.",
    "run": "Run all ranks of a partition, on full inputs, and give back full outputs; or train (--data).",
    "verify": "Compare a partition with ONNX Runtime on the original model. The exit code is 1 where they differ.",
    "launch": "Run a command once for each rank, one process each, on this machine.",
    "explain": "Say why a tensor is sharded as it is, or why a collective is there. Without a target: all collectives.",
    "plan-memory": "Give each buffer a place in little memory: buffers that are held at different times share it.",
    "opt": "Run passes over IR text and print the IR that they leave. A reproducer brings its own passes.",
    "grad": "Write the gradients of a model as one more ONNX model, which stock ONNX Runtime runs.",
    "train": "Make a training step of a model, shard it over a mesh and write a program for each device.",
    "checkpoint": "Show a checkpoint, bring it onto another mesh, or write its weights back into the ONNX model.",
    "warm": "Compile ahead the kernels that a partition needs on this machine's GPU, so that no run waits for them.",
    "calibrate": "Measure matmuls, memory, disk and collectives on this machine, for --network FILE. Takes about 10 "
    "seconds.",
    "demo": "Partition a GPT-like model over 4 ranks, run it, and verify it. The exit code is 1 where it differs.",
}
"""What `irpar --help` says of each command: the first paragraph of its own help."""

_PLAIN: Mapping[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # Its boxes take 60 ms of imports.
}
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "launch": {"allow_interspersed_args": False},  # What comes after its first word belongs to the launched command.
}


class _Command(TyperCommand):
    """A command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections in the order of what is in them."""
        _write_parameters(self, ctx, formatter)


class _Commands(TyperGroup):
    """Commands by name and summary, of which the one that is called is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Typer's, with the real command in place of what stands for it in the help."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(name) if name is not None else None, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and all that there is to say of each command."""
        _write_parameters(self, ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _write_parameters(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def command(name: str) -> TyperCommand:
    """A command with its options, imported."""
    file = name.replace("-", "_")
    function = getattr(import_module(f".{file}", __package__), f"{file}_command")
    only = typer.Typer(**_PLAIN)
    only.command(name, cls=_Command, context_settings=_SETTINGS.get(name))(function)
    made = get_command(only)
    assert isinstance(made, TyperCommand)
    return made


app = typer.Typer(
    name="irpar",
    cls=_Commands,
    help="Shard an ONNX model over a mesh of devices into one program for each; run and verify them.",
    **_PLAIN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from irpar import __version__

        print(f"irpar {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
