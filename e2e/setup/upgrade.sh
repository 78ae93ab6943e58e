#!/usr/bin/env bash
# Runs the tests that replace the programs of an earlier release in the middle of jobs, in both orders.
#
# Usage: upgrade.sh BEFORE: a revision, or a directory that has cloudcore-prepull and edgecore-prepull.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")

PREPULL_E2E_BEFORE=$("$setup/before.sh" "${1-}")
export PREPULL_E2E_BEFORE PREPULL_E2E_LOGS=${PREPULL_E2E_LOGS:-$target/upgrade-logs}
"$setup/with-parts.sh" "$target/debug" "$setup/nextest.sh" run --workspace --run-ignored only \
  -E 'binary(=e2e) and test(/^release_before::/)'
