#!/usr/bin/env bash
# Runs cargo-nextest, which is built once where it's missing (about 3 minutes).
# Usage: nextest.sh ARGUMENT..., as after `cargo nextest`.
set -euo pipefail
# Without what it would update itself with.
nextest=$("$(dirname "${BASH_SOURCE[0]}")/cargo-tool.sh" cargo-nextest 0.9.151 --no-default-features)
exec "$nextest" nextest "$@"
