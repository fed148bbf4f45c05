PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV = .venv/bin/python
# handed over through the environment, so that quotes in a prompt stay what they are
export PROMPT
EXAMPLES ?= 100000
MINUTES ?= 1000000
GRAPHS ?= 300
KILLS ?= 1000

.PHONY: help setup demo serve test test-all coverage fuzz soak lint bench checkpoint lock audit

help:
	@echo "make demo [PROMPT=\"a blue square on a white background\"]   draw a picture into output/"
	@echo "make serve        leave the canvas open on http://127.0.0.1:8188"
	@echo "make test         all tests: unit, graph, server, browser"
	@echo "make test-all     these, and the lowest and newest versions of all that the pack needs"
	@echo "make fuzz [EXAMPLES=100000] [MINUTES=60]   broken files and inputs, for hours, going on where it was"
	@echo "make coverage     the tests once more, and which lines and branches of sana_core and nodes they reach"
	@echo "make soak [GRAPHS=300] [KILLS=1000]   faults and hundreds of graphs on one server, for hours; figures in benchmarks/"
	@echo "make lint         ruff and mypy"
	@echo "make bench        measure, and write benchmarks/"
	@echo "make audit        for a release: its bill of materials, and known weaknesses of what it needs"
	@echo "make checkpoint   train demo/sana-tiny again (about 80 minutes)"

setup:
	@$(PYTHON) scripts/setup.py

demo: setup
	@$(VENV) scripts/demo.py --prompt "$$PROMPT"

serve: setup
	@$(VENV) scripts/demo.py --serve

test: lint
	@$(PYTHON) scripts/setup.py --browser
	$(VENV) -m pytest -c tests/pytest.ini tests

test-all: test
	$(VENV) scripts/versions.py

# the test that lets a disk be full meets coverage's own file too, and fails here
coverage: setup
	@$(PYTHON) scripts/setup.py --browser
	$(VENV) -m coverage erase
	-$(VENV) -m coverage run -m pytest -c tests/pytest.ini tests
	$(VENV) -m coverage combine -q
	$(VENV) -m coverage report --fail-under 90

# the tests of tests/fuzz are in `make test` too, with a few examples each
fuzz: setup
	OMP_NUM_THREADS=1 $(VENV) tests/fuzz/run.py --examples $(EXAMPLES) --minutes $(MINUTES)

# the kills add to those of benchmarks/kills.json
soak: setup
	OMP_NUM_THREADS=1 $(VENV) tests/soak/mixed_graphs.py --graphs $(GRAPHS)
	OMP_NUM_THREADS=1 $(VENV) tests/soak/two_servers.py
	OMP_NUM_THREADS=1 $(VENV) tests/soak/fail_batch.py
	ALLOCATIONS_EVERY=1 $(VENV) -m pytest -c tests/pytest.ini tests/unit/test_every_allocation.py \
		tests/graph/test_graph_allocations.py -o timeout=0
	OMP_NUM_THREADS=1 $(VENV) tests/soak/kill_batch.py --kills $(KILLS)

lint: setup
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy

bench: setup
	$(VENV) benchmarks/start.py
	$(VENV) benchmarks/load.py
	$(VENV) benchmarks/sampling.py
	$(VENV) benchmarks/decode.py
	$(VENV) benchmarks/decode_lite.py
	$(VENV) benchmarks/memory.py
	$(VENV) benchmarks/reference.py
	OMP_NUM_THREADS=1 $(VENV) benchmarks/batch.py

checkpoint: setup
	$(VENV) -m demo.recipe

# asks PyPI about weaknesses, so it needs the network
audit: setup
	$(PYTHON) -m venv .cache/release
	.cache/release/bin/python -m pip install --quiet --require-hashes -r requirements/release.txt
	.cache/release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		-o sbom.json $(VENV)
	.cache/release/bin/pip-audit --require-hashes --disable-pip -r requirements/lock.txt

# needs uv
COMPILE = uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-header --no-annotate
lock: setup
	$(COMPILE) requirements/dev.in .cache/ComfyUI/requirements.txt -o requirements/lock.txt
	$(COMPILE) requirements/release.in -o requirements/release.txt
