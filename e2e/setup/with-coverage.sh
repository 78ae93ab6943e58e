#!/bin/sh
# cargo's RUSTC_WORKSPACE_WRAPPER for `make fuzz`: our crates tell the fuzzer which branches they take, and are
# optimised; those of others are as they are for the tests. The flags are cargo-fuzz's without a sanitizer, so that a
# stable compiler does: there is no unsafe code of ours to watch.
exec "$@" --cfg fuzzing -Copt-level=2 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
