#!/usr/bin/env bash
# Prints the directory of the oldest kube-apiserver that we promise to work with, for `make test-oldest`; all else is on
# stderr. No package brings one, but Debian 12 has its source: built once (about 4 minutes on 2 cores), then taken from
# the cache.
# shellcheck disable=SC2317 # the steps of the build are called by name, through `phase`
set -euo pipefail

version=v1.20.2
part="kube-apiserver $version"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
# The second number counts how this script builds it: raised with each change of that, so that a binary built the old
# way isn't taken.
built=$cache/kube-apiserver-$version-2
log=$cache/kube-apiserver-build.log
# shellcheck source=e2e/setup/build-once.sh
source "$(dirname "${BASH_SOURCE[0]}")/build-once.sh"

# Runs it, too: one for another machine type is no kube-apiserver here.
take() {
  local found
  [[ -x $built/kube-apiserver ]] && found=$("$built/kube-apiserver" --version 2>/dev/null) || return 1
  say "kube-apiserver: ${found#Kubernetes } from the cache ($built)"
  printf '%s\n' "$built"
}

take && exit

# shellcheck source=/dev/null
system=$(. /etc/os-release 2>/dev/null && printf '%s' "${ID-}-${VERSION_ID-}") || system=unknown
[[ $system == debian-12 ]] || die "$part is built from Debian 12's source, and this is $system: set KUBEBUILDER_ASSETS to a
    directory with a kube-apiserver of that age, and run \`make test\`"

begin_build
say "$part: building it once from Debian's source; log: $log"

install_build_packages() {
  local package missing=()
  for package in golang-1.19-go rsync bsdmainutils make golang-github-modern-go-reflect2-dev; do
    [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    echo "not root: have these installed: ${missing[*]}"
    return 1
  fi
  apt-get update || true # a third party's repository may be down; the install fails then
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends --no-remove \
    -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 "${missing[@]}"
}

# Sources from the mirror that the machine uses already, with lists and a cache of their own: what
# apt knows and offers on this machine stays as it is.
download() {
  local apt=$scratch/apt
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$scratch/source"
  debian_mirrors() {
    # shellcheck disable=SC2016 # the fields are apt's, not the shell's
    apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Origin: Debian' 'Created-By: Packages' | sort -u
  }
  debian_mirrors >"$apt/sources.list"
  if [[ ! -s $apt/sources.list ]] && ((EUID == 0)); then # fresh images come without lists
    apt-get update || true
    debian_mirrors >"$apt/sources.list"
  fi
  [[ -s $apt/sources.list ]] || {
    echo "apt knows no Debian mirror here: run apt-get update as root"
    return 1
  }
  local options=(-o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o Acquire::Retries=3
    -o APT::Sandbox::User=root) # _apt, apt's own user, cannot enter a home directory
  apt-get "${options[@]}" update
  (cd "$scratch/source" && apt-get "${options[@]}" source --download-only kubernetes)
}

unpack() {
  local archives=("$scratch"/source/kubernetes_*"${version#v}".orig.tar.*)
  [[ -e ${archives[0]} ]] || {
    echo "Debian's source is no longer $version: $(ls "$scratch/source")"
    return 1
  }
  local tree=$scratch/go/src/k8s.io/kubernetes reflect2=github.com/modern-go/reflect2
  mkdir -p "$tree"
  tar --extract --file "${archives[0]}" --directory "$tree" --strip-components 1
  # The vendored one crashes with Go 1.18 and later as soon as a custom resource is written.
  rm -rf "${tree:?}/vendor/$reflect2"
  cp -rL "/usr/share/gocode/src/$reflect2" "$tree/vendor/$reflect2"
  # Takes a value for null where it equals the zero value in a way that was never true with the Go of its time.
  # With Go 1.18 and later it is true for an empty string, so that no custom resource could hold one: not a label
  # selector `node-role.kubernetes.io/edge: ""`, nor an empty message in a status.
  local validate=$tree/vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go
  local zero=' || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))'
  grep --quiet --fixed-strings "if data == nil$zero {" "$validate" || {
    echo "$validate is not what it was: is the comparison with the zero value still there?"
    return 1
  }
  sed -i "s/$zero//" "$validate"
}

# make, not a bare `go build`: the OpenAPI sources are generated. Debian's Go by its full path: a
# newer one in PATH may not build this source. The flags of a `make test` around us are not its own.
compile() {
  env -C "$scratch/go/src/k8s.io/kubernetes" -u GOFLAGS -u GOROOT -u MAKEFLAGS -u MFLAGS -u MAKELEVEL \
    PATH="/usr/lib/go-1.19/bin:$PATH" GOTOOLCHAIN=local GO111MODULE=off \
    GOPATH="$scratch/go" GOCACHE="$scratch/go-cache" TMPDIR="$scratch" \
    KUBE_GIT_VERSION="$version" KUBE_GIT_TREE_STATE=clean KUBE_GIT_COMMIT=0 FORCE_HOST_GO=y \
    make WHAT=cmd/kube-apiserver
}

# In place in one step, so that a cache directory is always a whole one.
keep() {
  mkdir "$scratch/result"
  cp "$scratch"/go/src/k8s.io/kubernetes/_output/local/bin/linux/*/kube-apiserver "$scratch/result/"
  "$scratch/result/kube-apiserver" --version
  rm -rf "$built"
  mv -T "$scratch/result" "$built"
}

phase "packages for the build" install_build_packages
phase "download" download
phase "unpack" unpack
phase "compile (the long one)" compile
phase "into the cache" keep
say "kube-apiserver: built in $SECONDS s"
take && exit
die "$built has no kube-apiserver that runs, see $log"
