#!/usr/bin/env bash
# Makes the Debian and RPM packages of the agent: program, unit, configuration, licence. Usage: packages.sh FROM TO, both
# directories; FROM has the programs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
from=$(realpath "$1") to=$(realpath "$2")
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP

# The files, the same ones in both packages.
stage() { # ARCH DIRECTORY
  local unit=$2/usr/lib/systemd/system/edgecore-prepull.service
  install -D -m 755 "$from/edgecore-prepull-linux-$1" "$2/usr/bin/edgecore-prepull"
  install -D -m 644 manifests/edgecore-prepull/config.yaml "$2/etc/edgecore-prepull/config.yaml"
  install -D -m 644 LICENSE "$2/usr/share/doc/edgecore-prepull/copyright"
  # /usr/local is not a package's.
  install -d -m 755 "${unit%/*}"
  sed 's|/usr/local/bin/|/usr/bin/|' manifests/edgecore-prepull/edgecore-prepull.service >"$unit"
  chmod 644 "$unit"
}

deb() { # ARCH
  local tree=$scratch/deb-$1
  stage "$1" "$tree"
  install -d -m 755 "$tree/DEBIAN"
  sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$1/" \
    -e "s/@SIZE@/$(du --summarize --apparent-size --block-size 1KiB "$tree" | cut -f1)/" \
    manifests/packaging/debian/control >"$tree/DEBIAN/control"
  echo /etc/edgecore-prepull/config.yaml >"$tree/DEBIAN/conffiles"
  (cd "$tree" && find usr -type f -printf '%p\n' | LC_ALL=C sort | xargs md5sum >DEBIAN/md5sums)
  chmod 644 "$tree/DEBIAN"/*
  install -m 755 manifests/packaging/debian/{postinst,prerm,postrm} "$tree/DEBIAN/"
  # xz, which dpkg of every release reads.
  dpkg-deb --root-owner-group -Zxz --build "$tree" "$to/edgecore-prepull_${version}_$1.deb" >/dev/null
}

rpm() { # ARCH
  local machine=${target_of[$1]%%-*} tree=$scratch/rpm-$1
  stage "$1" "$tree"
  rpmbuild --quiet -bb --target "$machine-linux" manifests/packaging/edgecore-prepull.spec \
    --define "_topdir $scratch/rpmbuild" --define "_rpmdir $to" --define '_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' \
    --define "version_here $version" --define "tree_here $tree" \
    >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2 && exit 1; }
}

for arch in amd64 arm64; do
  say "packages of edgecore-prepull for $arch"
  deb "$arch"
  rpm "$arch"
done
