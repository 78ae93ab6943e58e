#!/usr/bin/env bash
# Prints the path of a cosign of this release, 2.5 or 3.1: from Debian's package, unpacked into the cache, and never
# installed. All else is on stderr. 2.5 puts signatures at a tag, 3.1 into bundles that refer to the image.
# Usage: cosign.sh RELEASE
set -euo pipefail
release=$1
# shellcheck source=e2e/setup/debian-package.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian-package.sh"

# The package of each release and architecture, by its version, and its SHA-256.
# 2.5 is from Debian 13 and 3.1 from unstable. Both need glibc 2.34, which Debian 12 has.
case $release-$architecture in
  2.5-amd64) version=2.5.0-2+b4 sum=aef4fb6635710fd369ef73c07dde35540f45c877984e20f37aa11e181bb597c3 ;;
  2.5-arm64) version=2.5.0-2+b4 sum=0e917a7ed906dd756001133bc67090b2e45decba139916c84237b0900bdc3628 ;;
  3.1-amd64) version=3.1.1-2 sum=d8622ebffce1d69197288fc030ff06a4c247af5507107f85c5a878870b686b23 ;;
  3.1-arm64) version=3.1.1-2 sum=131d3a895f48a1f1f5df708cb3423e96fee4d2135ff4ee3fc71b884290e79549 ;;
  *) die "cosign.sh knows 2.5 and 3.1, on amd64 and arm64, and not $release on $architecture" ;;
esac
program=$cache/cosign-$version

# Runs it, too: a cache that came from another machine may not.
take() { "$program" version >/dev/null 2>&1 && printf '%s\n' "$program"; }

provide cosign "$release" "$version" "$sum" usr/bin/cosign "$program"
