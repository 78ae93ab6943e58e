#!/usr/bin/env bash
# Builds programs of a Go module, once, and prints their directory in the cache; all else is on stderr.
# Usage: go-module.sh NAME VERSION LDFLAGS PACKAGE...; the first package is NAME's, which `PROBE` starts (`--version` by default).
# shellcheck disable=SC2317 # the steps of the build are called by name, through `phase`
set -euo pipefail

program=$1 version=$2 flags=$3
packages=("${@:4}")
read -ra probe <<<"${PROBE:---version}"
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
part="$program $version"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
built=$cache/$program-$version
log=$cache/$program-build.log
# shellcheck source=e2e/setup/build-once.sh
source "$setup/build-once.sh"

# Runs it, too: one for another machine type is none here.
take() {
  [[ -x $built/$program ]] && "$built/$program" "${probe[@]}" >/dev/null 2>&1 || return 1
  say "$part from the cache ($built)"
  printf '%s\n' "$built"
}

take && exit
found=$(go env GOVERSION 2>/dev/null) || die "no $part, and no Go to build it with: install Go 1.21 or later, and have it in PATH"

begin_build
say "$part: building it once with $found; log: $log"

# Without cgo, as the tests need nothing of it. The checksum of the module itself is looked up by Go.
compile() {
  env -u GOROOT -u GOEXPERIMENT -u GOARCH -u GOOS CGO_ENABLED=0 GOWORK=off GOBIN="$scratch/result" \
    GOFLAGS="-modcacherw -buildvcs=false -trimpath" GOCACHE="$scratch/go/build" GOMODCACHE="$scratch/go/modules" \
    go install -ldflags "-s -w $flags" "${packages[@]/%/@$version}"
}

# In place in one step, so that a cache directory is always a whole one.
keep() {
  "$scratch/result/$program" "${probe[@]}"
  rm -rf "$built"
  mv -T "$scratch/result" "$built"
}

mkdir "$scratch/result"
phase "modules and compiler" compile
phase "into the cache" keep
say "$part: built in $SECONDS s"
take && exit
die "$built has no $program that runs, see $log"
