#!/usr/bin/env bash
# Prints the folder of a prometheus and a promtool: from Debian 12's package, unpacked into the cache, and never installed.
# All else is on stderr.
set -euo pipefail
# shellcheck source=e2e/setup/debian-package.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian-package.sh"

# The package of each architecture, and its SHA-256.
version=2.42.0+ds-5+deb12u1
case $architecture in
  amd64) sum=81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55 ;;
  arm64) sum=ca131aa102390083398afbc80be9c8dd1dda78f9f92154fc00df8f7f1f4556e9 ;;
  *) die "prometheus.sh knows amd64 and arm64, and not $architecture" ;;
esac
folder=$cache/prometheus-$version

# Runs both, too: a cache that came from another machine may not.
take() { "$folder/promtool" --version >/dev/null 2>&1 && "$folder/prometheus" --version >/dev/null 2>&1 && printf '%s\n' "$folder"; }

provide prometheus 2.42 "$version" "$sum" usr/bin "$folder"
