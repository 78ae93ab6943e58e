//! The fuzz targets: one function for each kind of foreign input.
//!
//! ```text
//!  corpus/TARGET ─▶ tests/corpus.rs (`make test`) ─┐
//!                └▶ bin/libfuzzer.rs (`make fuzz`) ┴─▶ check ─▶ targets::TARGET ─▶ the code of the programs
//! ```
//!
//! A target panics if something is wrong. In addition to its own assertions, [`check_input`] bounds the memory.

#![allow(clippy::expect_used, reason = "a target panics where something is wrong")]

use peak_alloc::PeakAlloc;

pub mod mutate;
mod targets {
    pub(crate) mod cloud_messages;
    pub(crate) mod delta_manifests;
    pub(crate) mod diffs;
    pub(crate) mod docker_configs;
    pub(crate) mod edge_messages;
    pub(crate) mod enrolment;
    pub(crate) mod manifests;
    pub(crate) mod overriders;
    pub(crate) mod plan;
    pub(crate) mod provider_answers;
    pub(crate) mod recordings;
    pub(crate) mod references;
    pub(crate) mod registry_hosts;
    pub(crate) mod selectors;
    pub(crate) mod windows;
}

/// Counts allocations, so that [`check_input`] can bound them.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Ends each input in a file of the corpus: ASCII's "record separator", which occurs in no text.
pub const SEPARATOR: u8 = 0x1e;

/// The form of inputs, for mutations that keep them plausible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputForm {
    /// Lines of text.
    Lines,
    /// One JSON value.
    Json,
    /// A JSON value on each line, and perhaps other lines.
    JsonLines,
}

/// A kind of input.
#[derive(Debug)]
pub struct FuzzTarget {
    /// Its name, and that of its file in the corpus.
    pub name: &'static str,
    /// The form of its inputs.
    pub form: InputForm,
    /// Processes an input like the program, and panics if a promise is broken.
    run: fn(&[u8]),
    /// The bytes that may be allocated at a time.
    memory: MemoryBound,
}

/// A bound of memory that grows with the input.
#[derive(Clone, Copy, Debug)]
struct MemoryBound {
    fixed: usize,
    per_byte: usize,
}

/// A parsed value is at most this many times as large as its text: `[],` takes 3 bytes of JSON, and 32 as a value in a
/// list that has grown to twice its size.
const PARSED: MemoryBound = MemoryBound { fixed: 256 * 1024, per_byte: 64 };
/// A world of nodes and jobs stands around each input, and remembers the inputs.
const WORLD: MemoryBound = MemoryBound { fixed: 16 * 1024 * 1024, per_byte: 256 };

/// Aliases may repeat 64 Ki values, regardless of the length of the text.
const PLANNED: MemoryBound = MemoryBound { fixed: 16 * 1024 * 1024, per_byte: 1024 };

/// Each time zone is read once, and kept.
const CLOCKS: MemoryBound = MemoryBound { fixed: 4 * 1024 * 1024, per_byte: 64 };
/// `a=1` is a name of its own in a table that stays in order.
const TABLES: MemoryBound = MemoryBound { fixed: 256 * 1024, per_byte: 256 };

/// A file of at most 4 MiB may be a prefix, in a buffer that has grown to twice its size; zeros stand in for one here.
const APPLIED: MemoryBound = MemoryBound { fixed: 24 * 1024 * 1024, per_byte: 64 };

/// All targets.
pub const TARGETS: &[FuzzTarget] = &[
    target("references", InputForm::Lines, targets::references::run, PARSED),
    target("selectors", InputForm::Lines, targets::selectors::run, PARSED),
    target("overriders", InputForm::Lines, targets::overriders::run, PARSED),
    target("docker_configs", InputForm::Json, targets::docker_configs::run, PARSED),
    target("provider_answers", InputForm::Json, targets::provider_answers::run, PARSED),
    target("enrolment", InputForm::Json, targets::enrolment::run, PARSED),
    target("windows", InputForm::Lines, targets::windows::run, CLOCKS),
    target("registry_hosts", InputForm::Lines, targets::registry_hosts::run, TABLES),
    target("manifests", InputForm::Json, targets::manifests::run, PARSED),
    target("delta_manifests", InputForm::Json, targets::delta_manifests::run, PARSED),
    target("diffs", InputForm::Lines, targets::diffs::run, APPLIED),
    target("plan", InputForm::Lines, targets::plan::run, PLANNED),
    target("cloud_messages", InputForm::JsonLines, targets::cloud_messages::run, WORLD),
    target("edge_messages", InputForm::JsonLines, targets::edge_messages::run, WORLD),
    target("recordings", InputForm::JsonLines, targets::recordings::run, WORLD),
];

const fn target(name: &'static str, form: InputForm, run: fn(&[u8]), memory: MemoryBound) -> FuzzTarget {
    FuzzTarget { name, form, run, memory }
}

/// The target of this name.
pub fn find_target(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Gives one input to a target.
///
/// # Panics
/// Where a promise is broken, or the input took more memory than its size allows. Other threads must not allocate
/// allocate.
pub fn check_input(target: &FuzzTarget, input: &[u8]) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    (target.run)(input);
    let taken = MEMORY.peak_usage().saturating_sub(before);
    let MemoryBound { fixed, per_byte } = target.memory;
    let bound = fixed + per_byte * input.len();
    assert!(taken <= bound, "{} bytes of input took {taken} bytes of memory, more than {bound}", input.len());
}
