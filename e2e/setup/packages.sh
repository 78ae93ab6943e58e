#!/usr/bin/env bash
# Installs what building and testing need and this machine lacks, from Debian's own packages.
# Does nothing, at once, when all of it is there. No packaged service is started.
# Usage: packages.sh [COMMAND:PACKAGE]..., what is needed beyond that.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # where ip and iptables are, also for users who have not got it in PATH

# What shows that it is there (a command, or a file), and the package that brings it. What is there
# may come from elsewhere: a containerd of Docker's, a newer kubectl, both do.
required=(
  gcc:gcc
  /usr/include/stdio.h:libc6-dev
  make:make
  pkg-config:pkg-config
  protoc:protobuf-compiler
  /usr/include/google/protobuf/descriptor.proto:libprotobuf-dev
  etcd:etcd-server
  containerd:containerd
  runc:runc
  /usr/lib/cni/bridge:containernetworking-plugins
  docker-registry:docker-registry
  htpasswd:apache2-utils
  skopeo:skopeo
  umoci:umoci
  /usr/share/doc/busybox-static:busybox-static # `busybox` alone may be the dynamic one
  mkfs.ext4:e2fsprogs
  ip:iproute2
  tc:iproute2
  iptables:iptables
  openssl:openssl
  jq:jq
  curl:curl
  ps:procps
  unshare:util-linux
  /lib/systemd/systemd:systemd # of a machine that a test boots in namespaces
  faketime:faketime
  tinyproxy:tinyproxy-bin # a proxy that asks for a password
  flock:util-linux
  mkfs.ext4:e2fsprogs # for tests that cut the power of a disk
  perl:perl-base
  "$@"
)
# Nice to have: looking into a cluster by hand, linting these scripts, power cuts on xfs as well.
optional=(
  kubectl:kubernetes-client
  shellcheck:shellcheck
  mkfs.xfs:xfsprogs
)
rust_needed=1.91

say() { printf '==> %s\n' "$*"; }

# Packages of those of its arguments that do not show, each once.
missing_of() {
  local entry probe
  for entry; do
    probe=${entry%:*}
    case $probe in
      /*) [[ -e $probe ]] ;;
      *) command -v "$probe" >/dev/null ;;
    esac || printf '%s\n' "${entry##*:}"
  done | uniq
}

check_rust() {
  local version
  if ! version=$(cargo --version 2>/dev/null); then
    say "cargo is missing: install Rust $rust_needed or later with rustup (the official installer; Debian's own rust is too old), and have ~/.cargo/bin in PATH" >&2
    return 1
  fi
  version=${version#cargo } version=${version%% *}
  if ! printf '%s\n' "$rust_needed" "$version" | sort --check=quiet --version-sort; then
    say "cargo $version is too old, $rust_needed or later is needed: rustup update stable" >&2
    return 1
  fi
}

check_rust || rust=missing

mapfile -t missing < <(missing_of "${required[@]}")
mapfile -t wanted < <(missing_of "${optional[@]}")
if ((${#missing[@]} + ${#wanted[@]} == 0)); then
  [[ -z ${rust-} ]] || exit 1
  say "packages: all there"
  exit 0
fi

# shellcheck source=/dev/null
distribution=$(. /etc/os-release 2>/dev/null && printf '%s' "${ID-} ${ID_LIKE-}") || distribution=unknown
if ! [[ " $distribution " =~ \ (debian|ubuntu)\  ]] || ((EUID != 0)); then
  if ((${#missing[@]} == 0)); then
    say "packages: all there, but for the optional ${wanted[*]}"
    [[ -z ${rust-} ]] || exit 1
    exit 0
  fi
  {
    say "missing, by their Debian package names: ${missing[*]}"
    if [[ " $distribution " =~ \ (debian|ubuntu)\  ]]; then
      say "install them as root: apt-get install --no-install-recommends ${missing[*]} ${wanted[*]}"
    else
      say "this is no Debian or Ubuntu: install what they bring with the means of this system, so that these show:"
      for entry in "${required[@]}"; do
        probe=${entry%:*}
        [[ -e $probe ]] || command -v "$probe" >/dev/null || printf '      %s\n' "$probe"
      done
    fi
  } >&2
  exit 1
fi

# Two runs at once: the second waits, and then finds everything there.
exec 9>/run/prepull-e2e-packages.lock
flock --nonblock 9 || { say "another run is installing packages, waiting for it" && flock 9; }
mapfile -t missing < <(missing_of "${required[@]}")
mapfile -t wanted < <(missing_of "${optional[@]}")

apt=(apt-get --quiet --quiet -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3 -o Dpkg::Use-Pty=0)
export DEBIAN_FRONTEND=noninteractive
if ((${#missing[@]} + ${#wanted[@]})); then
  # A third party's repository that does not answer is no reason to stop: the install fails if it matters.
  "${apt[@]}" update || say "apt-get update had errors, going on"
  # Ubuntu, for one, has no kubernetes-client.
  for package in "${wanted[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1; then missing+=("$package"); fi
  done
fi
if ((${#missing[@]})); then
  # Debian's way to say that no service may be started. Where the machine has a policy of its own,
  # that one stands; ours is known by its text, should a killed run have left it behind.
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]] || grep -qs prepull-e2e "$policy"; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\n# prepull-e2e: goes away when packages.sh ends\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi

  say "installing ${missing[*]}"
  # --no-remove: never trade a package of the user's for one of ours.
  log=$(mktemp)
  "${apt[@]}" install --yes --no-install-recommends --no-remove "${missing[@]}" >"$log" 2>&1 9>&- || {
    cat "$log" >&2
    say "apt-get install failed, see above" >&2
    exit 1
  }
  rm -f "$log"

  # The policy does not keep systemd from starting them at the next boot, nor does a foreign policy
  # that allows them. Units of packages that were here before are not touched.
  if [[ -d /run/systemd/system ]]; then
    for unit in etcd-server:etcd containerd:containerd docker-registry:docker-registry; do
      [[ " ${missing[*]} " != *" ${unit%:*} "* ]] || systemctl --quiet disable --now "${unit#*:}"
    done
  fi

  mapfile -t missing < <(missing_of "${required[@]}")
  if ((${#missing[@]})); then
    say "installed, and still not to be found: ${missing[*]}" >&2
    exit 1
  fi
fi
[[ -z ${rust-} ]] || exit 1
say "packages: all there (${SECONDS} s)"
