PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV = .venv/bin/python
# handed over through the environment, so that quotes in a prompt stay what they are
export PROMPT
EXAMPLES ?= 100000
MINUTES ?= 1000000
GRAPHS ?= 300
KILLS ?= 1000
# all cores, if each has 6 GB
WORKERS ?= $(shell $(PYTHON) -c "import os; gigabytes = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9; \
	print(max(2, min(os.cpu_count(), int(gigabytes / 6))))")
PYTEST = $(VENV) -m pytest -c tests/pytest.ini -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# what failed beside other tests is tried once more by itself: its machine may have been busy. Both runs print their failures
ALONE = echo "once more, one at a time, what failed:"; \
	OMP_NUM_THREADS=1 $(VENV) -m pytest -c tests/pytest.ini --last-failed --last-failed-no-failures none -x
GPU_PYTHON ?= python3
GPU_MINUTES ?= 8
EACH ?= 10

.PHONY: help setup demo serve gallery test test-all coverage mutants fuzz soak lint bench gpu gpu-bundle checkpoint lock audit

help:
	@echo "make demo [PROMPT=\"a flat drawing of a blue house in the snow at night\"]   generate an image into output/"
	@echo "make serve        leave the canvas open on http://127.0.0.1:8188, or a free port"
	@echo "make gallery      open every template in Chromium, run it, and write its card and docs/gallery.md"
	@echo "make test [WORKERS=4]   unit, graph, server and browser tests, so many at once, without the slow ones"
	@echo "make test HOST=0.27   graph and server tests in another ComfyUI: 0.27, 0.30, 0.26, which is refused, or a folder"
	@echo "make test FRONTEND=newest   browser tests with the newest frontend instead of the pinned one"
	@echo "make test-all     all tests, then the newest frontend, other ComfyUIs, and the lowest and newest versions of all that the pack needs"
	@echo "make fuzz [EXAMPLES=100000] [MINUTES=60]   broken files and inputs, for hours, resuming"
	@echo "make coverage     the tests once more, and which lines and branches of sana_core and nodes they reach"
	@echo "make mutants [EACH=10]   change the code in small ways, and count which changes the unit tests notice, for hours"
	@echo "make soak [GRAPHS=300] [KILLS=1000]   faults and hundreds of graphs on one server, for hours; figures in benchmarks/"
	@echo "make lint         ruff and mypy"
	@echo "make bench        measure, and write benchmarks/"
	@echo "make gpu [GPU_PYTHON=python3]   on a machine with a GPU: is it right, and how fast is it, in 8 minutes"
	@echo "make gpu-bundle FOR=\"3.12 2.11 packages.txt\"   pack what make gpu needs offline: Python, torch, pip list there"
	@echo "make audit        for a release: its bill of materials, known weaknesses of what it needs, and the registry's archive"
	@echo "make checkpoint   train demo/sana-posters on, and what is beside it, into demo/build (hours, resuming)"

setup:
	@$(PYTHON) scripts/setup.py

demo: setup
	@$(VENV) scripts/demo.py --prompt "$$PROMPT"

serve: setup
	@$(VENV) scripts/demo.py --serve

gallery:
	@$(PYTHON) scripts/setup.py --browser
	$(VENV) scripts/gallery.py

ifdef HOST
test: lint
	OMP_NUM_THREADS=1 $(VENV) scripts/hosts.py $(HOST)
else ifdef FRONTEND
# make exports FRONTEND to the tests, which serve that frontend
test: lint
	@$(PYTHON) scripts/setup.py --browser
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" tests/browser || { $(ALONE) tests/browser; }
else
test: lint
	@$(PYTHON) scripts/setup.py --browser
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" tests || { $(ALONE) tests; }
endif

test-all: lint
	@$(PYTHON) scripts/setup.py --browser
	FUZZ_PROFILE=all OMP_NUM_THREADS=1 $(PYTEST) tests || { $(ALONE) tests; }
	$(MAKE) test FRONTEND=newest
	OMP_NUM_THREADS=1 $(VENV) scripts/hosts.py
	$(VENV) scripts/versions.py

