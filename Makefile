# Every target makes its own virtual environment when there is none, and renews it when what is to be in there changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

LOCK := requirements/dev.lock
# A resolver that locks for all platforms, and that finds the lowest releases; pip does neither.
RESOLVER := build/resolver/bin/uv
# The Python of test-oldest: the lowest that pyproject.toml allows.
OLDEST_PYTHON ?= python3.11
# A process for each core and one more; the tests of a file stay in one (tests/distribution.py). One that crashes ends the run.
PYTEST := -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Of random and brute-force tests `test` tries a thirty-second (tests/budget.py).
ALL := IRPAR_TEST_BUDGET=1
# Of test-all: `make test-all PART=3/8` runs the third of eight parts, each with files of its own.
PART ?= 1/1
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all test-newest test-oldest check view exports bench lock clean

demo: $(READY)
	$(BIN)/irpar demo

test: $(READY)
	$(BIN)/python $(PYTEST)

test-all: $(READY) check
	$(ALL) IRPAR_TEST_PART=$(PART) $(BIN)/python $(PYTEST) -m "not gpu"

# The newest releases that pyproject.toml allows; the lowest, on the lowest Python.
test-newest:
	rm -rf build/newest
	$(PYTHON) -m venv build/newest
	build/newest/bin/python $(PIP_INSTALL) --upgrade --editable ".[test]"
	build/newest/bin/python $(PYTEST)

test-oldest: $(RESOLVER)
	rm -rf build/oldest
	$(OLDEST_PYTHON) -m venv build/oldest
	$(RESOLVER) pip compile --quiet --no-header --resolution lowest-direct --extra test \
		--python build/oldest/bin/python pyproject.toml --output-file build/oldest.txt
	build/oldest/bin/python $(PIP_INSTALL) --requirement build/oldest.txt
	build/oldest/bin/python $(PIP_INSTALL) --no-deps --editable .
	build/oldest/bin/python $(PYTEST)

# What development and CI install: each release with the hashes of its files, of all platforms and Pythons.
lock: $(RESOLVER)
	mkdir -p $(dir $(LOCK))
	$(RESOLVER) pip compile --quiet --universal --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --extra dev --custom-compile-command "make lock" pyproject.toml --output-file $(LOCK)
	! grep --line-number "://" $(LOCK)

$(RESOLVER):
	$(PYTHON) -m venv build/resolver
	build/resolver/bin/python $(PIP_INSTALL) "uv>=0.9,<1"

check: $(READY) view
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd build/view && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p irpar

# Type checkers cannot see through setuptools' package-dir mapping: they get a folder of links instead.
view:
	rm -rf build/view/irpar
	mkdir -p build/view/irpar
	ln -s $(addprefix ../../../,$(wildcard irpar/*)) ../../../passes ../../../kernels ../../../models build/view/irpar/

# The PyTorch exports under tests/fixtures, with torch, onnxscript and transformers; EXPORT_PYTHON is the Python that has them.
EXPORT_PYTHON ?= $(BIN)/python
exports: $(READY)
	$(EXPORT_PYTHON) tools/export_pytorch.py --out tests/fixtures

bench: $(READY)
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable ".[bench]"
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Building irpar needs setuptools, which the lock has: nothing comes from elsewhere.
$(READY): pyproject.toml $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --require-hashes --requirement $(LOCK)
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q irpar passes kernels models  # An editable install leaves that to the first command.
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
