#!/usr/bin/env bash
# Builds a containerd of version 2 from its Go module, once, and prints its directory; all else is on stderr. It takes about
# 90 s of processor time. Usage: containerd-module.sh VERSION
# shellcheck disable=SC2317 # the steps of the build are called by name, through `phase`
set -euo pipefail

version=$1
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
part="containerd $version"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
built=$cache/containerd-$version
log=$cache/containerd-build.log
module=github.com/containerd/containerd/v2
# shellcheck source=e2e/setup/build-once.sh
source "$setup/build-once.sh"

# Runs it, too: one for another machine type is no containerd here.
take() {
  [[ -x $built/containerd ]] && "$built/containerd" --version >/dev/null 2>&1 || return 1
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
    go install -ldflags "-s -w -X $module/version.Version=$version" \
    "$module/cmd/containerd@$version" "$module/cmd/containerd-shim-runc-v2@$version"
}

# In place in one step, so that a cache directory is always a whole one.
keep() {
  "$scratch/result/containerd" --version
  rm -rf "$built"
  mv -T "$scratch/result" "$built"
}

mkdir "$scratch/result"
phase "modules and compiler" compile
phase "into the cache" keep
say "$part: built in $SECONDS s"
take && exit
die "$built has no containerd that runs, see $log"
