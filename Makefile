# Every target makes its own virtual environment when there is none, and renews it when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all check view exports bench clean

demo: $(READY)
	$(BIN)/irpar demo

test: $(READY)
	$(BIN)/python -m pytest

test-all: $(READY) check
	$(BIN)/python -m pytest -m "not gpu"

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[bench]"
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
