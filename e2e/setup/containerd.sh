#!/usr/bin/env bash
# Prints the directory of a containerd of this release, 1.7, 2.1 or 2.2: from Debian's package, unpacked into the cache, or
# built there from its Go module; never installed. All else is on stderr.
# Usage: containerd.sh RELEASE
set -euo pipefail
release=$1
# No package brings 2.2 to Debian yet. Its own module has the checksums of what it needs, so that Go's client builds it as it is.
if [[ $release == 2.2 ]]; then
  version=v2.2.9 module=github.com/containerd/containerd/v2
  exec "$(dirname "${BASH_SOURCE[0]}")/go-module.sh" containerd "$version" "-X $module/version.Version=$version" \
    "$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2"
fi
# shellcheck source=e2e/setup/debian-package.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian-package.sh"

# The package of each release and architecture, by its version, and its SHA-256.
# 1.7 is from Debian 13 and 2.1 from unstable. Both need glibc 2.34, which Debian 12 has.
case $release-$architecture in
  1.7-amd64) version=1.7.24~ds1-6+deb13u1 sum=ed708deb96fe476a3bce4efa5c0538dfbcf717ab9a7c7944ba7260342c25899c ;;
  1.7-arm64) version=1.7.24~ds1-6+deb13u1 sum=4af6b5a85498cc590eaf48d34c5c6c952ddabadae0afd6a9d2931d6a05782bc9 ;;
  2.1-amd64) version=2.1.9+ds1-5 sum=2dda86ce7033fd612fc50e136679d8174ccad680eb29cd4611e0d2a1b84cf591 ;;
  2.1-arm64) version=2.1.9+ds1-5 sum=43426c2af51f051e86374143d34031830ee5d0ff16bc23f35c6f498f27f8389d ;;
  *) die "containerd.sh knows 1.7, 2.1 and 2.2, on amd64 and arm64, and not $release on $architecture" ;;
esac
unpacked=$cache/containerd-$version

# Runs it, too: a cache that came from another machine may not.
take() {
  local found
  found=$("$unpacked/containerd" --version 2>/dev/null) || return 1
  say "containerd $release: ${found#* * } from the cache ($unpacked)"
  printf '%s\n' "$unpacked"
}

provide containerd "$release" "$version" "$sum" usr/bin "$unpacked"
