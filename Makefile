# make demo: the main job, from a registered task to a trained model, through a kill.  make test: the tests.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH_VENV := .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
UV_PIN := $(shell grep '^uv==' requirements.lock)

.PHONY: demo test test-long test-torch soak lint bench clean lock

demo: $(VENV)/installed
	$(BIN)/python -m anystep.train.demo --output_dir=demo_output

test: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal -m "not soak and not long"

# What takes longer than a user waits for; CI runs it after `make test`.
test-long: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal -m "long and not soak"

# Tests with PyTorch, in an environment of its own: 0.6 GB to download, 2 GB on disk.
test-torch: $(TORCH_VENV)/installed
	$(TORCH_BIN)/python -c "import torch, torchdata, torchtitan"
	$(TORCH_BIN)/pytest tests/library/test_torch.py tests/test_pytorch_document.py

# Some two hours on 2 cores. The attacks come last, one at a time, and print what they tried and found.
soak: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal -m soak --ignore=tests/attacks
	$(MAKE) test-torch
	$(BIN)/pytest -m soak -s tests/attacks

# The type checker sees what users get: the package as it is installed.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --target build/lint .
	cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python -p anystep

bench: $(VENV)/installed
	@for program in benchmarks/*.py; do [ -e "$$program" ] || continue; $(BIN)/python "$$program" || exit 1; done

clean:
	rm -rf $(VENV) $(TORCH_VENV) build dist demo_output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The newest versions that setup.py allows. PyTorch for Linux asks for gigabytes that only a GPU needs; of them
# requirements-torch.lock has the CUDA runtime alone, and tests/cuda_stand_ins.py stands in for the rest.
lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --extra dev --extra t5 --no-emit-index-url --no-emit-find-links --no-header --no-annotate setup.py -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --extra dev-torch --no-emit-index-url --no-emit-find-links --no-header --no-annotate setup.py | sed -E '/^(cuda-|triton|nvidia-)/{/^nvidia-cuda-runtime/!d;}' > requirements-torch.lock

$(VENV)/installed: requirements.lock setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(UV_PIN)"
	$(BIN)/uv pip sync --quiet --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

$(TORCH_VENV)/installed: $(VENV)/installed requirements-torch.lock tests/cuda_stand_ins.py
	$(PYTHON) -m venv $(TORCH_VENV)
	$(BIN)/uv pip sync --quiet --no-cache --python $(TORCH_BIN)/python requirements-torch.lock
	$(BIN)/uv pip install --quiet --python $(TORCH_BIN)/python --no-deps --no-build-isolation --editable .
	$(TORCH_BIN)/python tests/cuda_stand_ins.py
	touch $@
