# The project's commands. Each prepares .venv by itself; nothing else is needed than
# Python 3.11+, make and a package index.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEMO_STAMP := $(VENV)/.stamp-demo
PYTEST := $(BIN)/python -m pytest --durations=20 --durations-min=5
UNIT := $(PYTEST) -q -p no:cacheprovider -m "not slow"
SPEED := not slow

# The suites that run beside the others: one that computes, and one that often waits for processes.
COMPUTING := conformance
BESIDE_OTHERS := $(COMPUTING) multiprocess
SUITES := $(BESIDE_OTHERS:%=test-%) test-others

# What is left to `make test-everything`; of other folders it runs a part there.
REST := gpu_like sharded keras_suites versions/test_oldest_keras.py versions/test_comparison.py
IN_PART := conformance examples facade in_scope ahead_of_time $(addprefix unit/,agreement/test_measures.py backends/test_torch_scale.py job/test_gate.py job/test_scale.py)
OF_WORKERS := $(addprefix multiprocess/test_,elastic.py failures.py memory.py one_device.py warm.py weights.py)

# What is installed into folders of its own, beside the locked packages.
BESIDE := oldest-keras newest-jax ahead-of-time keras-hub orbax

# Tests start some hundred processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo gallery gallery-pages check lint unit unit-backends unit-others test test-slow $(SUITES) test-everything test-rest test-in-part test-of-workers internals versions nightly install-locked $(BESIDE:%=install-%) keras-tests gpu-like gpu in-scope sharded ahead-of-time wheels docs pictures benchmarks house support format clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(STAMP) ## make .venv: the locked packages and kerasdist, editable

# Says what is being done, and how long it took.
PHASE = @printf '%-55s' '$(1) ...'; start=$$(date +%s); $(2) && echo "$$(($$(date +%s) - start)) s"
# Python compiles modules as they are imported. pip would compile all of them, five times as many.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

# For the demo: Keras and the frameworks, as locked, and kerasdist, editable; then the whole lock and,
# side by side in folders of their own, the oldest supported Keras, the newest JAX, compilers for
# TPUs and GPUs, KerasHub and KerasTuner, Orbax.
# kerasdist in a step of its own, because --no-deps keeps it from changing what is pinned, and
# --no-build-isolation from downloading the build tools again.
IN_DEMO := keras tensorflow-cpu jax torch scikit-learn rich typer
BUILD_TOOLS := hatchling editables
CUDA := PyTorch comes as a CUDA build of several GB here. With the CPU build: \
	PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
$(DEMO_STAMP): requirements/lock.txt pyproject.toml
	$(call PHASE,making $(VENV),$(PYTHON) -m venv --clear $(VENV))
	@! $(PIP_INSTALL) --no-deps --dry-run --report - -c requirements/lock.txt torch | grep -q '"nvidia-' || echo '$(CUDA)'
	$(call PHASE,installing Keras and the three frameworks,$(PIP_INSTALL) -c requirements/lock.txt $(IN_DEMO) $(BUILD_TOOLS))
	$(call PHASE,installing kerasdist,$(PIP_INSTALL) --no-deps --no-build-isolation -e .)
	@touch $@

$(STAMP): $(DEMO_STAMP) $(BESIDE:%=requirements/%.txt)
	+$(MAKE) --no-print-directory --jobs=4 install-locked $(BESIDE:%=install-%)
	# Else all processes that start at once would compile the frameworks' modules, each for itself.
	for backend in tensorflow jax torch; do KERAS_BACKEND=$$backend $(BIN)/python -c "import keras" || exit; done
	touch $@

install-locked:
	$(PIP_INSTALL) -r requirements/lock.txt

$(BESIDE:%=install-%): install-%:
	rm -rf $(VENV)/$*
	$(PIP_INSTALL) --no-deps --target $(VENV)/$* -r requirements/$*.txt

demo: $(DEMO_STAMP) ## train the first example on two replicas on each backend (two minutes, with what it installs)
	@$(BIN)/python examples/demo.py

gallery: $(STAMP) ## run all examples on each backend, alone and with two workers; writes their pages (an hour)
	$(BIN)/python examples/gallery.py run
	$(BIN)/python examples/gallery.py pages

gallery-pages: $(STAMP) ## write the examples' pages from what `make gallery` has recorded
	$(BIN)/python examples/gallery.py pages

check: $(STAMP) ## what to run before a commit (under two minutes)
	+$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint unit-backends unit-others

lint: $(STAMP) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: unit-backends unit-others ## the tests that train nothing

unit-backends: $(STAMP)
	$(UNIT) tests/unit/backends

unit-others: $(STAMP)
	$(UNIT) tests/unit tests/packaging --ignore=tests/unit/backends

