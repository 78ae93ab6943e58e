#!/bin/sh
# cargo's RUSTC_WORKSPACE_WRAPPER for dist.sh: static programs that the kernel loads at an address of chance, as Rust's own
# linking for musl has it. cargo-zigbuild leaves that out.
exec "$@" -Clink-arg=-pie
