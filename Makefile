# make train | make check | make test | make test-slow | make install | make bench: each does its own set-up, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled once, not in each of the thousand processes that the tests start, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=
# Processes among which the tests are divided. Each starts ranks of its own, once.
WORKERS ?= 2
# What runs Evener, and what its tests, checks and pages need besides.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

# The oldest and the newest torch that pyproject.toml allows.
OLDEST := 2.11.0
NEWEST := 2.15.0

.PHONY: install train check test test-slow test-nightly test-versions lint types docs pictures package bench clean
.SECONDARY:

install: $(READY)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Evener needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(READY): $(INSTALLED)
	$(PIP) --quiet --editable '.[dev]'
	@touch $@

train: $(INSTALLED)
	$(BIN)/evener train digits
	@printf '\nGo on with:\n  . $(BIN)/activate\n  evener verify digits --processes 2 --shares 3,1\n  evener train digits --processes 2 --throttle 1,0.4\n  evener --help\n'

# Types and pages are looked at side by side. Each worker takes tests that lie side by side, which share ranks.
test: $(READY)
	$(MAKE) --jobs 2 --output-sync lint types docs
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly"

# For the daily loop: lint, types, and the tests of the rooms in which something differs from the last commit.
check: lint types $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly" $$($(BIN)/python -m tests.changed)

# Injected faults, long commands and long trainings.
test-slow: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "slow and not nightly"

# All cells of the tables of which the tests above meet every row and every column.
test-nightly: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m nightly

# Not part of `make test`: the tests on the oldest and on the newest torch, in environments of their own, into which
# pip loads gigabytes of CUDA libraries where it finds no CPU wheel. setuptools is left to what that torch wants.
test-versions: test-torch-$(OLDEST) test-torch-$(NEWEST)

test-torch-%: $(VENV)-torch-%/.ready
	$(<D)/bin/python -m pytest -q -n $(WORKERS) -m "not slow and not nightly"

$(VENV)-torch-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(@D)/constraints.txt
	echo 'torch==$*' >> $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt --editable '.[dev]'
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The documentation as a site, in build/site: no link or anchor may lead nowhere, and no word be misspelt.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/codespell *.md docs src examples benchmarks .github

# What a package index would get, in dist: built, and its descriptions checked.
package: $(READY)
	$(PIP) --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# The pictures of a report in the documentation, from a run on two CPU ranks. It needs a Chromium on the PATH.
pictures: $(READY)
	$(BIN)/python -m tests.pictures

# All benchmarks that two cores can run, in about 40 minutes, or those of ONLY=name,name: their records, and the pages.
bench: $(READY)
	$(PIP) --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks --only '$(ONLY)'

clean:
	rm -rf $(VENV) $(VENV)-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