# the test that lets a disk be full meets coverage's own file too, and fails here
coverage: setup
	@$(PYTHON) scripts/setup.py --browser
	$(VENV) -m coverage erase
	-$(VENV) -m coverage run -m pytest -c tests/pytest.ini tests
	$(VENV) -m coverage combine -q
	$(VENV) -m coverage report --fail-under 90

# resumes; the figures are in benchmarks/mutants.json
mutants: setup
	$(PYTHON) -m venv .cache/mutants
	.cache/mutants/bin/python -m pip install --quiet --require-hashes -r requirements/mutants.txt
	$(VENV) scripts/mutants.py --each $(EACH)

# the tests of tests/fuzz are in `make test` too, with a few examples each
fuzz: setup
	OMP_NUM_THREADS=1 $(VENV) tests/fuzz/run.py --examples $(EXAMPLES) --minutes $(MINUTES)

# the kills add to those of benchmarks/kills.json and train_kills.json
soak: setup
	OMP_NUM_THREADS=1 $(VENV) tests/soak/mixed_graphs.py --graphs $(GRAPHS)
	OMP_NUM_THREADS=1 $(VENV) tests/soak/two_servers.py
	OMP_NUM_THREADS=1 $(VENV) tests/soak/fail_batch.py
	OMP_NUM_THREADS=1 $(VENV) tests/soak/fail_train.py
	ALLOCATIONS_EVERY=1 $(VENV) -m pytest -c tests/pytest.ini tests/unit/test_every_allocation.py \
		tests/unit/test_accelerator_allocations.py tests/graph/test_graph_allocations.py -o timeout=0
	OMP_NUM_THREADS=1 $(VENV) tests/soak/kill_batch.py --kills $(KILLS)
	OMP_NUM_THREADS=1 $(VENV) tests/soak/cluster_faults.py
	OMP_NUM_THREADS=1 $(VENV) tests/soak/kill_train.py --kills $(KILLS)

lint: setup
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy

bench: setup
	$(VENV) -m benchmarks.start
	$(VENV) -m benchmarks.load
	$(VENV) -m benchmarks.sampling
	$(VENV) -m benchmarks.decode
	$(VENV) -m benchmarks.decode --lite 512
	$(VENV) -m benchmarks.decode_kl
	$(VENV) -m benchmarks.memory
	$(VENV) -m benchmarks.train_memory
	$(VENV) -m benchmarks.train
	$(VENV) -m benchmarks.train_lora .cache/train_lora
	OMP_NUM_THREADS=1 $(VENV) -m benchmarks.train_parallel
	$(VENV) -m benchmarks.reference
	$(VENV) -m benchmarks.accelerator_counts
	$(VENV) -m benchmarks.kernels
	$(VENV) -m benchmarks.quantised
	OMP_NUM_THREADS=1 $(VENV) -m benchmarks.batch
	OMP_NUM_THREADS=1 $(VENV) -m benchmarks.host_bound
	OMP_NUM_THREADS=1 $(VENV) -m benchmarks.host_time
	OMP_NUM_THREADS=1 $(VENV) -m benchmarks.train_host

# takes a Python that has torch, and installs nothing into it
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --minutes $(GPU_MINUTES)

gpu-bundle: setup
	$(VENV) scripts/gpu_bundle.py $(FOR)

checkpoint: setup
	$(VENV) -m demo.recipe demo/build/recipe --first 512
	$(VENV) -m demo.beside

# asks PyPI about weaknesses, and fails where it gets no answer; tests/unit/test_archive.py holds what may be in the archive
audit: setup
	$(PYTHON) -m venv .cache/release
	.cache/release/bin/python -m pip install --quiet --require-hashes -r requirements/release.txt
	.cache/release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		-o sbom.json $(VENV)
	.cache/release/bin/comfy --skip-prompt --no-enable-telemetry node validate
	.cache/release/bin/comfy --skip-prompt --no-enable-telemetry node pack
	$(VENV) -m zipfile -l node.zip
	.cache/release/bin/pip-audit --strict --require-hashes --disable-pip -r requirements/lock.txt

# needs uv
COMPILE = uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-header --no-annotate
lock: setup
	$(COMPILE) requirements/dev.in .cache/ComfyUI/requirements.txt -o requirements/lock.txt
	$(COMPILE) requirements/release.in -o requirements/release.txt
	$(COMPILE) requirements/mutants.in -o requirements/mutants.txt
