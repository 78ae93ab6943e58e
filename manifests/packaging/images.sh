#!/usr/bin/env bash
# Makes the image of each program that runs in a pod, for all machines in one index, as a tar of an OCI layout. Buildah carries out the
# Dockerfiles, without a daemon and, as they run nothing, without a container. Usage: images.sh FROM TO, both directories;
# FROM has the programs and the CA roots.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
from=$(realpath "$1") to=$(realpath "$2")
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP
# A store of its own: what images the user has is not our business.
buildah() { command buildah --root "$scratch/store" --runroot "$scratch/run" --storage-driver vfs "$@"; }

for program in "${images[@]}"; do
  say "image of $program"
  list=localhost/$program:$version
  # One after the other: built side by side, they would come into the index in either order.
  for arch in amd64 arm64; do
    buildah build --quiet --platform "linux/$arch" --manifest "$list" --timestamp "$SOURCE_DATE_EPOCH" \
      --file "$program/Dockerfile" "$from" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2 && exit 1; }
  done
  buildah manifest push --quiet --all "$list" "oci:$scratch/$program:$version" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2 && exit 1; }
  tar --create --file "$to/$program-image.tar" --directory "$scratch/$program" --sort name --format ustar \
    --owner 0 --group 0 --numeric-owner --mode u=rwX,go=rX --mtime "@$SOURCE_DATE_EPOCH" blobs index.json oci-layout
done
