# `make demo` and `make test` each work as the first command typed in a fresh checkout.

PYTHON ?= python3
space := $(subst ,, )
python := $(subst $(space),\ ,$(PYTHON))
# Each PYTHON has environments of its own, named by its whole path.
named := $(subst $(space),_,$(PYTHON))
VENV ?= $(if $(filter python3,$(named)),.venv,.venv-$(subst /,+,$(patsubst /%,%,$(named))))
DOCS := $(VENV)-docs
BIN := $(VENV)/bin
# An empty environment has no PATH, and make then finds no program.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin)
RUN := OMP_NUM_THREADS=1 $(BIN)/python

.PHONY: demo test environment check lint wrong-factors test-versions figures clean

demo: $(VENV)/installed
	$(RUN) examples/drgrpo/demo.py

test: $(VENV)/installed
	$(RUN) -m pytest

# Prints the environment's folder; launch/ci/check.sh reads it.
environment: $(VENV)/installed
	@echo $(VENV)

# The inner loop: what starts no process and needs no GPU, within a minute.
check: lint
	$(RUN) -m pytest --quiet -n 2 -m "not launches and not gpu"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The exhaustive targets run all, or the parts in ONLY: names of faults, releases, files, Pythons.
# launch/ci/draw.py lists and draws them.
wrong-factors: $(VENV)/installed
	$(RUN) tests/wrong_factors/run.py $(ONLY)

# `make test-versions WHOLE=1` for every aggregation and test; docs/reference/ran.md.
test-versions: $(VENV)/installed
	$(RUN) tests/versions.py $(if $(WHOLE),--whole) $(ONLY)

# Released verl, TRL, SkyRL and ms-swift on the CPU, in an environment of its own; docs/integrations/.
.PHONY: test-frameworks
test-frameworks: $(VENV)/installed
	$(RUN) tests/frameworks/run.py $(ONLY)

# The newest main of Megatron-LM and of each framework; clones them, or CHECKOUTS=folder.
.PHONY: test-newest
test-newest: $(VENV)/installed
	CHECKOUTS="$(CHECKOUTS)" $(RUN) -m pytest tests/docs/test_newest.py -m newest -rA

# The scripts of launch/, those of launch/ci/ and `make gpu` among them; what needs Slurm, Ray or
# another program skips where there is none.
# `.ci/launch` installs them.
.PHONY: test-launch
test-launch: $(VENV)/installed
	$(RUN) -m pytest $(or $(ONLY),tests/launch) -rs

# README's commands as on a user's machine, with each Python that is here, or those in ONLY. PLAIN=1
# takes the torch that plain pip does.
.PHONY: test-machine
test-machine:
	launch/ci/machine.sh $(ONLY)

# `make mutants MODULES="reduction/plan reduction/layout"` for some of them; tests/mutants/run.py.
.PHONY: mutants
mutants: $(VENV)/installed
	$(RUN) tests/mutants/run.py $(MODULES)

# `make bench QUICK=1` in about 20 seconds; `SCALE=1` for one rank of many; docs/performance.md.
.PHONY: bench gpu
bench: $(VENV)/installed
	$(RUN) -m benchmarks.$(if $(SCALE),scale,run) $(if $(QUICK),--quick)

# From a bare checkout: torch, rich and a megatron-core wheel on the path, nothing installed.
# `make gpu DEVICE=cpu` tries the command where there is none.
gpu:
	$(python) -m benchmarks.gpu $(if $(filter cpu,$(DEVICE)),--cpu)

# The site into site/, in an environment of its own: it needs no torch. mkdocs.yml.
.PHONY: docs
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "site/index.html; with search: $(python) -m http.server --directory site"

# The site built for an address under a folder: its links, sitemap, search and widths.
.PHONY: test-site
test-site: $(VENV)/installed $(DOCS)/installed
	TEST_SITE=$(DOCS) $(RUN) -m pytest tests/docs/test_site.py

# The packages of the extra `docs`, without this package and its torch. Python 3.11 or newer.
$(DOCS)/installed: pyproject.toml constraints.txt constraints-docs.txt
	$(python) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt \
		--constraint constraints-docs.txt $$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	touch $@

# One commit, its tag, wheel and sdist in dist/: `make release VERSION=0.1.0`; nothing is pushed.
.PHONY: release
release: $(VENV)-release/installed
	$(VENV)-release/bin/python tools/release.py $(VERSION)

# As .github/workflows/publish.yml has them.
$(VENV)-release/installed:
	$(python) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet build==1.6.1 twine==7.0.0 tomli
	touch $@

figures: $(VENV)/installed
	$(RUN) examples/drgrpo/figures.py

# torch first: its pinned version decides everything else that is resolved.
$(VENV)/installed: pyproject.toml constraints.txt
	$(python) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

clean:
	rm -rf .venv* .versions .mutants runs site .mypy_cache .pytest_cache .ruff_cache *.egg-info
