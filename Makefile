# make serve, make test, make lint: each makes the virtual environment first if it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

bin := $(VENV)/bin
stamp := $(VENV)/.installed
projects := pyproject.toml $(sort $(wildcard plugins/*/pyproject.toml))
plugins := $(patsubst %/pyproject.toml,%,$(filter plugins/%,$(projects)))
sources := core/enginery $(sort $(wildcard plugins/*/src))

.PHONY: help serve test lint venv clean
help:
	@echo "make serve [ARGS='-m MODEL --port 8000'] serve a model; the embedded one if none is named"
	@echo "make test  [ARGS='-k words'] [JOBS=2]   run the tests that need no GPU, on so many cores"
	@echo "make lint                               ruff and mypy over the core and every plugin"
	@echo "make venv                               only set up $(VENV)"
	@echo "make clean                              remove $(VENV) and the caches"

# exec: signals to make reach the server, which ends by itself and with status 0.
serve: $(stamp)
	@exec $(bin)/engine serve $(ARGS)

test: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/pytest -rfER -m 'not gpu' -n $(JOBS) --dist loadfile $(ARGS)

lint: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy $(sources)

venv: $(stamp)

# One pip call for the core and all plugins: in two, the first could take a stranger's `enginery` from the package index.
$(stamp): $(projects) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Enginery needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test,lint]' $(addprefix -e ,$(plugins))
	@touch $@

clean:
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find core plugins tests docs -name __pycache__ -prune -exec rm -rf {} +
