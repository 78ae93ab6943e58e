#!/usr/bin/env bash
# Makes what is released, in <target>/dist: programs, images, packages, lists of what is in them, checksums. `make dist`.
#
#   <program>-linux-<arch>           static programs, for amd64 (x86_64) and arm64 (aarch64)
#   <program>-linux-<arch>.cdx.json  what is in each, as CycloneDX
#   <program>-image.tar              an OCI layout with the image for both
#   edgecore-prepull_<version>_<arch>.deb, edgecore-prepull-<version>-1.<arch>.rpm
#   ca-certificates.crt              Mozilla's CA roots as Debian packages them, for the Dockerfiles, whose context this
#                                    directory is
#   kubectl-prepull-linux-<arch>.tar.gz, kubectl-prepull.krew.yaml
#                                    what krew installs the plugin from
#   image-prepull-<version>.tgz      the Helm chart
#   RELEASE-NOTES.md                 what changed, and what an upgrade needs
#   SHA256SUMS
#   SHA256SUMS.sig                   by the key of DIST_KEY, if there is one
#
# DIST_KEY: the releaser's private key, as cosign generate-key-pair makes it (COSIGN_PASSWORD: its password). It signs the
# checksums, and by them everything else.
# DIST_URL: where these files will be published, for krew's manifest.
# DIST_PROFILE: cargo's profile, `release` by default; `dev` makes them in a quarter of the time, to try this out.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

e2e/setup/packages.sh "${dist_packages[@]}"
tools=$(e2e/setup/zigbuild.sh "${targets[@]}")

# Whole crates are optimised, regardless of the settings for a developer's builds.
export CARGO_INCREMENTAL=0
# No path of this machine in a panic's message. Cargo's own variables, where they are set, stay in force.
RUSTFLAGS="${RUSTFLAGS-} --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/src"
export RUSTFLAGS RUSTC_WORKSPACE_WRAPPER=$PWD/manifests/packaging/pie.sh
say "cargo zigbuild, profile $profile, for ${targets[*]}"
CARGO_ZIGBUILD_ZIG_PATH=$tools/ziglang/zig "$tools/bin/cargo-zigbuild" zigbuild --locked --profile "$profile" \
  "${targets[@]/#/--target=}" "${programs[@]/#/--package=}" --bins

rm -rf "$dist"
mkdir -p "$dist"
for arch in "${!target_of[@]}"; do
  for program in "${programs[@]}"; do
    cp "$(built "$program" "$arch")" "$dist/$program-linux-$arch"
  done
done
# From the package, and not /etc/ssl/certs: that has the CAs that this machine trusts beside, such as a company's proxy.
cat /usr/share/ca-certificates/mozilla/*.crt >"$dist/ca-certificates.crt"

"$here/images.sh" "$dist" "$dist"
"$here/packages.sh" "$dist" "$dist"
"$here/plugin.sh" "$dist" "$dist"
"$here/chart.sh" "$dist"
"$here/notes.sh" >"$dist/RELEASE-NOTES.md"
for arch in "${!target_of[@]}"; do e2e/setup/sbom.sh "${target_of[$arch]}" "$dist" "-linux-$arch"; done
sums=$(cd "$dist" && find . -type f -printf '%P\n' | LC_ALL=C sort | xargs sha256sum)
printf '%s\n' "$sums" >"$dist/SHA256SUMS"
if [[ -n ${DIST_KEY-} ]]; then
  cosign=$(e2e/setup/cosign.sh 2.5)
  # No log of transparency: the key is what a user knows.
  COSIGN_PASSWORD=${COSIGN_PASSWORD-} "$cosign" sign-blob --yes --tlog-upload=false --key "$DIST_KEY" \
    --output-signature "$dist/SHA256SUMS.sig" "$dist/SHA256SUMS" 2>/dev/null || die "$DIST_KEY doesn't sign: is COSIGN_PASSWORD its password?"
  say "signed by $DIST_KEY"
else
  say "not signed: DIST_KEY names no key (cosign generate-key-pair makes one)"
fi
# test.sh makes images and packages again, with the time that it reads here, also after another commit.
touch --date "@$SOURCE_DATE_EPOCH" "$dist"/*
say "made in $SECONDS s: $dist"
(cd "$dist" && du --apparent-size --block-size 1KiB -- *)
