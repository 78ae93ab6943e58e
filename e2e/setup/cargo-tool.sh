#!/usr/bin/env bash
# Prints the path of a tool for cargo, of this version. One in PATH is taken in any version; otherwise it is built
# once (a minute or two) and kept in the cache.
# Usage: cargo-tool.sh NAME VERSION [ARGUMENT-OF-CARGO-INSTALL]...
set -euo pipefail
name=$1 version=$2
shift 2

if command -v "$name"; then exit; fi
root=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e/$name-$version
if ! [[ -x $root/bin/$name ]]; then
  printf '==> installing %s %s\n' "$name" "$version" >&2
  build=$(mktemp -d)
  trap 'rm -rf "$build"' EXIT
  CARGO_TARGET_DIR=$build cargo install --quiet --locked --debug --root "$root" "$@" "$name@$version" >&2
fi
printf '%s\n' "$root/bin/$name"
