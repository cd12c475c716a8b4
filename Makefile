# `make demo` and `make test` do all of their own set-up: a machine with Python 3.11 is enough.
# The first that is new enough; coincurve has no wheel for 3.14 yet.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A second chain to test on. Its lock holds the hashes; --ignore-scripts runs none of the package's own code.
ANVIL := tests/anvil/node_modules/.ready
# A vendor's own JavaScript client, which speaks through the proxy.
JAVASCRIPT := tests/javascript/node_modules/.ready
# Two for each of two cores: a third of the time a test waits for a process or a socket.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Hundreds of tests start a process; without bytecode on disk each of those compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-fleet test-large simulate bench soak lint types docs check clean

demo: $(READY)
	$(BIN)/x402guard demo

test: $(READY) $(ANVIL) $(JAVASCRIPT)
	$(PYTEST) -m "not long"

# Most tests that start processes and chains, a second chain, longer searches, and soaks of guards that are broken on purpose.
test-long: $(READY) $(ANVIL) $(JAVASCRIPT)
	HYPOTHESIS_PROFILE=full $(PYTEST) -m "(long or hypothesis) and not fleet and not large"

# Every test of tests/behaviour that takes a store, on PostgreSQL: a thousand, in four minutes. Conformance and attacks are in test-long.
test-fleet: $(READY)
	$(PYTEST) -m fleet

# The largest numbers, the last cases of the largest product, and the breaks that the simulator finds last.
test-large: $(READY)
	$(PYTEST) -m large

# Ten minutes of new runs on all cores; the last line says steps, payments, violations. SECONDS=60 for another time,
# STORE=fleet for a ledger in which sessions keep idle budget.
simulate: $(READY)
	$(BIN)/python -m x402guard.testing.simulator --seconds $(or $(SECONDS),600) --store $(or $(STORE),memory)

# What each path costs, beside its peers; BENCH="tools --json out.json" for some rows, or for a file.
bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH)

# Ten minutes; the last line is the sum. SOAK="--seconds 60 --seed 7" for another one, STORE=postgres for a server that crashes, is cut off and replaced.
soak: $(READY) $(ANVIL)
	$(BIN)/python -m tests.soak --store $(or $(STORE),sqlite) $(or $(SOAK),--seconds 600)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

# The site in site/. Any warning fails the build; with --quiet it would not. The tests of the pages are in `make test`.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: test test-long lint types docs

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "x402guard needs Python 3.11, 3.12 or 3.13; say where with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); this takes about a minute."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[testnet,serve,telemetry,mcp,postgres,test,lint,docs]'
	@touch $(READY)

# npm leaves out what asks for a newer Node than the machine's (Debian 12 has 18), and so anvil, a program that needs none.
FORCED := npm install --no-save --force --ignore-scripts --no-audit --no-fund --loglevel=error
PROGRAM := node -p "'@foundry-rs/anvil-' + process.platform + '-' + process.arch.replace('x64', 'amd64') + '@' + require('./package.json').devDependencies['@foundry-rs/anvil']"
# %: the folder of the packages. Each lock holds the hashes.
tests/%/node_modules/.ready: tests/%/package.json tests/%/package-lock.json
	@if ! command -v npm >/dev/null; then echo "npm is not installed: tests on $* are skipped, unless it is on the PATH."; \
	elif (cd tests/$* && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error \
		&& { test $* != anvil || ls node_modules/@foundry-rs/anvil-*/bin >/dev/null 2>&1 || $(FORCED) $$($(PROGRAM)); }); then touch $@; \
	else echo "npm could not install $* (see above): tests on it are skipped, unless it is on the PATH."; fi

clean:
	rm -rf $(VENV) tests/*/node_modules build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