# Side by side, since many tests wait for processes rather than compute. Those that watch the clock
# go first: what computes is nice. --output-sync keeps the reports apart.
test: $(STAMP) ## each promise on PyTorch, each theme on each backend (a quarter of an hour on 2 cores)
	+$(MAKE) --no-print-directory --jobs=5 --output-sync=target lint $(SUITES)

test-slow: $(STAMP) ## each promise on TensorFlow and JAX too, long jobs (half an hour to an hour); CI runs both
	+$(MAKE) --no-print-directory --jobs=5 --output-sync=target SPEED=slow $(SUITES)

$(COMPUTING:%=test-%): NICE := nice -n 5
$(BESIDE_OTHERS:%=test-%): test-%:
	$(NICE) $(PYTEST) -q -p no:cacheprovider -m "$(SPEED)" tests/$*

test-others:
	$(PYTEST) -q -p no:cacheprovider -m "$(SPEED)" tests $(BESIDE_OTHERS:%=--ignore=tests/%) $(REST:%=--ignore=tests/%)

# Three at a time, in this order: of the two that wait for processes, the second begins when the
# first has ended.
test-everything: $(STAMP) ## all that `make test` leaves out: test-slow, 3 and 4 replicas, like GPUs, sharded, Keras's tests, versions too (longer)
	+$(MAKE) --no-print-directory --jobs=3 --output-sync=target SPEED=slow test-multiprocess test-conformance test-others test-in-part test-rest test-of-workers

test-rest: LEFT := $(REST)
test-in-part: LEFT := $(IN_PART)
test-of-workers: LEFT := $(OF_WORKERS)
test-rest test-in-part: NICE := nice -n 5
test-rest test-in-part test-of-workers:
	KERASDIST_TEST_EVERYTHING=1 $(NICE) $(PYTEST) -q -p no:cacheprovider $(LEFT:%=tests/%)

keras-tests: $(STAMP) ## Keras's own tests in a scope; writes docs/keras_tests.md (an hour)
	$(BIN)/python -m tests.keras_suites.suite report

gpu-like: $(STAMP) ## the suites' cases on CPU replicas that behave like GPUs (20 minutes)
	KERASDIST_GPU_LIKE=all $(PYTEST) -q tests/gpu_like

sharded: $(STAMP) ## the suites' cases with state that the replicas divide, on JAX and TensorFlow (an hour)
	KERASDIST_SHARDED=all $(PYTEST) -q tests/sharded

in-scope: $(STAMP) ## the suites' cases with everything inside `with strategy.scope():` (20 minutes)
	KERASDIST_IN_SCOPE=all $(PYTEST) -q tests/in_scope

PARTS ?= *
gpu: ## what this machine's accelerators can show, with the frameworks of $(PYTHON); PARTS='torch.1.* jax.1.speed'
	$(PYTHON) -m tests.accelerators.on_gpu --only $(PARTS:%='%')

ahead-of-time: $(STAMP) ## `fit` compiled for 8 to 4,096 H100 and for TPUs, with neither (three minutes)
	KERASDIST_TEST_EVERYTHING=1 $(PYTEST) -q tests/ahead_of_time

# The newest PyTorch is in this alone: beside the lock's it would take 5 GB, as PyPI has no build
# of it for CPUs.
versions: $(STAMP) ## a selection with the oldest, newest and locked versions and Keras's nightly, on each Python; writes docs/versions.md (an hour)
	$(BIN)/python -m tests.versions

internals: $(STAMP) ## what is not public in Keras and the frameworks, and used: counts; writes docs/what-we-hold-on-to.md
	$(BIN)/python -m tests.internals
	$(BIN)/python -m tests.internals page

nightly: $(STAMP) ## a selection with Keras's newest nightly; if it passes, requirements/keras-nightly.txt moves to it (four minutes)
	$(BIN)/python -m tests.versions.nightly

wheels: $(STAMP) ## the wheel in clean environments, a backend and a Python each (20 minutes)
	$(BIN)/python -m tests.packaging.wheels

docs: $(STAMP) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(STAMP) ## draw the pictures of docs/guides/watch-a-job.md and when-a-worker-dies.md, the home page's live view and, with Chromium, screens of the site (four minutes)
	$(BIN)/python -m benchmarks.watch_pictures
	$(BIN)/python -m benchmarks.elastic_picture
	$(BIN)/python -m benchmarks.site_picture

benchmarks: $(STAMP) ## run the benchmarks and write docs/benchmarks.md (45 minutes)
	$(BIN)/python -m benchmarks.page

house: $(STAMP) ## count the package: lines, files, circles of imports, calls of a step
	$(BIN)/python -m tests.house

support: $(STAMP) ## run the exactness suite and write docs/support.md from it
	XLA_FLAGS= $(BIN)/python -m tests.conformance.support  # optimized: see tests/environment.py

format: $(STAMP) ## format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that is built
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
