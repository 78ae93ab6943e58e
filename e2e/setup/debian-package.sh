#!/usr/bin/env bash
# Sourced by the scripts that print where a program of another release is: takes it from Debian's package, which is
# pinned, unpacked into the cache, and never installed. All that is said is on stderr.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
# shellcheck disable=SC2034 # those who source this choose the package by it
architecture=$(dpkg --print-architecture 2>/dev/null) || architecture=unknown

say() { printf '==> %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Calls `take`, which prints what is in the cache if it runs. Where it fails, puts one path of a package there first:
# provide NAME RELEASE VERSION SUM PATH TARGET. SUM is the SHA-256 that Debian's signed index has for the package.
provide() {
  take && return
  mkdir -p "$cache"
  # Tests that begin at the same time ask for the same: one fetches it, and takes nothing away from under the others.
  exec 8>"$cache/$1-$3.lock"
  flock 8
  take && return
  unpack_package "$@"
  take || die "$6 does not run: ldd says what it needs"
}

unpack_package() {
  local name=$1 release=$2 version=$3 sum=$4 path=$5 target=$6
  local found file mirror mirrors
  command -v dpkg-deb >/dev/null || die "$name $release comes from Debian's package, and there is no dpkg-deb to unpack it"
  found=$("$(dirname "${BASH_SOURCE[0]}")/debian-mirrors.sh")
  mapfile -t mirrors <<<"$found"
  # Not local: the trap outlives this function.
  scratch=$(mktemp -d "$cache/$name.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  file=pool/main/${name:0:1}/$name/${name}_${version}_$architecture.deb
  for mirror in "${mirrors[@]}"; do
    say "$name $release: ${mirror%/}/$file"
    curl --silent --show-error --fail --location --max-time 300 --retry 2 --output "$scratch/package.deb" "${mirror%/}/$file" || continue
    # A mirror need not be trusted: what is run is what was pinned.
    sha256sum --check --quiet --strict - <<<"$sum  $scratch/package.deb" >&2 || die "$mirror has another $file than was pinned"
    dpkg-deb --extract "$scratch/package.deb" "$scratch/root"
    # A file is replaced, a directory has to make room.
    [[ ! -d $target ]] || rm -rf "$target"
    # In place in one step, so that what is in the cache is always whole.
    mv -T "$scratch/root/$path" "$target"
    return
  done
  die "no mirror has $name $version any more. Debian keeps only the newest package of each suite: set version and sum of
    $release in $0 to what \`apt-get update\` brings for the suite, and run the tests that use it"
}
