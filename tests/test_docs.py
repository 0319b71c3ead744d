"""What the pages under docs/ show is run: examples of passes, Python programs, shardings, links."""

import doctest
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

import irpar
from irpar import models
from irpar.analysis.cost.network_algorithms import ALGORITHMS
from irpar.analysis.cost.network_file import read_network
from irpar.analysis.cost.network_presets import PRESETS
from irpar.annotations.shardings_file import read_shardings
from irpar.cli import main
from irpar.ir import parse_module
from irpar.models.__main__ import main as models_main
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.runtime.engines.base import ENGINES
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import GROUPS
from irpar.runtime.groups.wire.sockets import LISTEN
from irpar.runtime.launch.environment import LAUNCHERS, World
from irpar.runtime.launch.rank_process import free_port
from irpar.runtime.launch.token import TOKEN, TOKEN_FILE
from tests.decoding_steps import Step
from tests.patience import patient
from tests.runtime.groups.mpi_libraries import find
from tests.runtime.launched import take_signals

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def code(page: str, language: str) -> list[str]:
    """The fenced blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def pass_examples() -> list[tuple[str, str, str]]:
    """Pipeline, text before and text after of each example in passes.md."""
    found = []
    for section in (DOCS / "passes.md").read_text().split("\n## ")[1:]:
        name = section.splitlines()[0]
        for before, pipeline, after in re.findall(
            r"((?:^    .*\n)+)^    ->(.*)\n((?:^    .*\n)+)", section, re.MULTILINE
        ):
            found.append((pipeline.strip() or name, textwrap.dedent(before), textwrap.dedent(after)))
    return found


def test_every_pass_of_the_page_has_an_example() -> None:
    named = re.findall(r"^\| \[([a-z-]+)\]", (DOCS / "passes.md").read_text(), re.MULTILINE)
    examples = dict.fromkeys(pipeline.split(",")[0].split("{")[0] for pipeline, _, _ in pass_examples())
    assert list(examples) == named
    assert set(DEFAULT_PIPELINE.split(",")) < set(named)


@pytest.mark.parametrize(
    ("pipeline", "before", "after"), pass_examples(), ids=[pipeline for pipeline, _, _ in pass_examples()]
)
def test_passes_do_what_the_page_says(pipeline: str, before: str, after: str) -> None:
    module = parse_module(before)
    irpar.PassManager.parse(pipeline).run(module)
    # The page breaks long lines.
    assert str(module).split() == after.split()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []


@pytest.mark.parametrize(
    ("example", "batch", "sent"),
    [
        (-3, 4, [*[("all_reduce", ["tp"], 16384)] * 3, ("reduce_scatter", ["tp"], 8192)]),
        (-2, 1, [("all_to_all", ["sp"], 1536)] * 8),
    ],
    ids=["megatron", "sequence"],
)
def test_cuts_of_a_gpt(example: int, batch: int, sent: list[tuple[str, list[str], int]], tmp_path: Path) -> None:
    (tmp_path / "cut.yaml").write_text(code("shardings.md", "yaml")[example])
    models.save(tmp_path / "gpt.onnx", "gpt", batch=batch)
    module = irpar.load(tmp_path / "gpt.onnx")
    file = read_shardings(tmp_path / "cut.yaml")
    assert file.mesh is not None
    module.set_mesh(file.mesh)
    file.annotate(module)
    plan = irpar.partition(module).plan
    assert [(entry["kind"], entry["axes"], entry["sent_bytes"]) for entry in plan.collectives] == sent


def test_a_cache_that_is_sharded(tmp_path: Path) -> None:
    (tmp_path / "cache.yaml").write_text(code("shardings.md", "yaml")[-1])
    Step("TensorScatter", 128, 1).save(tmp_path / "step.onnx")
    module = irpar.load(tmp_path / "step.onnx")
    file = read_shardings(tmp_path / "cache.yaml")
    assert file.mesh is not None
    module.set_mesh(file.mesh)
    file.annotate(module)
    assert {entry["kind"] for entry in irpar.partition(module).plan.collectives} == {"all_reduce"}


def test_every_spelling(tmp_path: Path) -> None:
    (program,) = code("shardings.md", "python")
    (tmp_path / "spellings.py").write_text(program)
    python("spellings.py", folder=tmp_path)


def test_fusion_in_mindspores_words(tmp_path: Path) -> None:
    (program,) = code("passes.md", "python")
    (tmp_path / "fusion.py").write_text(program)
    python("fusion.py", folder=tmp_path)


def test_the_session_with_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(DOCS / "state.md"), module_relative=False, optionflags=flags)
    assert (failed, tried > 8) == (0, True)


def test_the_session_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models.save("gpt.onnx", "gpt", layers=2)
    session = "\n".join(code("python.md", "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/python.md", None, 0)
    assert len(test.examples) > 10
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_sections_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(code("shardings.md", "yaml")[0])
    file = read_shardings(tmp_path / "all.yaml")
    assert file.layout is not None
    assert (len(file.tensors), len(file.ops), len(file.layout.rules)) == (6, 2, 2)


def test_the_plan_has_the_fields_of_the_page(tmp_path: Path) -> None:
    module = mlp(tmp_path)
    plan = json.loads(irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 4})).plan.to_json())
    page = (DOCS / "plan.md").read_text()
    fields = {
        field for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for field in re.findall(r"`(\w+)`", row)
    }
    assert set(plan) - {"format"} <= fields
    assert set(plan["collectives"][0]) <= fields
    assert (plan["collectives"][0]["bytes"], plan["collectives"][0]["sent_bytes"]) == (1024, 1536)
    assert json.dumps(plan["totals"]) in re.sub(r"\s+", " ", page)
    assert json.dumps(plan["original"]) in page


def transcripts(page: Path) -> list[tuple[str, str, str]]:
    """Each command that a page shows: the YAML that stands last before it, the command, what the page has it print."""
    found: list[tuple[str, str, str]] = []
    text = page.read_text()
    for block in re.finditer(r"^    \$ .*\n(?:(?:    .*)?\n)*", text, re.MULTILINE):
        yaml = re.findall(r"^```yaml\n(.*?)^```$", text[: block.start()], re.MULTILINE | re.DOTALL)
        for part in re.split(r"^\$ ", textwrap.dedent(block[0]), flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((yaml[-1] if yaml else "", command, printed))
    return found


def as_shown(shown: str, printed: str) -> bool:
    """Whether output is what a page shows: it folds lines, leaves out what `...` stands for, and rounding differs."""
    shown, printed = (re.sub(r"\d(\.\d)?e-\d\d", "e", " ".join(text.split())) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed) is not None


@pytest.mark.parametrize(
    ("page", "least"),
    [
        (ROOT / "README.md", 3),
        (DOCS / "shardings.md", 7),
        pytest.param(DOCS / "memory.md", 3, marks=pytest.mark.slow),
    ],
)
def test_commands_print_what_the_page_shows(
    page: Path, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    found = transcripts(page)
    assert len(found) == least
    for yaml, command, shown in found:
        program, *words = shlex.split(command)
        if "--shardings" in words and program == "irpar":
            file = Path(words[words.index("--shardings") + 1])
            if not file.exists():
                file.write_text(yaml)
        if program == "python":
            assert words[:2] == ["-m", "irpar.models"]
            assert models_main(words[2:]) == 0
        else:
            assert main(words) == 0
        printed = capsys.readouterr().out
        assert not shown.strip() or as_shown(shown, printed), f"{command}\n{printed}"


def check_training(capsys: pytest.CaptureFixture[str], most: int) -> None:
    """Run the commands of the page on training, the first so many."""
    exec(code("training.md", "python")[0], {})
    found = transcripts(DOCS / "training.md")
    assert len(found) == 10
    for _, command, shown in found[:most]:
        program, *words = shlex.split(command)
        assert (models_main(words[2:]) if program == "python" else main(words)) == 0
        printed = capsys.readouterr().out
        assert not shown.strip() or as_shown(shown, printed), f"{command}\n{printed}"


def test_the_first_training_is_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    check_training(capsys, 3)
    assert (tmp_path / "steps").exists()


@pytest.mark.slow
def test_training_is_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    check_training(capsys, 10)
    _, levels, trainer, zero, loop = code("training.md", "python")
    exec(levels, {})
    assert capsys.readouterr().out == "3\n"
    step = irpar.train_step("gpt.onnx", optimizer="adamw")
    plain = irpar.partition(step, {"dp": 2}).plan.ranks[0]["memory"]["optimizer"]
    exec(zero, {"irpar": irpar, "step": step})
    assert 0.5 <= int(capsys.readouterr().out) / plain < 0.55
    assert main(["train", "gpt.onnx", "-o", "step.onnx"]) == 0
    for name, program in (("trainer.py", trainer), ("loop.py", loop)):
        (tmp_path / name).write_text(program)
        loss = re.fullmatch(r"loss (\d\.\d)\n", python(name, folder=tmp_path))
        assert loss is not None
        assert float(loss[1]) < 1


def test_the_program_of_the_readme_runs_after_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _, command, _ in transcripts(ROOT / "README.md")[:2]:
        program, *words = shlex.split(command)
        assert (models_main(words[2:]) if program == "python" else main(words)) == 0
    (program,) = re.findall(r"^    import irpar.*\n(?:    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    names: dict[str, object] = {}
    exec(textwrap.dedent(program), names)
    assert isinstance(names["logits"], np.ndarray)
    assert (tmp_path / "out-mlp" / "plan.json").exists()


def mlp(folder: Path) -> irpar.Module:
    """The MLP of the pages on the plan and the output."""
    models.save(folder / "mlp.onnx", "mlp")
    module = irpar.load(folder / "mlp.onnx")
    irpar.annotate(module, models.annotations("mlp"))
    return module


def python(*arguments: str, folder: Path) -> str:
    """What a Python program prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parts_run_without_irpar(tmp_path: Path) -> None:
    irpar.partition(mlp(tmp_path), irpar.Mesh({"dp": 2, "tp": 4})).save(tmp_path / "out")
    (program,) = code("output.md", "python")
    assert "irpar " not in "".join(line for line in program.splitlines() if "import" in line)
    (tmp_path / "other.py").write_text(program)
    printed = python("other.py", "out", folder=tmp_path)
    assert float(printed.removeprefix("largest difference ")) < 1e-5


