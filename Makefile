# Everything runs in .venv, which is made here with nothing but Python (3.11 or newer) and its pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What runs a second time, compiled with XLA's optimisations, as users' programs are.
OPTIMISED := tests/test_algorithms.py tests/test_norms.py tests/test_two_orientations.py

# Pyright would look on the network for a newer release, only to say that there is one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# On a CPU, JAX's factorisations call OpenBLAS, whose threads wait for the cores that XLA's hold.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help demo test test-oldest test-newest soak check format bench clean

help:
	@echo "make demo         LNB beside AdamW and Muon on four small tasks, in three minutes; writes demo.png"
	@echo "make test         the tests and the docstrings' examples"
	@echo "make test-oldest  the same with the oldest supported jax and optax"
	@echo "make test-newest  the same with the newest Python on this machine, and the newest jax for it"
	@echo "make soak         a thousand random programs, on two processes; ARGS=--help for more"
	@echo "make check        lint, formatting, types"
	@echo "make format       mend what lint and formatting can mend by themselves"
	@echo "make bench        what a step costs beside Adam's; ARGS=--help for more"
	@echo "make clean        remove everything made by the above"

$(INSTALLED): pyproject.toml
	@echo "Installing into $(VENV) (once; it takes a minute or two) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[demo,experiments,test]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 $(ARGS)
	LNB_TEST_OPTIMISED=1 $(BIN)/python -m pytest -n 2 $(ARGS) $(OPTIMISED)

test-oldest:
	$(MAKE) test VENV=.venv-oldest PIP_FLAGS="--constraint .ci/oldest.txt"

test-newest:
	@test -n "$$(.ci/newest-python)" || { echo "There is no Python 3.12 or later here."; exit 1; }
	$(MAKE) test VENV=.venv-newest PYTHON="$$(.ci/newest-python)"

soak: $(INSTALLED)
	$(BIN)/python tests/soak.py $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-newest .pytest_cache .ruff_cache build dist demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
