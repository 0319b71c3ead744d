"""A search of CP-SAT ends with its process."""

import subprocess
import sys
import time

import pytest

SEARCH = """
import os, signal, threading
from irpar.analysis.cp_sat import run, solver_module

model = solver_module().CpModel()
across, up = [], []
for size in range(20, 60):  # Rectangles whose least height is not proven in minutes.
    begin, low = model.new_int_var(0, 120, ""), model.new_int_var(0, 10**6, "")
    across.append(model.new_fixed_size_interval_var(begin, size, ""))
    up.append(model.new_fixed_size_interval_var(low, 97 - size, ""))
end = model.new_int_var(0, 10**6, "")
model.add_no_overlap_2d(across, up)
for each in up:
    model.add(each.end_expr() <= end)
model.minimize(end)
signal.signal(signal.SIGINT, signal.default_int_handler)  # What starts tests may have it ignored.
try:
    threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
    run(model, 100)
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize("seconds", ["1", pytest.param("0.001", marks=pytest.mark.slow)])
def test_a_signal_that_ends_the_process_ends_a_search(seconds: str) -> None:
    begin = time.monotonic()
    program = SEARCH.replace("SECONDS", seconds)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "ended\n", done.stderr
    assert time.monotonic() - begin < 60
