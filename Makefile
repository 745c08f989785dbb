# One environment serves every target; it is made on first use and again when what it is made from changes.
# `make VENV=/somewhere/else test` keeps it elsewhere; `make PYTHON=python3.12 test` chooses the interpreter.
VENV ?= .venv
PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(python) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(python))))

RUN := $(VENV)/bin
# The tests of one file run one after the other, four files beside each other: many tests wait for a process of theirs.
BESIDE := --numprocesses=4 --max-worker-restart=1 --dist=loadscope
INSTALLED := $(VENV)/installed
WITHOUT_NATIVE := $(patsubst %,tests/cpu/test_%.py,exactness soft_budget reclaimer block_exactness block_session block_meter block_trace)

# The interpreter that sees a GPU, with torch, pytest and hypothesis installed: nothing is downloaded for these two.
GPU_PYTHON ?= python3

.PHONY: demo test test-all test-busy test-newest test-gpu check docs bench bench-gpu papers clean

# Compiled now, so that nothing waits for it later; where there is no compiler everything runs without it.
demo: $(INSTALLED)
	-@$(RUN)/spillway build
	$(RUN)/spillway demo

# First the part that promises to do without torch, with torch refused to every import; then what needs torch; at last
# bits and budgets where there is no native part. Hundreds of processes import the same modules: each is compiled once,
# also where the environment wants no bytecode written.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	-@$(RUN)/spillway build
	$(RUN)/python -m pytest $(BESIDE) $(LONG) --without-torch tests/pure tests/architecture
	$(RUN)/python -m pytest $(BESIDE) $(LONG) --ignore=tests/pure --ignore=tests/architecture
	SPILLWAY_NATIVE=0 $(RUN)/python -m pytest $(BESIDE) $(LONG) $(WITHOUT_NATIVE)

# What is marked `long` too: before a change of what runs is given to others. Half an hour and more on two processors.
test-all:
	$(MAKE) test LONG=--long

# Three times in a row beside four processes that are busy: what holds only on an idle machine fails here. Some 90 minutes.
test-busy: $(INSTALLED)
	@busy=; trap 'kill $$busy' EXIT; for i in 1 2 3 4; do $(RUN)/python -c 'while True: pass' & busy="$$busy $$!"; done; \
	$(MAKE) test && $(MAKE) test && $(MAKE) test

# The same tests with the newest torch that pip finds, in an environment of its own. Once made it stays: remove
# .venv-newest for a newer one. Checks with ruff and mypy are made with the pinned versions alone.
test-newest:
	$(MAKE) VENV=.venv-newest UNPINNED=torch test

check: $(INSTALLED)
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy

# The documentation site, into site/; a link that leads nowhere is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(RUN)/python -m benchmarks

papers: $(INSTALLED)
	$(RUN)/python -m papers

test-gpu:
	PYTHONPATH=src:. $(GPU_PYTHON) -m pytest tests/gpu tests/cpu/test_cuda_machine.py tests/cpu/test_cuda_engine.py tests/cpu/test_cuda_lanes.py tests/cpu/test_block_host.py -p no:cacheprovider -W default --durations=10

bench-gpu:
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks gpu device_arena

clean:
	rm -rf $(VENV) .venv-newest site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: it is by far the largest, and nothing else may choose its version.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Spillway needs Python 3.11 or newer with venv and pip; none was found." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	sed '/^$(UNPINNED)==/d' constraints.txt > $(VENV)/constraints.txt
	$(RUN)/python -m pip install --constraint $(VENV)/constraints.txt torch
	$(RUN)/python -m pip install --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@
