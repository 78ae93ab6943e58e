#!/usr/bin/env bash
# Prints the directory of cargo-zigbuild, which builds static programs for other machines: Rust's own libraries come
# from rustup, the C compiler, the linker and musl from Zig. What is missing is installed: the targets, which are the
# arguments, and both tools, from PyPI, in the versions and with the checksums below, in the cache of the user.
# Usage: zigbuild.sh TARGET...
set -euo pipefail

# Of both, the wheels for Linux on x86_64 and on aarch64.
requirements='
cargo-zigbuild==0.24.0 \
  --hash=sha256:484412e39e4c6039474535ce97ee75a22bab22d58233056f8ec8a8f9034bb957 \
  --hash=sha256:6942e4320f7b05d8fb29e0a8ce5670bcbb3d254275100b85b5b7c86552f9a744
ziglang==0.15.2 \
  --hash=sha256:806316453d1ede7174ed3fefb8e5348154629089c3bb5fe812dfd0e172fac130 \
  --hash=sha256:edc0aa60ec964a4cf462d40f68d7de242ddf37fd9a80f2afaee6397059463230
'
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e
root=$cache/zigbuild-$(sha256sum <<<"$requirements" | head -c 8)

say() { printf '==> %s\n' "$*" >&2; }

for target; do
  [[ ! -d $(rustc --print sysroot)/lib/rustlib/$target/lib ]] || continue
  command -v rustup >/dev/null || {
    say "Rust's library for $target is missing, and there is no rustup to get it: install it with the means that installed Rust"
    exit 1
  }
  say "rustup target add $target"
  rustup --quiet target add "$target" >&2
done

mkdir -p "$cache"
exec 9>"$cache/zigbuild.lock"
flock --nonblock 9 || { say "another run installs cargo-zigbuild, waiting for it" && flock 9; }
if [[ ! -x $root/bin/cargo-zigbuild ]]; then
  say "installing cargo-zigbuild and Zig (90 MB) into $root"
  rm -rf "$cache"/zigbuild.?????? # of runs that were killed: who holds the lock may take them away
  scratch=$(mktemp -d "$cache/zigbuild.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  trap 'exit 130' INT TERM HUP
  printf '%s\n' "$requirements" >"$scratch/requirements.txt"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-compile --no-deps --only-binary :all: \
    --require-hashes --requirement "$scratch/requirements.txt" --target "$scratch/tools" >&2 9>&-
  mv -T "$scratch/tools" "$root" # in one step: what is in the cache is whole
fi
printf '%s\n' "$root"
