//! Plays the inputs of the fuzzer's corpus. `make fuzz` looks for more of them.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use prepull_fuzz::{SEPARATOR, TARGETS, check_input};

/// One test, because each input's memory is counted.
#[test]
fn every_corpus_input_takes_little_memory() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in TARGETS {
        let inputs = std::fs::read(corpus.join(target.name)).unwrap();
        let inputs = inputs.strip_suffix(&[SEPARATOR]).unwrap();
        let inputs: Vec<_> = inputs.split(|byte| *byte == SEPARATOR).collect();
        assert!(inputs.len() > 1, "{}: no inputs", target.name);
        for input in inputs {
            // A failure shows the input that's being played.
            println!("{}: {}", target.name, String::from_utf8_lossy(input));
            check_input(target, input);
        }
    }
    let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
    for file in std::fs::read_dir(corpus).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&name.as_str()), "{name}: no such target");
    }
}
