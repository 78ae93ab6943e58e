#!/usr/bin/env bash
# Makes the archive of the Helm chart, with the manifests that its links lead to as files. No helm is needed.
# Usage: chart.sh TO, a directory.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
to=$(realpath "$1")
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

say "image-prepull-$version.tgz, the Helm chart"
# The same manifests make the same bytes: no name and no time of a file in gzip's head.
tar --create --directory manifests/chart --dereference --exclude-from manifests/chart/.helmignore --sort name --format ustar \
  --owner 0 --group 0 --numeric-owner --mode u=rwX,go=rX --mtime "@$SOURCE_DATE_EPOCH" --transform 's,^\.,image-prepull,' . |
  gzip --no-name --best >"$to/image-prepull-$version.tgz"
