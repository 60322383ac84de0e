# make demo · make panel · make airflow · make quick · make test · make check · make bench · make simulations · make docs · make clean
# Every target makes its own environment in .venv first; all it needs is Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW_HOME := .airflow
AIRFLOW_VENV := $(AIRFLOW_HOME)/venv
AIRFLOW_PORT ?= 8080
AIRFLOW_VERSION := $(shell sed -n 's/^apache-airflow==//p' airflow/constraints.txt)
export TIPBENCH_HOME ?= $(CURDIR)/.tipbench
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: each would compile tipbench again

define PYTHON_CHECK
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tipbench needs Python 3.11 or newer, this is %d.%d; try: make PYTHON=python3.12 …" % sys.version_info[:2])'
endef

.PHONY: demo panel airflow airflow-environment quick test check bench bench-quick simulations docs clean

demo: $(VENV)/.demo
	$(BIN)/tipbench demo

panel: $(VENV)/.demo
	$(BIN)/tipbench panel

# A local Airflow with the DAG, beside the local MLflow; says what to do next, ends with Ctrl-C. What it tells programs on
# stdout has passwords in it.
airflow: $(VENV)/.demo airflow-environment
	@MLFLOW_TRACKING_URI="$${MLFLOW_TRACKING_URI:-$$($(BIN)/tipbench mlflow up)}" && export MLFLOW_TRACKING_URI && \
		exec $(BIN)/python airflow/local.py --environment $(AIRFLOW_VENV) --home $(AIRFLOW_HOME) \
			--port $(AIRFLOW_PORT) >/dev/null

# In an environment of its own: Airflow's dependencies do not go with the panel's.
airflow-environment: $(AIRFLOW_VENV)/.ready

# Each real part starts in one process only (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --dist loadgroup

# Without servers, browser, models, other processes and simulations of many worlds.
quick: $(VENV)/.dev
	$(PYTEST) -n 2 -q -m "not real and not server and not process and not simulation"

# Three processes on two cores: one is usually waiting for Airflow, a server or the browser.
test: check
	$(PYTEST) -n 3

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py

bench-quick: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py --quick

# The long forms of the simulations that the tests run in short. The first writes its rates into docs/statistics.md.
# About 30 minutes of CPU time.
simulations: $(VENV)/.dev
	$(BIN)/python tests/compare/simulated_boards.py
	$(BIN)/python tests/judge/simulated_judges.py
	$(BIN)/python tests/simulate/simulated_policies.py

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python airflow/form_fields.py

clean:
	-[ ! -x $(BIN)/tipbench ] || $(BIN)/tipbench mlflow down
	rm -rf $(VENV) .airflow .tipbench .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON_CHECK)
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# A stamp per set of extras, made anew when the requirements change.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[local,charts,panel]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

# The stamp comes last: an environment whose making was broken off is made on.
$(AIRFLOW_VENV)/.ready: pyproject.toml airflow/constraints.txt
	$(PYTHON_CHECK)
	$(PYTHON) -m venv --upgrade-deps $(AIRFLOW_VENV)
	$(AIRFLOW_VENV)/bin/python -m pip install --quiet -c airflow/constraints.txt apache-airflow==$(AIRFLOW_VERSION) -e '.[embedded]'
	touch $@
