#!/usr/bin/env bash
# What is in each program, and under which licences, as CycloneDX: <target>/release/<program>.cdx.json, or, of programs
# for another machine, DIRECTORY/<program>SUFFIX.cdx.json. Usage: sbom.sh [TARGET DIRECTORY SUFFIX]
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$setup/../.."
target=${1-x86_64-unknown-linux-gnu} out=${2-$(realpath -m "${CARGO_TARGET_DIR:-target}")/release} suffix=${3-}
tool=$("$setup/cargo-tool.sh" cargo-cyclonedx 0.5.9)
mkdir -p "$out"

# It writes one for each program of the workspace, beside its Cargo.toml.
trap 'rm -f ./*/*_bin.cdx.json ./*/*/*_bin.cdx.json' EXIT
"$tool" cyclonedx --quiet --format json --spec-version 1.5 --describe binaries --target "$target"
for crate in cloudcore-prepull edgecore-prepull cloudcore-prepull/kubectl-prepull; do
  program=${crate##*/}
  mv "$crate/${program}_bin.cdx.json" "$out/$program$suffix.cdx.json"
  printf '==> %s\n' "$out/$program$suffix.cdx.json"
done
