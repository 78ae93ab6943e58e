# Sourced by the scripts beside it, which go on in the root of the repository: what is released is called so, and for these
# machines.
# shellcheck shell=bash disable=SC2034 # used where it is sourced

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
say() { printf '==> %s\n' "$*"; }
die() { say "$*" >&2 && exit 1; }

programs=(cloudcore-prepull edgecore-prepull kubectl-prepull)
# Those that run in a pod.
images=(cloudcore-prepull edgecore-prepull)
# By the names that images and Debian have for machines.
declare -A target_of=([amd64]=x86_64-unknown-linux-musl [arm64]=aarch64-unknown-linux-musl)
targets=("${target_of[amd64]}" "${target_of[arm64]}")
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

profile=${DIST_PROFILE:-release}
target_dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")
dist=$target_dir/dist
# In krew's manifest; a place that does not exist unless the caller names one.
plugin_url=${DIST_URL:-https://downloads.invalid/image-prepull/v$version}
# Where cargo leaves a program.
built() { # PROGRAM ARCH
  local folder=$profile
  [[ $folder != dev ]] || folder=debug
  printf '%s/%s/%s/%s\n' "$target_dir" "${target_of[$2]}" "$folder" "$1"
}

# The time of everything in images and packages, so that the same programs make the same bytes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH

# COMMAND:PACKAGE, for e2e/setup/packages.sh: what making and testing take beyond what the tests need.
dist_packages=(python3:python3 pip3:python3-pip buildah:buildah dpkg-deb:dpkg rpmbuild:rpm /usr/share/ca-certificates/mozilla:ca-certificates)
test_packages=(qemu-aarch64-static:qemu-user-static debootstrap:debootstrap rpm:rpm runc:runc readelf:binutils cpio:cpio /usr/lib/python3/dist-packages/yaml:python3-yaml)
