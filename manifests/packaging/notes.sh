#!/usr/bin/env bash
# Prints the notes of this release: the section of its version in CHANGELOG.md, or else what is unreleased, with its links as
# paths of the repository, and how the files are checked.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"

section() { awk -v title="## $1" '/^## / { on = ($0 == title); next } on' CHANGELOG.md; }

title="Unreleased, after $version" notes=$(section Unreleased)
[[ -n ${notes//[[:space:]]/} ]] || { title=$version && notes=$(section "$version"); }
[[ -n ${notes//[[:space:]]/} ]] || die "CHANGELOG.md has no section $version, and nothing Unreleased"
printf '# %s\n%s\n\n' "$title" "$notes"
cat <<'END'
### The files

`docs/operations/release.md` says which file is for what. To check them, with the releaser's `cosign.pub` from elsewhere:

    cosign verify-blob --key cosign.pub --insecure-ignore-tlog --signature SHA256SUMS.sig SHA256SUMS
    sha256sum --check --ignore-missing SHA256SUMS
END
