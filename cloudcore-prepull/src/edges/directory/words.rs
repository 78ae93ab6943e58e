//! The words of edges, each kept once: a fleet has a handful of versions, runtimes and mount points.

use std::sync::Arc;

use prepull_api::text::to_plain_line;
use prepull_api::wire::Filesystem;
use prepull_engine::shared::shelf::Shelf;

use super::{EdgeDisk, ReportedState};

/// Upper bound on the characters of a short text from an edge: a message may have a million.
const MAX_WORD: usize = 128;
/// Fewer words than these are not worth a sweep.
const MIN_SWEEP: usize = 64;

/// The words that are in use.
#[derive(Debug)]
pub(super) struct Words(Shelf<str>);

impl Default for Words {
    fn default() -> Self {
        Self(Shelf::new(MIN_SWEEP))
    }
}

impl Words {
    /// The text as one plain line of bounded length.
    pub(super) fn intern_line(&mut self, text: &str) -> Arc<str> {
        let line = to_plain_line(text, MAX_WORD);
        self.0.share(&line, || line.as_str().into())
    }

    pub(super) fn keep_state(&mut self, runtime: Option<&str>, disk: Option<&Filesystem>) -> ReportedState {
        let runtime = runtime.map(|runtime| self.intern_line(runtime));
        let disk = disk.map(|disk| EdgeDisk {
            mountpoint: self.intern_line(&disk.mountpoint),
            available: disk.available,
            capacity: disk.capacity,
        });
        ReportedState { runtime, disk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_words_share_memory_while_used() {
        let mut words = Words::default();
        let first = words.intern_line("containerd 1.7.24");
        assert!(Arc::ptr_eq(&first, &words.intern_line("containerd 1.7.24")));
        for n in 0..10_000 {
            // An edge that sends another text each time.
            words.intern_line(&n.to_string());
        }
        assert!(words.0.len() <= MIN_SWEEP, "{}", words.0.len());
        assert!(Arc::ptr_eq(&first, &words.intern_line("containerd 1.7.24")));
    }

    #[test]
    fn a_word_is_one_plain_line() {
        let mut words = Words::default();
        assert_eq!(&*words.intern_line("a\u{1b}[2J\nb"), "a\u{fffd}[2J b");
        assert_eq!(words.intern_line(&"x".repeat(1_000_000)).chars().count(), MAX_WORD + 1);
    }
}