def install(page: str, folder: Path) -> Path:
    """Make the empty package of a page in a folder, with what pip would write of its entry points; its folder."""
    package, facts = folder / "irpar_extras", folder / "irpar_extras-0.1.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").touch()
    (toml,) = code(page, "toml")
    entries = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", toml[toml.index("[project.entry-points") :])
    (facts / "entry_points.txt").write_text(entries.replace('"', ""))
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: irpar-extras\nVersion: 0.1\n")
    return package


def test_the_package_of_a_pass(tmp_path: Path) -> None:
    pass_, test = code("writing-passes.md", "python")
    (install("writing-passes.md", tmp_path) / "merge_scales.py").write_text(pass_)
    (tmp_path / "test_merge_scales.py").write_text(test)
    python("-m", "pytest", "-q", "test_merge_scales.py", folder=tmp_path)


def test_the_operator_of_the_page(tmp_path: Path) -> None:
    operator, program, samples = code("adding-an-operator.md", "python")
    (install("adding-an-operator.md", tmp_path) / "row_squares.py").write_text(operator)
    (tmp_path / "program.py").write_text(program)
    python("program.py", folder=tmp_path)
    # Its samples go through the proof of all rules.
    (tmp_path / "proof.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport irpar_extras.row_squares\n"
        f"from tests.ops import test_rules\n{samples}\n"
        "for sample in SAMPLES:\n"
        "    for parts in test_rules.PARTS:\n"
        "        test_rules.test_allowed_cuts_are_right(sample, parts)\n"
        "    test_rules.test_empty_blocks_are_right_where_a_rule_accepts_them(sample)\n"
        "test_rules.SAMPLES[:] = SAMPLES\n"
        "test_rules.test_every_factor_can_be_tried()\n"
    )
    python("proof.py", folder=tmp_path)


def commands_of_clusters() -> list[tuple[str, list[str]]]:
    """Each command of irpar on the page on clusters, whatever starts it, with its arguments."""
    script = "\n".join([*code("clusters.md", "sh"), *re.findall(r"exec\n(.*)", (DOCS / "clusters.md").read_text())])
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("'", " "), comments=True)
        while "irpar" in words:
            command, *words = words[words.index("irpar") + 1 :]
            own = words[: words.index("irpar")] if "irpar" in words else words
            if command == "launch":
                # What follows the number is a command of irpar, or a program.
                own, launched = own[:2], own[2:]
                if launched[0] in ("run", "verify"):
                    found.append((launched[0], launched[1:]))
            found.append((command, own))
    return found


