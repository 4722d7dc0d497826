# make demo | make test [TORCH=2.15.0] [SHARE=text] | make test-slow | make test-all | make test-gpu-code [TORCH=2.11.0] | make test-bench | make scenarios | make fuzz [MINUTES=30] | make mutants | make stacks [STACK=titan] | make peers CHECKOUT=DIR | make wheel | make gpu | make format | make docs | make tools | make clean
PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-torch-$(TORCH))
# The interpreter of the Triton that comes with torch 2.11 needs an older NumPy.
OTHER := $(if $(filter 2.11.%,$(TORCH)),numpy<2.4)
# What the demo needs, and what all tests and tools need.
BASE := $(VENV)/base
READY := $(VENV)/ready
# One more than two cores: tests of ranks also wait.
WORKERS ?= 3
MINUTES ?= 30
GPU_CODE := $(wildcard tests/graph/*on_gpu*.py tests/unit/test_gpu_*.py) $(addprefix tests/graph/test_,$(addsuffix .py,fuse_matmuls single_kernel static_inputs streams))
SEES_GPU := import torch, triton, rich, commpass; raise SystemExit(not torch.cuda.is_available())

# Tests start hundreds of processes, each of which would otherwise compile all sources anew.
export PYTHONDONTWRITEBYTECODE =

STACK ?= vllm titan trainers ft ao

.PHONY: demo test test-slow test-all test-gpu-code test-bench scenarios fuzz mutants wheel stacks peers gpu check format docs tools clean setup

demo: $(BASE)
	@$(VENV)/bin/python examples/train_tp.py --ranks 2

# Each worker computes on one core: threads of several workers would wait for each other.
test test-slow test-all test-gpu-code test-bench scenarios: export OMP_NUM_THREADS = 1

# The quick tests; with SHARE=text also one in 8 of the slow ones and one in 256 of the long ones,
# which the text chooses.
test: check
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadgroup $(if $(SHARE),--share $(SHARE))

# All tests of `make test` with every SHARE, but the long ones.
test-slow: check
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadgroup --slow

# With every combination of which `make test` tries a few.
test-all: check
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadgroup --every

# What a GPU would run, on a machine without one: graphs, launches, machine code. With TORCH=2.11.0 or
# TORCH=2.15.0 it is a build with CUDA, and the oldest or newest Triton.
test-gpu-code: $(READY)
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadgroup --slow $(GPU_CODE)

# The tests of what is in benchmarks/; most of those that build networks in a box are in `make test-all`.
test-bench: $(READY)
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadgroup --bench tests/bench

# Every scenario under every policy; the slow tests train three of them.
scenarios: $(READY)
	$(VENV)/bin/pytest tests/scenarios --every

# Other random programs each time; what fails is kept in tests/fuzz/found/; `make test` runs some of these, `make test-all` all.
fuzz: $(READY)
	PYTHONPATH=tests $(VENV)/bin/python -m fuzz --minutes $(MINUTES)

# Breaks one thing at a time in a copy of the repository: the tests that are responsible must notice.
mutants: $(READY)
	PYTHONPATH=tests $(VENV)/bin/python -m mutants

# A wheel, to install elsewhere, until there is a release on an index.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

# The real libraries that run models, each in an environment of its own, with commpass in them.
stacks: $(STACK:%=.venv-%/ready)
	for stack in $(STACK); do .venv-$$stack/bin/python tests/stacks/check_$$stack.py || exit 1; done

# PyTorch's own tests of collectives, from a checkout of it at the pinned version, plain and with commpass.
peers: .venv-peers/ready
	PYTHONPATH=tests .venv-peers/bin/python -m peers $(CHECKOUT)

.venv-%/ready: tests/stacks/%.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	grep --quiet '^torch==' $< || .venv-$*/bin/python -m pip install --quiet --constraint constraints.txt torch numpy
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	.venv-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-$*/bin/python -m pip install --quiet --editable .
	touch $@

# On a machine with an H100 or H200: every kernel is checked, then timed, in less than 9 minutes.
# With $(PYTHON) if it has a torch that sees the GPU: nothing is downloaded.
gpu:
	@if $(PYTHON) -c '$(SEES_GPU)' 2> /dev/null; then $(PYTHON) benchmarks/gpu/run.py; \
		else $(MAKE) $(READY) && $(VENV)/bin/python benchmarks/gpu/run.py; fi

# Types are checked against the pinned torch alone: torch's own annotations differ between versions.
check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(if $(filter $(PINNED),$(TORCH)),$(VENV)/bin/mypy)

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# An environment of its own: what builds the site reads commpass, and need not run it.
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch .venv-docs/ready

setup: $(READY)

# Programs that drawings and the tests of the page use, where Debian's packages are: without them those tests are skipped.
tools:
	apt-get update --quiet --quiet
	DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends graphviz chromium chromium-driver

# torch at one version: an open range would take a build with several gigabytes of GPU libraries.
# Python compiles what is imported, and not all of torch.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "commpass needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Installing torch $(TORCH) and commpass into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(filter $(PINNED),$(TORCH)),cp constraints.txt,printf "torch==$(TORCH)\n$(OTHER)\n" >) $(VENV)/constraints.txt
	@$(VENV)/bin/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt torch numpy --editable '.[graph]'
	@echo "Preparing the compiler (once)"
	@$(VENV)/bin/python -c 'import torch; torch.compile(lambda x: x + 1)(torch.ones(64))' > $(VENV)/compiler.txt 2>&1 \
		|| echo "torch.compile does not work here (see $(VENV)/compiler.txt)"
	@touch $(BASE)

$(READY): $(BASE)
	@echo "Installing what tests need into $(VENV) (once)"
	@$(VENV)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv .venv-torch-* .venv-docs demo-out build *.egg-info
