//! libFuzzer around one target, which `PREPULL_FUZZ_TARGET` names. `make fuzz` builds and runs it.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use prepull_fuzz::mutate::mutate;
use prepull_fuzz::{FuzzTarget, check_input, find_target};

static TARGET: LazyLock<&FuzzTarget> = LazyLock::new(|| {
    let name = std::env::var("PREPULL_FUZZ_TARGET").unwrap_or_default();
    find_target(&name).unwrap_or_else(|| panic!("PREPULL_FUZZ_TARGET={name:?} is no target"))
});

fuzz_target!(|input: &[u8]| check_input(&TARGET, input));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let changed = if seed % 3 == 0 { None } else { mutate(TARGET.form, &data[..size], seed) };
    match changed.filter(|changed| changed.len() <= max_size) {
        Some(changed) => {
            data[..changed.len()].copy_from_slice(&changed);
            changed.len()
        }
        None => fuzzer_mutate(data, size, max_size),
    }
});
