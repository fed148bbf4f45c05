PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV = .venv/bin/python
# handed over through the environment, so that quotes in a prompt stay what they are
export PROMPT
EXAMPLES ?= 100000
MINUTES ?= 1000000

.PHONY: help setup demo serve test test-all fuzz lint bench checkpoint lock

help:
	@echo "make demo [PROMPT=\"a blue square on a white background\"]   draw a picture into output/"
	@echo "make serve        leave the canvas open on http://127.0.0.1:8188"
	@echo "make test         all tests: unit, graph, server, browser"
	@echo "make test-all     these, and the lowest and newest versions of all that the pack needs"
	@echo "make fuzz [EXAMPLES=100000] [MINUTES=60]   broken files and inputs, for hours, going on where it was"
	@echo "make lint         ruff and mypy"
	@echo "make bench        measure, and write benchmarks/"
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

# the tests of tests/fuzz are in `make test` too, with a few examples each
fuzz: setup
	OMP_NUM_THREADS=1 $(VENV) tests/fuzz/run.py --examples $(EXAMPLES) --minutes $(MINUTES)

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

# needs uv
lock: setup
	uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
		requirements/dev.in .cache/ComfyUI/requirements.txt -o requirements/lock.txt
