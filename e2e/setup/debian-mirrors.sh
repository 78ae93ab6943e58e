#!/usr/bin/env bash
# Prints the mirrors of Debian itself that this machine uses, one a line: those that apt has, without the ones of security
# and updates, which lack most packages. Another system has none: DEBIAN_MIRROR=URL names one.
set -euo pipefail
if [[ -n ${DEBIAN_MIRROR-} ]]; then printf '%s\n' "$DEBIAN_MIRROR" && exit; fi
# shellcheck disable=SC2016 # the fields are apt's, not the shell's
apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Origin: Debian' 'Created-By: Packages' 'Component: main' |
  awk '$2 ~ /^[a-z]+$/ && !seen[$1]++ { print $1; found = 1 } END { exit !found }' || {
  printf '==> apt knows no Debian mirror here: run apt-get update as root, or set DEBIAN_MIRROR to the URL of one\n' >&2
  exit 1
}
