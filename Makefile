# The only entry points. `make` lists them; what each needs, it gets (see e2e/setup).
#
# One test by hand, with the real parts around it (after one `make test`):
#   e2e/setup/with-parts.sh target/debug cargo test -p prepull-e2e NAME

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

SETUP := e2e/setup
TARGET := $(or $(CARGO_TARGET_DIR),target)
SCRIPTS := $(wildcard $(SETUP)/*.sh manifests/packaging/*.sh manifests/packaging/debian/p*) manifests/quickstart/quickstart.sh .ci/run
PROGRAMS := -p cloudcore-prepull -p edgecore-prepull -p kubectl-prepull

BUILD := cargo build --release $(PROGRAMS)
BUILD_LABORATORY := cargo build --release -p prepull-laboratory
# In one go, so that no crate is built twice, with the features of the one and of the other; unoptimised, which takes a
# quarter of the time, and a demo runs as fast. `make test` builds these programs too.
BUILD_DEMO := cargo build --workspace --bins
# The programs and the tests in one go, so that both are built with the same features.
BUILD_TESTS := cargo build --workspace --bins --tests --examples
CLIPPY := cargo clippy --workspace --all-targets -- -D warnings
WORDS := cargo run --quiet -p prepull-words -- $(if $(BASE),--base $(BASE))
# Of `make check`: a job with everything in it, from its application to the images on three nodes.
SMOKE := pulls::three_nodes_pull_from_two_registries
# nextest runs each test in a process of its own, with the groups and the second try of .config/nextest.toml. It's built
# once where it's missing. It runs no documentation tests; we have none.
NEXTEST := $(SETUP)/nextest.sh
# The Go programs collect garbage a quarter as often: most end before they would need the memory.
TEST := export GOGC=400; $(NEXTEST) run --workspace
CHECK := export GOGC=400; $(NEXTEST) run --workspace -E "not binary(=e2e) or test(=$(SMOKE))"
# Without what needs a kubelet: none here is that old.
OLDEST := export GOGC=400; $(NEXTEST) run --workspace -E "binary(=e2e) and not test(/^(installed|offline|quickstart)::/)"
# What cloudcore-prepull took in in every end-to-end test, played on the engine again: the same actions come out.
REPLAY := PREPULL_REPLAY="$$PREPULL_E2E_LOGS" cargo test --workspace --test replay -- --nocapture the_recordings

# Prints a command, runs it, and prints how long it took.
run = @printf '==> %s\n' '$(1)'; $(1); printf '==> done after %s s\n' "$$SECONDS"

.PHONY: help setup build demo fleet site storm check test test-oldest test-runtimes test-upgrade bench fuzz mutants lint dist test-dist release sbom crds clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Get the real parts: packages, Kubernetes and helm (built once, about 8 minutes)
	@$(SETUP)/packages.sh
	@$(SETUP)/kubernetes.sh >/dev/null
	@$(SETUP)/helm.sh >/dev/null

build: ## Release build of cloudcore-prepull, edgecore-prepull and kubectl-prepull
	$(call run,$(BUILD))

demo: ## A small cluster, edge nodes and a job, on this machine (KEEP=1 leaves it running)
	@$(SETUP)/prepare.sh '$(BUILD_DEMO)'
	@PREPULL_E2E_LOGS=$${PREPULL_E2E_LOGS:-$(TARGET)/demo-logs} $(SETUP)/with-parts.sh $(TARGET)/debug $(TARGET)/debug/laboratory demo $(ARGS)

fleet: ## One job over NODES=1000 simulated edges, measured (ARGS=--help shows its options)
	@$(SETUP)/prepare.sh '$(BUILD)' '$(BUILD_LABORATORY)'
	@PREPULL_E2E_LOGS=$${PREPULL_E2E_LOGS:-$(TARGET)/fleet-logs} $(SETUP)/with-parts.sh $(TARGET)/release $(TARGET)/release/laboratory fleet --nodes $(or $(NODES),1000) $(ARGS)

site: ## One image for NODES=10 boxes behind a thin uplink, measured; as root (ARGS=--help shows its options)
	@$(SETUP)/prepare.sh '$(BUILD)' '$(BUILD_LABORATORY)'
	@PREPULL_E2E_LOGS=$${PREPULL_E2E_LOGS:-$(TARGET)/site-logs} $(SETUP)/with-parts.sh $(TARGET)/release $(TARGET)/release/laboratory site --nodes $(or $(NODES),10) $(ARGS)

storm: ## Faults by chance and all at once for MINUTES=10, then every job must be as it should be (ARGS='--seed N', BEFORE=REVISION)
	@$(SETUP)/prepare.sh '$(BUILD_DEMO)'
	@before=$(if $(BEFORE),$$($(SETUP)/before.sh '$(BEFORE)')) && \
	  PREPULL_E2E_RECORD=1 PREPULL_E2E_LOGS=$(or $(PREPULL_E2E_LOGS),$(TARGET)/storm-logs) $(SETUP)/with-parts.sh --search-secrets $(TARGET)/debug $(TARGET)/debug/laboratory storm --minutes $(or $(MINUTES),10) $${before:+--before "$$before"} $(ARGS)

check: ## While one works: format, clippy, unit tests, one test on real parts
	@$(SETUP)/prepare.sh 'cargo fmt --all --check' '$(NEXTEST) --version' '$(CLIPPY)' '$(BUILD_TESTS)'
	@PREPULL_E2E_LOGS=$(TARGET)/check-logs $(SETUP)/with-parts.sh $(TARGET)/debug bash -ec '$(CHECK)'

test: ## Every test, on real parts; afterwards no log may hold a credential
	@PARTS=helm NEEDS='chromium-headless-shell:chromium-headless-shell npm:npm' $(SETUP)/prepare.sh '$(NEXTEST) --version' '$(BUILD_TESTS)'
	@$(SETUP)/with-parts.sh --search-secrets $(TARGET)/debug env PREPULL_E2E_RECORD=1 bash -ec '$(TEST) && $(REPLAY)'

test-oldest: ## The end-to-end tests with the oldest API server that we promise, 1.20 (built once, about 4 minutes)
	@$(SETUP)/packages.sh
	@KUBEBUILDER_ASSETS=$$($(SETUP)/oldest-apiserver.sh) && export KUBEBUILDER_ASSETS PARTS=helm && $(SETUP)/prepare.sh '$(NEXTEST) --version' '$(BUILD_TESTS)' && \
	  PREPULL_E2E_LOGS=$${PREPULL_E2E_LOGS:-$(TARGET)/oldest-logs} $(SETUP)/with-parts.sh --search-secrets $(TARGET)/debug bash -ec '$(OLDEST)'

test-runtimes: ## The tests that touch the runtime, with each containerd that we know (RUNTIMES='2.1', ARGS=links::)
	@$(SETUP)/prepare.sh '$(BUILD_TESTS)'
	@$(SETUP)/runtimes.sh $(ARGS)

test-upgrade: ## The programs of a revision are replaced in the middle of jobs, in both orders (BEFORE=REVISION)
	@$(SETUP)/prepare.sh '$(BUILD_TESTS)'
	@$(SETUP)/upgrade.sh '$(BEFORE)'

bench: ## The numbers to hold, measured (NODES= for a fleet other than 10,000; BEFORE=DIR: beside the programs there)
	@$(SETUP)/prepare.sh '$(BUILD)' '$(BUILD_LABORATORY)' 'cargo bench -p prepull-engine --no-run'
	@BEFORE='$(BEFORE)' PREPULL_E2E_LOGS=$${PREPULL_E2E_LOGS:-$(TARGET)/bench-logs} $(SETUP)/bench.sh $(TARGET)/release

fuzz: ## Look for inputs that break something (MINUTES=10 or RUNS=, ONLY=plan, KEEP=1)
	@$(SETUP)/packages.sh g++:g++
	@$(SETUP)/fuzz.sh

mutants: ## Which changes of the code no test notices (BASE=REVISION: of what changed since; ARGS=)
	@$(SETUP)/mutants.sh $(ARGS)

lint: ## Format, clippy, plain words, shellcheck, cargo deny (BASE=REVISION: the words of what was added since)
	@$(SETUP)/packages.sh
	$(call run,cargo fmt --all --check)
	$(call run,$(CLIPPY))
	$(call run,$(WORDS))
	@# Looked for only now: packages.sh may have brought it.
	@if command -v shellcheck >/dev/null; then echo '==> shellcheck'; shellcheck $(SCRIPTS); else echo '==> shellcheck: not installed, skipped'; fi
	@$(SETUP)/deny.sh

dist: ## What is released: static programs, images, packages, in target/dist
	@manifests/packaging/dist.sh

test-dist: ## Start all that `make dist` has made, also under qemu (as root)
	@$(SETUP)/prepare.sh '$(BUILD_DEMO)'
	@manifests/packaging/test.sh
	@for arch in amd64 arm64; do \
	  PREPULL_E2E_LOGS=$(TARGET)/dist-logs/$$arch manifests/packaging/with-programs.sh $$arch $(TARGET)/debug/demo; \
	done

release: ## make dist and test-dist, after a check for known vulnerabilities
	@$(SETUP)/deny.sh --release
	@$(MAKE) dist
	@$(MAKE) test-dist

sbom: ## What is in the programs, as CycloneDX
	@$(SETUP)/sbom.sh

crds: ## Write manifests/crds and manifests/kruise/crds.yaml from the Rust types
	$(call run,cargo run --quiet -p cloudcore-prepull -- crds --out manifests/crds)
	$(call run,cargo run --quiet -p cloudcore-prepull -- crds --kruise --out manifests/kruise)

clean: ## Remove what was built here (Kubernetes stays in ~/.cache/prepull-e2e)
	$(call run,cargo clean)
