#!/usr/bin/env bash
# cargo deny: licences, sources, banned crates, and known vulnerabilities. A gate that is not there is no gate: with CI
# set, as .ci/run does, cargo-deny is installed where it is missing, and what fails, fails. By hand it may be missing.
#
# Vulnerabilities are looked up in RustSec's database, a git repository. Where that cannot be had, the check is skipped,
# and said so at the end; with --release it fails.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$setup/../.."

say() { printf '==> %s\n' "$*"; }

if [[ -n ${CI-} || ${1-} == --release ]]; then
  deny=$("$setup/cargo-tool.sh" cargo-deny 0.20.2)
elif ! deny=$(command -v cargo-deny); then
  say "cargo deny: not installed, skipped (CI=1 make lint installs it)"
  exit
fi

say "cargo deny check"
# cargo's own way to call it: `cargo deny` would look in PATH.
"$deny" --log-level error check bans licenses sources
if "$deny" --log-level off fetch db 2>/dev/null; then
  "$deny" check advisories
elif [[ ${1-} == --release ]]; then
  say "advisories: their database cannot be had, and nothing is released without them" >&2
  exit 1
else
  say "ADVISORIES NOT CHECKED: their database, https://github.com/RustSec/advisory-db, cannot be had from here"
fi
