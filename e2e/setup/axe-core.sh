#!/usr/bin/env bash
# Prints the path of axe-core, which checks pages for what keeps people with disabilities out: one file of npm's package, in
# the cache. Only tests use it. All else is on stderr.
set -euo pipefail
# shellcheck source=e2e/setup/debian-package.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian-package.sh"

version=4.11.0
sum=e9e5863c33a874f09bc01acd9234b7e3c871479f5eef8802fa582544465e6d01
file=$cache/axe-core-$version.min.js

take() { sha256sum --check --status - <<<"$sum  $file" 2>/dev/null && printf '%s\n' "$file"; }

take && exit
command -v npm >/dev/null || die "axe-core comes from npm's registry, and there is no npm: \`make test\` installs it"
mkdir -p "$cache"
exec 8>"$cache/axe-core.lock"
flock 8
take && exit
scratch=$(mktemp -d "$cache/axe-core.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
say "axe-core $version: npm pack"
(cd "$scratch" && npm pack --silent "axe-core@$version" >&2 && tar -xzf "axe-core-$version.tgz" package/axe.min.js)
mv "$scratch/package/axe.min.js" "$file"
take || die "npm has another axe-core $version than was pinned"
