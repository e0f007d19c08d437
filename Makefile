# make serve, make test, make lint: each first installs into the virtual environment what it needs and what is not there yet.
PYTHON ?= python3
VENV ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV must be a path without spaces, not "$(VENV)")
endif
JOBS ?= 2

bin := $(VENV)/bin
wheels := $(VENV)/editable
projects := pyproject.toml $(sort $(wildcard plugins/*/pyproject.toml))
plugins := $(patsubst %/pyproject.toml,%,$(filter plugins/%,$(projects)))
compiled := $(sort $(wildcard plugins/*/setup.py plugins/*/src/*/native/*))
sources := core/enginery $(sort $(wildcard plugins/*/src)) tests/meta/typing_snippets $(sort $(wildcard docs/*.py))
# The projects of this tree share one setuptools.
install = $(bin)/python -m pip install --disable-pip-version-check --no-build-isolation -c $(constraints)
# For DEVICE=cpu: an interpreter of kernels, for tests of some plugins; and torch's CPU build: 0.2 GB to fetch and not 3. Where that index is out of reach, what pip finds elsewhere will do.
DEVICE ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),cuda,cpu)
interpreted := $(if $(filter cpu,$(DEVICE)),$(shell grep -l '^interpreter = ' plugins/*/pyproject.toml))
# For DEVICE=cuda: the torch with which all of it has run on GPUs. Of 2.13, kernels alone have run with the Triton that it comes with.
constraints := $(if $(filter cuda,$(DEVICE)),$(VENV)/constraints.txt,constraints.txt)
cuda_torch := $(if $(filter cuda,$(DEVICE)),sed 's/^torch==.*/torch==2.11.0/' constraints.txt > $(constraints))
cpu_torch = $(if $(filter cpu,$(DEVICE)),$(install) --quiet --no-compile --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu torch || true)

# Builds and tests leave files in the tree; both would say so in tracebacks, after minutes of installing.
writable = for folder in . $(plugins); do test -w $$folder || { echo "$(CURDIR)/$$folder cannot be written to, and make builds and tests in this tree: run it in a clone of yours, or make the tree writable" >&2; exit 1; }; done

.PHONY: help serve test test-full lint venv dev clean
help:
	@echo "make serve [ARGS='-m MODEL --port 8000'] serve a model; the embedded one if none is named"
	@echo "make test  [ARGS='-k words'] [JOBS=2]   run the tests that need no GPU, on so many cores; ARGS may name files"
	@echo "make test-full                          the same with every combination, of which make test has some"
	@echo "make lint                               ruff and mypy over the core, every plugin and what makes pages"
	@echo "make venv                               only set up $(VENV), as far as serving needs it"
	@echo "make dev                                the same, and what tests and lint need"
	@echo "make clean                              remove $(VENV) and the caches"

# exec: signals to make reach the server, which ends by itself and with status 0. The model drafts for itself where it can; a later flag wins.
serve: $(VENV)/.serve
	@exec $(bin)/engine serve --drafter auto $(ARGS)

# Tests of real processes wait half of their time, so the others run beside them and take what they leave (nice): those see the machine
# almost as if it were theirs. They have half as many workers more, a whole file each: a module's server is started once. Of the others
# each worker takes neighbouring tests and then what others have not begun. What the processes' tests print follows when both have ended.
# Compiled modules are kept even where the environment says not to: some hundred processes import the same ones.
pytest := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(bin)/pytest -rfER -m 'not gpu'
with_processes := tests/chaos tests/serve tests/engine/test_bench_serve.py plugins/enginery-web
named := $(wildcard $(foreach word,$(ARGS),$(firstword $(subst ::, ,$(word)))))
# pytest ends with 5 if no test has the words of -k in it: that is fine in one of the two runs.
in_two_runs = log=$$(mktemp); trap 'rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; \
	$(pytest) -n $(shell expr $(JOBS) \* 3 / 2) --dist loadfile $(with_processes) $(ARGS) >"$$log" 2>&1 & \
	nice -n 19 $(pytest) -n $(JOBS) --dist worksteal $(addprefix --ignore=,$(with_processes)) $(ARGS); others=$$?; \
	wait $$!; processes=$$?; cat "$$log"; \
	[ $$processes != 5 ] || processes=$$others; [ $$others != 5 ] || others=$$processes; \
	[ $$others != 0 ] || exit $$processes; exit $$others
test: $(VENV)/.test
	@$(writable)
	@$(if $(named),$(pytest) -n $(JOBS) $(ARGS),$(in_two_runs))

# Also what a machine with a CUDA device runs anyhow: tests/pairwise.py.
test-full: export FULL_TESTS := 1
test-full: test

lint: $(VENV)/.lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy $(sources)
	MYPYPATH=docs/benchmarks $(bin)/mypy --config-file docs/benchmarks/mypy.ini $(sort $(wildcard docs/benchmarks/*.py))

venv: $(VENV)/.serve
dev: $(VENV)/.test $(VENV)/.lint

# One pip call for the core and all plugins: in two, the first could take a stranger's `enginery` from the package index. It would leave
# those of the same version that are there already as they are. Of 170 MB of compiled modules, only those that a server imports are made.
$(VENV)/.serve: $(projects) $(compiled) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Enginery needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(writable)
	$(PYTHON) -m venv $(VENV)
	@$(cuda_torch)
	@$(install) --quiet 'setuptools>=77'
	@$(cpu_torch)
	@$(bin)/python plugins/editable_wheels.py $(wheels) . $(plugins)
	@$(bin)/python -m pip --disable-pip-version-check -qqq uninstall --yes enginery $(notdir $(plugins))
	$(install) --no-compile $(wheels)/*.whl
	@env -u PYTHONDONTWRITEBYTECODE $(bin)/python -c 'import enginery.serve.server, enginery.engine.engine'
	@touch $@

# Modules are compiled when they are imported: of transformers alone that spares 20 s of processor time.
$(VENV)/.test: $(VENV)/.serve
	$(install) --no-compile -e '.[test]' $(patsubst %/pyproject.toml,-e '%[interpreter]',$(interpreted))
	@touch $@

# After that of the tests, where both are wanted: two pips at once would break the environment.
$(VENV)/.lint: $(VENV)/.serve | $(if $(filter test test-full dev,$(MAKECMDGOALS)),$(VENV)/.test)
	$(install) --no-compile -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find core plugins tests docs -name __pycache__ -prune -exec rm -rf {} +
