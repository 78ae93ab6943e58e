//! The rate below which an endpoint isn't worth waiting for, if there is another one.
//!
//! A mirror that sends a byte now and then never reaches the limit for silence, and would hold a download for ever. A link can
//! be slow too, and then every endpoint behind it is. So the bound is far below real links: 16 KiB in two minutes are 1.1 kbit/s.
//! Nine streams, as many as a node has, that share a link of 64 kbit/s get 107 KiB each in that time.

use std::time::Duration;

/// Time of waiting over which the rate is averaged: enough for a link that comes and goes, or a disk that spins up.
const OVER: Duration = Duration::from_secs(120);
/// Fewest bytes in that time.
const LEAST: u64 = 16 * 1024;

/// Counts what arrives in the time in which its reader waits for it. While the reader keeps a limit of its own, nothing counts.
#[derive(Debug, Default)]
pub(crate) struct LeastRate {
    waited: Duration,
    bytes: u64,
}

impl LeastRate {
    /// Counts bytes that came after a wait. Returns the reason if they are too few.
    pub(crate) fn count(&mut self, waited: Duration, bytes: usize) -> Option<String> {
        self.waited += waited;
        self.bytes += bytes as u64;
        if self.waited < OVER {
            return None;
        }
        let Self { waited, bytes } = std::mem::take(self);
        (bytes < LEAST).then(|| format!("only {bytes} bytes in {} s", waited.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trickle_is_too_slow() {
        let seconds = Duration::from_secs;
        // How long each piece takes, its bytes, and the number of the piece after which it's too slow.
        for (name, each, bytes, after) in [
            ("a byte in 29 s", seconds(29), 1, Some(5)),
            ("below the bound", seconds(1), 136, Some(120)),
            ("above the bound", seconds(1), 137, None),
            ("a ninth of 64 kbit/s", seconds(2), 1777, None),
            ("a packet in 10 s", seconds(10), 1448, None),
            ("a link of a few MB/s", Duration::from_millis(1), 4096, None),
            ("a reader that takes its time", Duration::ZERO, 1, None),
        ] {
            let mut rate = LeastRate::default();
            let too_slow = (1..=1000).find(|_| rate.count(each, bytes).is_some());
            assert_eq!(too_slow, after, "{name}");
        }
    }

    #[test]
    fn each_two_minutes_are_judged_alone() {
        let mut rate = LeastRate::default();
        assert_eq!(rate.count(OVER, 1 << 30), None);
        assert_eq!(rate.count(OVER, 5).as_deref(), Some("only 5 bytes in 120 s"));
    }
}
