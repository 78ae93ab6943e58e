#!/usr/bin/env bash
# Makes what krew installs kubectl prepull from: an archive for each architecture, and the manifest with their checksums.
# Usage: plugin.sh FROM TO, both directories; FROM has the programs. DIST_URL: where the files of this version will be
# published, as one may fetch them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
from=$(realpath "$1") to=$(realpath "$2")
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP

say "kubectl-prepull for krew"
for arch in amd64 arm64; do
  archive=$to/kubectl-prepull-linux-$arch.tar.gz
  install -m 755 "$from/kubectl-prepull-linux-$arch" "$scratch/kubectl-prepull"
  install -m 644 LICENSE "$scratch/LICENSE"
  # The same programs make the same bytes: no name and no time of a file in gzip's head.
  tar --create --directory "$scratch" --sort name --format ustar --owner 0 --group 0 --numeric-owner \
    --mtime "@$SOURCE_DATE_EPOCH" LICENSE kubectl-prepull | gzip --no-name --best >"$archive"
  declare "sum_$arch=$(sha256sum "$archive" | cut -d ' ' -f 1)"
done
# shellcheck disable=SC2154 # declared above
sed -e "s|@VERSION@|$version|" -e "s|@URL@|$plugin_url|" -e "s|@SHA256_AMD64@|$sum_amd64|" -e "s|@SHA256_ARM64@|$sum_arm64|" \
  manifests/packaging/krew.yaml >"$to/kubectl-prepull.krew.yaml"
