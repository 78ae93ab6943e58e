#!/usr/bin/env bash
# Runs a command with the real parts, as e2e/setup/with-parts.sh does, and with the static programs of <target>/dist for
# ARCH; those of another architecture than this machine's run under qemu. Usage: with-programs.sh ARCH COMMAND...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"
arch=$1
shift

scratch=$(mktemp -d /tmp/prepull-dist.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
machine=${target_of[$arch]%%-*}
for program in "${programs[@]}"; do
  if [[ $machine == "$(uname -m)" ]]; then
    cp "$dist/$program-linux-$arch" "$scratch/$program"
  else
    # The process that the tests see, and kill, is the program itself.
    printf '#!/bin/sh\nexec %s %s "$@"\n' "$(command -v "qemu-$machine-static")" "$dist/$program-linux-$arch" >"$scratch/$program"
    chmod 755 "$scratch/$program"
  fi
done
say "with the static programs for $arch"
# Not exec: the trap is still to come. Signals of the terminal reach it, too.
trap : INT TERM HUP
e2e/setup/with-parts.sh "$scratch" "$@"
