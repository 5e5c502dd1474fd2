# Two commands do everything: `make demo` runs the main job, `make test` passes the tests. Both set themselves up.
PYTHON ?= $(shell for name in python3.12 python3.13 python3 python; do \
	$$name -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

export HF_HUB_OFFLINE := 1

.PHONY: demo test check slow docs lint clean

demo: $(VENV)/.core  ## collect, train, fine-tune, judge, serve and drive; ends with a report
	$(BIN)/robopolicy demo $(ARGS)

test: $(VENV)/.dev lint  ## style, floors, types, and every test that is done in a moment
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow and not long" $(ARGS)

check: $(VENV)/.dev $(VENV)/.docs lint  ## every test but the learning runs: before a change is handed in
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

slow: $(VENV)/.dev  ## the learning runs that take minutes
	$(BIN)/pytest -m slow $(ARGS)

docs: $(VENV)/.docs  ## the documentation, into docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

$(VENV)/bin/uv:
	@test -n "$(PYTHON)" || { echo "Python 3.12 or 3.13 was not found. Install it, or run: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.core: $(VENV)/bin/uv pyproject.toml
	$(BIN)/uv pip install --quiet --python $(VENV) --editable .
	@touch $@

PLUGINS := robopolicy/plugins/lerobot_policy robopolicy/plugins/lerobot_env
OUTSIDE := tests/outside tests/outside/lerobot_robot

$(VENV)/.dev: $(VENV)/bin/uv pyproject.toml $(patsubst %,%/pyproject.toml,$(PLUGINS) $(OUTSIDE))
	$(BIN)/uv pip install --quiet --python $(VENV) --editable '.[dev,vla,metaworld,robotics,lpips,convert,track,gpu-physics,export,opentelemetry]' $(patsubst %,--editable %,$(PLUGINS) $(OUTSIDE))
	@touch $@ $(VENV)/.core

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/uv pip install --quiet --python $(VENV) --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) runs docs/_build
