#!/usr/bin/env bash
# Prints the path of a helm, built once from its Go module into the cache; all else is on stderr. It takes about four minutes
# of processor time.
set -euo pipefail
version=v3.20.2
dir=$(PROBE=version "$(dirname "${BASH_SOURCE[0]}")/go-module.sh" helm "$version" \
  "-X helm.sh/helm/v3/internal/version.version=$version" helm.sh/helm/v3/cmd/helm)
printf '%s/helm\n' "$dir"
