#!/usr/bin/env bash
# Finds the programs of a current Kubernetes cluster, or builds them, and prints their directory; all else is on stderr.
# The programs: kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl.
#
# No package brings current ones. Kubernetes is a Go module, so Go's own client fetches it, with the checksums of
# kubernetes/go.sum, and builds all of them as one program: about 9 minutes of processor time, once.
# shellcheck disable=SC2317 # the steps of the build are called by name, through `phase`
set -euo pipefail

setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' "$setup/kubernetes/go.mod")
part="Kubernetes $version"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
# The second number counts how this script builds it: raised with each change of that.
built=$cache/kubernetes-$version-1
log=$cache/kubernetes-build.log
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
go_needed=1.21 # the first that fetches the Go that a module asks for
# shellcheck source=e2e/setup/build-once.sh
source "$setup/build-once.sh"

# Runs it, too: one for another machine type is no kube-apiserver here.
take_from() { # DIR WHERE
  local found
  [[ -x $1/kube-apiserver ]] && found=$("$1/kube-apiserver" --version 2>/dev/null) || return 1
  say "$found from $2"
  (cd "$1" && pwd -P)
}

take() { take_from "$built" "the cache ($built)"; }

if [[ -n ${KUBEBUILDER_ASSETS-} ]]; then
  take_from "$KUBEBUILDER_ASSETS" "KUBEBUILDER_ASSETS ($KUBEBUILDER_ASSETS)" && exit
  # Asked for and not there: another one, taken silently, would be a surprise.
  die "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS has no kube-apiserver that runs: correct or unset it"
fi
take && exit

other_ways="Or set KUBEBUILDER_ASSETS to a directory with the programs (envtest's has no kubelet: what needs one fails),
    or PREPULL_E2E_KUBECONFIG to the kubeconfig of a cluster that the tests may use."
found=$(go env GOVERSION 2>/dev/null) || die "no Kubernetes, and no Go to build it with: install Go $go_needed or later, and have it in PATH.
    $other_ways"
printf '%s\n' "$go_needed" "${found#go}" | sort --check=quiet --version-sort ||
  die "no Kubernetes, and ${found} is too old to build it: install Go $go_needed or later.
    $other_ways"

begin_build
say "$part: building it once with $found; log: $log"

# What is compiled stays until all of it is, so that an interrupted build goes on where it was.
go_cache=$cache/kubernetes-go

compile() {
  local name=k8s.io/component-base/version
  local flags="-s -w -X $name.gitVersion=$version -X $name.gitTreeState=clean -X $name.gitCommit=0"
  local minor=${version#v*.}
  flags+=" -X $name.gitMajor=1 -X $name.gitMinor=${minor%%.*} -X $name.buildDate=1970-01-01T00:00:00Z"
  env -C "$setup/kubernetes" -u GOROOT -u GOEXPERIMENT -u GOARCH -u GOOS CGO_ENABLED=0 GOWORK=off \
    GOFLAGS="-mod=readonly -modcacherw -buildvcs=false -trimpath" \
    GOCACHE="$go_cache/build" GOMODCACHE="$go_cache/modules" \
    go build -ldflags "$flags" -o "$scratch/kubernetes" .
}

# In place in one step, so that a cache directory is always a whole one.
keep() {
  local program
  mkdir "$scratch/result"
  mv "$scratch/kubernetes" "$scratch/result/"
  for program in "${programs[@]}"; do ln -s kubernetes "$scratch/result/$program"; done
  "$scratch/result/kube-apiserver" --version
  rm -rf "$built"
  mv -T "$scratch/result" "$built"
  rm -rf "$go_cache"
}

phase "modules and compiler (the long one)" compile
phase "into the cache" keep
say "$part: built in $SECONDS s"
take && exit
die "$built has no kube-apiserver that runs, see $log"
