//! Ends the process when it must not lead any more.
//!
//! On a thread of its own, for the runtime may be what hangs; and a process that was stopped (SIGSTOP, a frozen
//! cgroup) goes on with everything that it had in its hands. The monotonic clock goes on meanwhile, so that the first
//! thing this thread sees when it wakes up is that its time has passed.

use std::sync::mpsc;
use std::time::Duration;

use tracing::error;

use super::leadership::{End, Leadership};

/// The last words may wait so long for whoever reads the log: a pipe that nobody empties must not keep us alive.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Watches over a term that has begun. `exit` is called where it is lost, and not where it is given back.
pub(super) fn start(leadership: Leadership, exit: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let watch = move || {
        if let End::Lost(why) = leadership.wait_for_end() {
            say(why);
            exit();
        }
    };
    std::thread::Builder::new().name("leader-watchdog".to_owned()).spawn(watch).map(drop)
}

/// Ends the process: sessions are dropped, nothing more is written, and the successor starts with what the API server
/// has.
pub(super) fn exit() {
    std::process::exit(1);
}

fn say(why: String) {
    let (said, done) = mpsc::channel();
    let speak = move || {
        error!(why, "leadership is lost; the process ends at once");
        let _ = said.send(()); // whoever waited has ended
    };
    if std::thread::Builder::new().spawn(speak).is_ok() {
        let _ = done.recv_timeout(LAST_WORDS);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    /// For a machine that is busy.
    const LIMIT: Duration = Duration::from_secs(10);

    fn watched() -> (Leadership, mpsc::Receiver<Instant>, Instant) {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        assert!(leadership.leads_until(now + SOON, now));
        let (ended, ends) = mpsc::channel();
        start(leadership.clone(), move || ended.send(Instant::now()).unwrap()).unwrap();
        (leadership, ends, now)
    }

    #[test]
    fn a_term_that_nobody_renews_ends_the_process() {
        let (leadership, ends, began) = watched();
        assert!(ends.recv_timeout(LIMIT).unwrap() >= began + SOON);
        assert!(!leadership.is_leader());
    }

    #[test]
    fn a_term_that_is_renewed_does_not() {
        let (leadership, ends, began) = watched();
        assert!(leadership.leads_until(began + LIMIT * 2, began));
        ends.recv_timeout(SOON * 4).unwrap_err();
        // Another holder ends it long before the time is up.
        leadership.lose("b leads".to_owned());
        ends.recv_timeout(LIMIT).unwrap();
    }

    #[test]
    fn a_term_that_is_given_back_ends_nothing() {
        let (leadership, ends, _) = watched();
        leadership.release();
        // The thread ends, and with it the sending end: nothing was sent.
        assert_eq!(ends.recv_timeout(LIMIT), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
