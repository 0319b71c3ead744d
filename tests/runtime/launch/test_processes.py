"""The launcher: what ranks get, and what is left of a run."""

import json
import os
import re
import subprocess
from pathlib import Path

from irpar.runtime.launch.environment import World
from tests.runtime.launched import python, run_ranks


def test_the_environment_of_the_ranks():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "IRPAR_RUN_ID"]
    program = f"import json; print(json.dumps({{k: v for k, v in os.environ.items() if k in {names} or 'IRPAR' in k}}))"
    ending, out, err = run_ranks(python(program), 3)
    assert (ending.code, ending.text, err) == (0, "", "")
    found = [json.loads(re.sub(r"^\[\d\] ", "", line)) for line in out.splitlines()]
    worlds = sorted((World.of_environment(environ) for environ in found), key=lambda world: world.rank)
    assert [(world.rank, world.local_rank) for world in worlds] == [(0, 0), (1, 1), (2, 2)]
    assert {world.run_id for world in worlds} == {found[0]["IRPAR_RUN_ID"]}
    for world in worlds:
        assert (world.size, world.local_size, world.launcher) == (3, 3, "irpar launch")
        assert (world.master_addr, world.store_port) == ("127.0.0.1", int(found[0]["MASTER_PORT"]))


def test_the_cores_are_divided_unless_the_user_did(monkeypatch):
    print_threads = python("print(os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))
    assert run_ranks(print_threads, 1, environ={})[1] == f"{cores}\n"
    assert run_ranks(print_threads, cores + 1, environ={})[1].splitlines()[0].endswith("1")
    assert run_ranks(print_threads, 1, environ={"OMP_NUM_THREADS": "7"})[1] == "7\n"


def test_what_a_launcher_around_this_one_set_does_not_reach_the_ranks():
    ending, out, _ = run_ranks(
        python("print([name for name in os.environ if 'TORCH' in name])"), 1, environ={"TORCHELASTIC_RUN_ID": "x"}
    )
    assert (ending.code, out) == (0, "[]\n")


def test_rank_0_gets_the_input(launched):
    run = launched(2, "print(sys.stdin.read())", stdin=subprocess.PIPE)
    run.process.stdin.write(b"hello")
    code, out, _ = run.end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[1] ", "hello"]


def test_shared_memory_is_cleared():
    program = "open(f'/dev/shm/irpar-{os.environ[\"IRPAR_RUN_ID\"]}-{rank}', 'w'); print(os.environ['IRPAR_RUN_ID']); "
    for end, code in (("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)):
        ending, out, _ = run_ranks(python(program + end), 2)
        assert ending.code == code
        run_id = out.split()[-1]
        assert run_id
        assert list(Path("/dev/shm").glob(f"irpar-{run_id}*")) == []


def test_two_launches_at_once_do_not_meet(launched):
    program = "print(os.environ['IRPAR_RUN_ID'], os.environ['MASTER_PORT']); time.sleep(0.3)"
    first, second = launched(2, program), launched(2, program)
    (_, one, _), (_, other, _) = first.end(), second.end()
    ones, others = set(one.replace("[1] ", "").splitlines()), set(other.replace("[1] ", "").splitlines())
    assert len(ones) == len(others) == 1
    assert ones != others
