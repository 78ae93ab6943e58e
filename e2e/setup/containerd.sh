#!/usr/bin/env bash
# Prints the directory of a containerd of this release, 1.7 or 2.1: from Debian's package, unpacked into the cache, and
# never installed. All else is on stderr. The harness starts no container, so that neither runc nor a service is needed.
# Usage: containerd.sh RELEASE
set -euo pipefail
release=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e

say() { printf '==> %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# The package of each release and architecture, by its version, and the SHA-256 that Debian's signed index has for it.
# 1.7 is from Debian 13 and 2.1 from unstable. Both need glibc 2.34, which Debian 12 has.
architecture=$(dpkg --print-architecture 2>/dev/null) || architecture=unknown
case $release-$architecture in
  1.7-amd64) version=1.7.24~ds1-6+deb13u1 sum=ed708deb96fe476a3bce4efa5c0538dfbcf717ab9a7c7944ba7260342c25899c ;;
  1.7-arm64) version=1.7.24~ds1-6+deb13u1 sum=4af6b5a85498cc590eaf48d34c5c6c952ddabadae0afd6a9d2931d6a05782bc9 ;;
  2.1-amd64) version=2.1.9+ds1-5 sum=2dda86ce7033fd612fc50e136679d8174ccad680eb29cd4611e0d2a1b84cf591 ;;
  2.1-arm64) version=2.1.9+ds1-5 sum=43426c2af51f051e86374143d34031830ee5d0ff16bc23f35c6f498f27f8389d ;;
  *) die "containerd.sh knows 1.7 and 2.1, on amd64 and arm64, and not $release on $architecture" ;;
esac
unpacked=$cache/containerd-$version

# Runs it, too: a cache that came from another machine may not.
take() {
  local found
  found=$("$unpacked/containerd" --version 2>/dev/null) || return 1
  say "containerd $release: ${found#* * } from the cache ($unpacked)"
  printf '%s\n' "$unpacked"
}
take && exit

command -v dpkg-deb >/dev/null || die "containerd $release comes from Debian's package, and there is no dpkg-deb to unpack it"
found=$("$(dirname "${BASH_SOURCE[0]}")/debian-mirrors.sh")
mapfile -t mirrors <<<"$found"

mkdir -p "$cache"
scratch=$(mktemp -d "$cache/containerd.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
file=pool/main/c/containerd/containerd_${version}_$architecture.deb
for mirror in "${mirrors[@]}"; do
  say "containerd $release: ${mirror%/}/$file"
  curl --silent --show-error --fail --location --max-time 300 --retry 2 --output "$scratch/package.deb" "${mirror%/}/$file" || continue
  # A mirror need not be trusted: what is run is what was pinned.
  sha256sum --check --quiet --strict - <<<"$sum  $scratch/package.deb" >&2 || die "$mirror has another $file than was pinned"
  dpkg-deb --extract "$scratch/package.deb" "$scratch/root"
  rm -rf "$unpacked"
  # In place in one step, so that a cache directory is always a whole one.
  mv -T "$scratch/root/usr/bin" "$unpacked"
  take && exit
  die "$unpacked/containerd does not run: ldd $unpacked/containerd says what it needs"
done
die "no mirror has containerd $version any more. Debian keeps only the newest package of each suite: set version and sum
    of $release in e2e/setup/containerd.sh to what \`apt-get update\` brings for the suite, and run make test-runtimes"
