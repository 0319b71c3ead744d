"""What is imported before anything is asked for: nothing that takes time. Counted, not timed."""

import inspect
import subprocess
import sys

import pytest

import irpar
from irpar.commands.app import COMMANDS, command
from tests.patience import patient


def imported(code: str) -> set[str]:
    """The modules that a new process imports for some code, but for those that Python itself starts with."""
    text = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(' '.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=patient(60))
    assert done.stderr == ""
    return set(done.stdout.splitlines()[-1].split())


def test_import_irpar_imports_nothing_else() -> None:
    assert imported("import irpar") == {"irpar"}


def test_dir_imports_nothing() -> None:
    assert imported("import irpar; dir(irpar)") == {"irpar"}


def test_dir_has_all_that_there_is_to_call() -> None:
    assert [name for name in dir(irpar) if not name.startswith("_")] == irpar.__all__
    assert "__version__" in dir(irpar)
    assert all(getattr(irpar, name) is not None for name in dir(irpar))


def test_the_version_is_that_of_the_package() -> None:
    assert "importlib.metadata" in imported("import irpar; assert irpar.__version__[0].isdecimal()")


def test_a_name_that_irpar_lacks() -> None:
    with pytest.raises(AttributeError, match="module 'irpar' has no attribute 'shard'"):
        irpar.shard  # noqa: B018


def test_help_imports_no_command_and_nothing_heavy() -> None:
    found = imported("from irpar.cli import main; assert main(['--help']) == 0")
    assert {name for name in found if name.startswith("irpar.commands.")} == {"irpar.commands.app"}
    heavy = ("onnx", "onnxruntime", "networkx", "numpy", "rich", "irpar.ir", "importlib.metadata")
    assert [name for name in heavy if name in found] == []


def test_a_command_imports_no_other() -> None:
    found = imported("from irpar.cli import main; assert main(['partition', '--help']) == 0")
    assert {"irpar.commands.partition"} <= found
    assert not {f"irpar.commands.{name}" for name in COMMANDS if name != "partition"} & found
    assert "numpy" not in found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_what_its_own_help_starts_with(name: str) -> None:
    help_ = command(name).help
    assert help_ is not None
    assert " ".join(inspect.cleandoc(help_).split("\n\n")[0].split()) == COMMANDS[name]