def test_commands_of_the_page_on_clusters_have_their_options() -> None:
    found = commands_of_clusters()
    assert {command for command, _ in found} == {"pack", "launch", "run", "verify"}
    for command, words in found:
        check_options(command, words)


def check_options(command: str, words: Sequence[str]) -> None:
    """Check that a command has the options that are given."""
    from irpar.commands import app

    names = {name for parameter in app.command(command).params for name in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= names
    for option, table in (("--group", GROUPS), ("--engine", ENGINES)):
        assert option not in words or words[words.index(option) + 1] in table


def post(port: int, data: bytes) -> bytes:
    """What the server of the page on clusters answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", data, timeout=30) as answer:
        return bytes(answer.read())


def launcher_of(command: str) -> list[str]:
    """The words that start the ranks, with the programs of this environment."""
    program, *words = command.split()
    if program == "irpar":
        return [sys.executable, "-m", "irpar.cli", *words]
    library = find("MPICH")
    if isinstance(library, str):
        pytest.skip(library)
    return [*library.launch, *words]


@contextmanager
def started(words: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A program that Ctrl-C reaches, and that does not outlive the test."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes |= {"start_new_session": True}
    with subprocess.Popen(words, cwd=folder, preexec_fn=take_signals, **pipes) as run:
        late = threading.Timer(120, os.killpg, (run.pid, signal.SIGKILL))
        late.start()
        try:
            yield run
        finally:
            late.cancel()
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["processes", "mpi"])
def test_the_server_of_the_page_on_clusters(group: str, tmp_path: Path) -> None:
    partition = irpar.partition(mlp(tmp_path), irpar.Mesh({"dp": 2, "tp": 2}))
    partition.save(tmp_path / "out")
    (command,) = re.findall(rf"^(.*) python server.py {group}$", (DOCS / "clusters.md").read_text(), re.MULTILINE)
    port, seconds = free_port(), round(patient(1))
    server = code("clusters.md", "python")[1].replace("8000", str(port)).replace("timeout=30", f"timeout={seconds}")
    assert (str(port) in server, f"timeout={seconds}" in server) == (True, True)
    (tmp_path / "server.py").write_text(server)
    spec = partition.plan.inputs[0]
    inputs = {spec["name"]: np.random.default_rng(0).standard_normal(spec["shape"], np.float32)}
    sent = io.BytesIO()
    np.savez(sent, **inputs)
    with started([*launcher_of(command), sys.executable, "server.py", group], tmp_path) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(port, b"no arrays")
        for wait in (2 * seconds, 0):
            with np.load(io.BytesIO(post(port, sent.getvalue()))) as results:
                (name,) = results.files
                np.testing.assert_allclose(results[name], partition.run(inputs)[name], rtol=1e-5)
            time.sleep(wait)
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=patient(20))
    assert run.returncode in (0, 130)
    assert "Traceback" not in told
    assert "error" not in told


@pytest.mark.slow
def test_the_program_of_the_page_on_state(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(code("state.md", "pycon")[0]):
        if example.source.startswith("with partition.session"):
            break
        exec(example.source, found)
    found["partition"].save(tmp_path / "steps")
    (tmp_path / "steps.py").write_text(code("state.md", "python")[0])
    (command,) = code("state.md", "sh")
    words = [sys.executable if word == "python" else word for word in launcher_of(command)]
    with started(words, tmp_path) as run:
        told, errors = run.communicate(timeout=patient(60))
    assert (run.returncode, errors) == (0, "")
    assert "[4.5 4.5 4.5 4.5 4.5 4.5]" in told


def test_the_job_of_the_page_on_clusters() -> None:
    (text,) = code("clusters.md", "yaml")
    service, job = YAML(typ="safe").load_all(text)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry.get("value", "from a secret") for entry in container["env"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert environ["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(environ["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    world = World.of_environment({**environ, "RANK": "3"})
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 0, 1)
    assert (world.master_addr, world.store_port) == ("gpt-0.irpar", 29500)


def test_the_variables_of_the_page_on_clusters() -> None:
    text = (DOCS / "clusters.md").read_text()
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", text[text.index("## Environment") : text.index("## Time-outs")]))
    assert {launcher.rank[0] for launcher in LAUNCHERS} <= listed
    assert {launcher.size[-1] for launcher in LAUNCHERS} <= listed
    assert {TOKEN, TOKEN_FILE, LISTEN} <= listed


def test_the_network_of_the_page(tmp_path: Path) -> None:
    page = (DOCS / "network.md").read_text()
    (file,) = code("network.md", "yaml")
    (tmp_path / "net.yaml").write_text(file)
    network = read_network(tmp_path / "net.yaml")
    assert [link.name for link in network.links] == ["pcie", "ethernet"]
    shown = re.findall(r"^\|(?: `(\w+)`(?:, `(\w+)`)?)? \| `(\w+)`", page, re.MULTILINE)
    found: dict[str, set[str]] = {}
    kinds: list[str] = []
    for first, second, algorithm in shown:
        kinds = [kind for kind in (first, second) if kind] or kinds
        for kind in kinds:
            found.setdefault(kind, set()).add(algorithm)
    assert found == {kind: set(algorithms) for kind, algorithms in ALGORITHMS.items()}
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \| (?:none|[A-Z])", page, re.MULTILINE)) == set(PRESETS)
    (text,) = re.findall(r"(^    module .*\n(?:^    .*\n)+)", page, re.MULTILINE)
    module = parse_module(textwrap.dedent(text))
    irpar.PassManager.parse("insert-redistribution").run(module)
    gathers = [node.attributes["axes"][0] for node in module.graph if node.op_type == "AllGather"]
    assert [str(axis) for axis in gathers] == ["x", "y"]


def test_the_command_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = code("adding-a-command.md", "python")
    names = {"__name__": "irpar.commands.count", "__package__": "irpar.commands"}
    exec(program, names)
    models.save(tmp_path / "mlp.onnx", "mlp")
    names["count_command"](tmp_path / "mlp.onnx")  # type: ignore[operator]
    assert re.search(r"^MatMul +2$", capsys.readouterr().out, re.MULTILINE)
    names["count_command"](tmp_path / "mlp.onnx", as_json=True)  # type: ignore[operator]
    assert json.loads(capsys.readouterr().out)["MatMul"] == 2


def run_as(page: str, name: str) -> dict[str, Any]:
    """The names of a page's program, run as a module of irpar."""
    program = code(page, "python")[0]
    names: dict[str, Any] = {"__name__": name, "__package__": name.rpartition(".")[0]}
    exec(program, names)
    return names


DIVIDED = """
    mesh @m = ["x"=2]
    graph local @g(%a: f32[4], %b: f32[4]) -> (%r) opset 21 ranks [0, 1] {
      %q = Div(%a, %b) : f32[4]
      %r = irpar.AllReduce(%q) {axes=["x"], id=0, reduce="sum"} : f32[4]
    }
"""


def test_the_engine_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_as("adding-an-engine.md", "irpar.runtime.engines.finite")
    monkeypatch.setitem(sys.modules, "irpar.runtime.engines.finite", SimpleNamespace(**names))  # type: ignore[misc]
    monkeypatch.setitem(ENGINES, "finite", "finite:FiniteEngine")
    module = parse_module(DIVIDED)
    two, zero = np.full(4, 2, np.float32), np.zeros(4, np.float32)
    with Executor(module, module.mesh, engine="finite") as executor:
        np.testing.assert_array_equal(executor.run({"a": two, "b": two})["r"], two)
        with pytest.raises(RunError, match=r"rank 0 .*: %q has NaN"):
            executor.run({"a": zero, "b": zero})


SUMMED = """
    mesh @m = ["x"=2]
    graph @g(%a: f32[8, 4] replicated) -> (%r) opset 21 {
      %s = irpar.AllSlice(%a) {axes=["x"], dim=0} : f32[8@x, 4]
      %t = irpar.AllToAll(%s) {axes=["x"], split_dim=1, concat_dim=0, id=0} : f32[8, 4@x]
      %q = ReduceSum(%t) {keepdims=0} : f32[] partial(sum: x)
      %r = irpar.AllReduce(%q) {axes=["x"], reduce="sum", id=1} : f32[] replicated
    }
"""


def test_the_group_of_processes_of_the_page(tmp_path: Path) -> None:
    _, files = code("adding-a-group.md", "python")
    line = '    "files": GroupKind("files:FilesGroup", is_launched=True),'
    with_file(
        tmp_path,
        "irpar/runtime/groups/files.py",
        files,
        line,
        '    "mpi": GroupKind("mpi.group:MpiGroup", over_mpi=True),\n',
    )
    module = parse_module(SUMMED)
    irpar.partition(module, module.mesh, pipeline="localize").save(tmp_path / "out")
    np.save(tmp_path / "a.npy", np.arange(32, dtype=np.float32).reshape(8, 4))
    run = ["run", "out", "--input", "a=a.npy", "--group", "files", "--outputs", "r.npz"]
    python("-m", "irpar.cli", "launch", "-n", "2", *run, folder=tmp_path)
    assert np.load(tmp_path / "r.npz")["r"] == 31 * 16


def test_the_group_of_the_page() -> None:
    names = run_as("adding-a-group.md", "irpar.runtime.groups.counted")
    module = parse_module(DIVIDED)
    group = names["CountedGroup"](module.mesh)
    with Executor(module, module.mesh, engine="numpy", group=group) as executor:
        executor.run({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    assert group.taken == {0: 32}


def with_file(folder: Path, file: str, text: str, line: str, before: str) -> None:
    """Make a package irpar in a folder that has one more file, and is links to this one otherwise.

    Args:
        folder: where the package goes.
        file: its path.
        text: what it holds.
        line: what the `__init__.py` beside it gets.
        before: the line before which that stands.
    """
    place = Path(file).parent
    for parent, child in itertools.pairwise([*reversed(place.parents), place][1:]):
        (folder / parent).mkdir()
        for each in (Path(irpar.__file__).parents[1] / parent).iterdir():
            if each.name not in ("__pycache__", child.name):
                (folder / parent / each.name).symlink_to(each)
    for source in ("passes", "kernels", "models"):
        (folder / "irpar" / source).symlink_to(ROOT / source)
    beside = Path(irpar.__file__).parents[1] / place
    shutil.copytree(beside, folder / place, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / file).write_text(text)
    table = (beside / "__init__.py").read_text()
    assert before in table
    (folder / place / "__init__.py").write_text(table.replace(before, f"{line}\n{before}"))


MIRRORED = """
import json
from pathlib import Path

import numpy as np

import irpar
from irpar.ir import parse_module
from irpar.ir.verifier import verify

module = parse_module(Path("mirror.irpar").read_text())
verify(module)
inside = {"name": "in", "devices": 2, "latency": 1e-6, "bandwidth": 1e9}
links = [inside, {"name": "out", "latency": 1e-5, "bandwidth": 1e8}]
Path("two.yaml").write_text(json.dumps({"name": "two", "links": links}))
partition = irpar.partition(module, module.mesh, pipeline="simplify-collectives,localize", network="two.yaml")
assert [entry["kind"] for entry in partition.plan.collectives] == ["mirror", "all_gather"]
assert partition.plan.collectives[0]["sent_bytes"] == 8
assert partition.plan.predicted["communication_seconds"] > 2e-5
numbers = np.arange(8, dtype=np.float32)
np.testing.assert_array_equal(partition.run({"a": numbers})["r"], [6, 7, 4, 5, 2, 3, 0, 1])
np.save("a.npy", numbers)
partition.save("out")
"""


@pytest.mark.parametrize("launch", [[], pytest.param(["launch", "-n", "4"], marks=pytest.mark.slow)], ids=" ".join)
def test_the_collective_of_the_page(launch: list[str], tmp_path: Path) -> None:
    (record,) = code("adding-a-collective.md", "python")
    line = '    "Mirror": mirror.RECORD,'
    with_file(tmp_path, "irpar/ops/collectives/mirror.py", record, line, '    "MakePartial": make_partial.RECORD,\n')
    table = tmp_path / "irpar/ops/collectives/__init__.py"
    table.write_text(table.read_text().replace("    make_partial,\n", "    make_partial,\n    mirror,\n", 1))
    (graph,) = re.findall(r"^    mesh .*\n(?:    .*\n)+", (DOCS / "adding-a-collective.md").read_text(), re.MULTILINE)
    (tmp_path / "mirror.irpar").write_text(textwrap.dedent(graph))
    (tmp_path / "mirrored.py").write_text(MIRRORED)
    python("mirrored.py", folder=tmp_path)
    run = ["-m", "irpar.cli", *launch, "run", "out", "--input", "a=a.npy", "--outputs", "r.npz"]
    python(*run, folder=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "r.npz")["r"], [6, 7, 4, 5, 2, 3, 0, 1])


def test_the_command_for_ring_attention_works_when_copied(tmp_path: Path) -> None:
    (script,) = (block for block in code("passes.md", "sh") if "memory-mb=0" in block)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, check=False)
    assert ran.returncode == 0
    plan = irpar.Partition.open(tmp_path / "ring").plan
    assert plan.totals["by_kind"].keys() == {"permute"}
    assert plan.totals["collectives"] == 12
    passes = plan.pipeline.replace("{memory-mb=0.0}", "").replace("{memory-mb=0}", "")
    assert passes == DEFAULT_PIPELINE
