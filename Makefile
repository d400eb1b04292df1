# make test       the checks of a change     make demo   the main job, killed and resumed
# make test-full  everything that CI runs    make grpo   reinforcement learning, killed and resumed
# make lint       the static checks alone    make robot  a robot that learns, killed and resumed
# make docs       the docs site, runs/site; REPOSITORY= adds the repository's address to its header
# make bench      the benchmarks             make gpu    tests and benchmarks of one accelerator
# make soak       kills at random moments, until benchmarks/results/kills.json has KILLS of them; can be stopped
# make big        runs of a real size, 16 GB
# make dist       the files of a release, for a package index
# make sweep      further cases of tests, and all model types of transformers: longer than CI has time for
# make peers      the tests that run the own code of LeRobot, VITRA and LightRFT
# make engines    the tests that run the own code of vLLM and SGLang, without an accelerator
# make suites     TRL's and transformers' own tests of their trainers, with our trainers
# make lowest     core tests, with the lowest versions of other packages
# make newest     core tests, with the newest torch and the newest versions of other packages
# make resolve    the versions that pip chooses next to each engine and trainer
# make test-matrix  core tests, with the lowest and highest versions of Python, torch and other packages
# Each sets up its own virtual environment in .venv first. torch comes before the rest and with a fixed version: an
# unpinned torch may pull gigabytes of CUDA packages.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: test test-full docs test-matrix lowest newest resolve sweep peers engines suites big soak demo grpo robot lint
.PHONY: bench gpu dist format clean

# Without bytecode, every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/language.py fsdp2_strategy docs/examples

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup

# After each test, the collectives that its ranks have begun are compared.
test-full: lint
	$(MAKE) docs
	$(BIN)/python -m pytest -n 3 --dist loadgroup --collective-order -m 'not soak and not big and not sweep'
	$(MAKE) big
	$(MAKE) lowest

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# PATH: ruff formats the signatures. The variable turns off an advertisement of the theme.
docs: .venv/installed-docs
	PATH=$(CURDIR)/$(BIN):$$PATH NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# MATRIX_PYTHONS names the interpreters, MATRIX_FLAGS=--remove deletes each environment of .venv-matrix after its tests.
MATRIX_PYTHONS ?= $(PYTHON) python3.11 python3.12 python3.13
export MATRIX_PYTHONS

test-matrix:
	$(PYTHON) .ci/matrix.py $(MATRIX_FLAGS)

lowest:
	$(PYTHON) .ci/matrix.py 3.11-2.13.0-lowest

newest:
	$(PYTHON) .ci/matrix.py 3.11-2.15.0-newest

# Needs a Python that all of them support: RESOLVE_PYTHON. Reads metadata, installs nothing.
RESOLVE_PYTHON ?= $(PEERS_PYTHON)

resolve:
	$(RESOLVE_PYTHON) .ci/resolve.py

sweep: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m sweep

big: .venv/installed
	$(BIN)/python -m pytest -m big tests/test_big.py

KILLS ?= 1000

soak: .venv/installed
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m helpers.soak --kills $(KILLS)

# LeRobot's package needs Python 3.12 and other versions of torch and transformers than .venv has. VITRA's code runs
# there, too, also with the versions of transformers that it was written for and that are newer. LightRFT's code runs in
# .venv. FSDP2_PEERS names a folder with checkouts: lightrft/ (opendilab/LightRFT), vitra/ (microsoft/VITRA); without
# it, their tests are skipped, and say so. A checkout lerobot/ (huggingface/lerobot) takes the place of the package,
# whose newest version, 0.6.1, cannot shard: without it, the tests that need version 0.6.2 are skipped.
PEERS_PYTHON ?= $(shell for each in python3.12 python3.13; do $$each -c "" 2>/dev/null && echo $$each && break; done)
export FSDP2_PEERS
PEERS_PATH = PYTHONPATH=$(CURDIR):$(if $(FSDP2_PEERS),$(wildcard $(FSDP2_PEERS)/lerobot/src))

.venv-peers/installed: pyproject.toml
ifeq ($(PEERS_PYTHON),)
	@echo "make peers needs Python 3.12 or 3.13, which LeRobot requires: set PEERS_PYTHON" && exit 1
endif
	$(PEERS_PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet torch==2.11.0 torchvision==0.26.0
	.venv-peers/bin/pip install --quiet --editable '.[peers]'
	.venv-peers/bin/pip install --quiet --no-deps 'lerobot>=0.6.1,<0.7'
	.venv-peers/bin/pip install --quiet --no-deps --target .venv-peers/transformers-4.47.1 \
		transformers==4.47.1 tokenizers==0.21.4 huggingface-hub==0.36.0
	.venv-peers/bin/pip install --quiet --no-deps --target .venv-peers/transformers-5.24.0 \
		transformers==5.24.0 'tokenizers>=0.23.1,<0.24'
	touch $@

peers: .venv-peers/installed .venv/installed
	$(PEERS_PATH) .venv-peers/bin/python -c "import lerobot.policies"
	$(PEERS_PATH) .venv-peers/bin/python -m pytest tests/test_peers_lerobot*.py tests/test_peers_vitra.py
	$(BIN)/python -m pytest tests/test_peers_lightrft.py

# ENGINES is an environment with vLLM and SGLang, beside the packages of .venv. Neither gets the packages that it requires:
# torch for CUDA and gigabytes of kernels, which no test runs. tests/helpers/engines/packages.txt lists what they import.
ENGINES ?= .venv-engines

.venv-engines/installed: .venv/installed tests/helpers/engines/packages.txt
	$(PYTHON) -m venv .venv-engines
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv-engines/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/core.pth
	.venv-engines/bin/pip install --quiet --no-deps --requirement tests/helpers/engines/packages.txt
	touch $@

engines: $(ENGINES)/installed
	PYTHONPATH=$(CURDIR) $(ENGINES)/bin/python -m pytest tests/test_peers_vllm.py tests/test_peers_sglang.py

# The suites of TRL and transformers with our trainers, on checkouts of the installed versions: FSDP2_PEERS/trl and
# FSDP2_PEERS/transformers. They load tiny models from the Hub.
SUITES ?=
SUITES_FLAGS ?=

suites: .venv/installed
	HF_HUB_OFFLINE=0 PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m helpers.suites.run $(SUITES) $(SUITES_FLAGS)

demo: .venv/installed
	$(BIN)/python docs/examples/demo.py

grpo: .venv/installed
	$(BIN)/python docs/examples/grpo.py

robot: .venv/installed
	$(BIN)/python docs/examples/robot.py

bench: .venv/installed
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/weights.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/stall.py
	$(BIN)/python benchmarks/dcp.py
	$(BIN)/python benchmarks/signature.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/scale.py --tensors 1000 10000
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/lerobot.py
	$(BIN)/python benchmarks/vla.py
	$(BIN)/python benchmarks/policy.py
	$(BIN)/python benchmarks/logprob.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/sequence.py

gpu: .venv/installed
	$(BIN)/python benchmarks/gpu.py

# REPOSITORY is the public address, as in https://github.com/OWNER/NAME. DOCS is that of the docs site, if there is one.
dist: .venv/installed
	$(BIN)/python .ci/dist.py --repository '$(REPOSITORY)' $(if $(DOCS),--docs '$(DOCS)')

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-matrix .venv-peers .venv-engines dist runs
