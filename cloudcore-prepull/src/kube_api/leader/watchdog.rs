//! The watchdog that ends the process when it must not lead any more.
//!
//! It is a thread of its own, because the runtime may be what hangs. A process that was stopped (SIGSTOP, a frozen
//! cgroup) resumes in the middle of its work. The monotonic clock has kept running, so the first thing that this thread
//! sees when it wakes up is that the term is over.

use std::sync::mpsc;
use std::time::Duration;

use tracing::error;

use super::leadership::{Leadership, TermEnd};

/// The limit for the last log line: a blocked pipe must not keep the process alive.
const LOG_LIMIT: Duration = Duration::from_millis(500);

/// Watches a term that has begun. Calls `exit` if the term is lost, and not if it is released.
pub(super) fn start(leadership: Leadership, exit: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let watch = move || {
        if let TermEnd::Lost(why) = leadership.wait_for_end() {
            log_loss(why);
            exit();
        }
    };
    std::thread::Builder::new().name("leader-watchdog".to_owned()).spawn(watch).map(drop)
}

/// Ends the process: sessions are dropped, nothing more is written, and the successor starts from the API server.
pub(super) fn exit() {
    std::process::exit(1);
}

fn log_loss(why: String) {
    let (logged, done) = mpsc::channel();
    let log = move || {
        error!(reason = why, "leadership is lost; the process exits at once");
        // Fails if the limit has passed.
        let _ = logged.send(());
    };
    if std::thread::Builder::new().spawn(log).is_ok() {
        let _ = done.recv_timeout(LOG_LIMIT);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    /// Generous, for a busy machine.
    const LIMIT: Duration = Duration::from_secs(10);

    fn watched() -> (Leadership, mpsc::Receiver<Instant>, Instant) {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        assert!(leadership.leads_until(now + SOON, now));
        let (ended, ends) = mpsc::channel();
        start(leadership.clone(), move || ended.send(Instant::now()).unwrap()).unwrap();
        (leadership, ends, now)
    }

    #[test]
    fn an_unrenewed_term_ends_the_process() {
        let (leadership, ends, began) = watched();
        assert!(ends.recv_timeout(LIMIT).unwrap() >= began + SOON);
        assert!(!leadership.is_leader());
    }

    #[test]
    fn a_renewed_term_ends_once_lost() {
        let (leadership, ends, began) = watched();
        assert!(leadership.leads_until(began + LIMIT * 2, began));
        ends.recv_timeout(SOON * 4).unwrap_err();
        // Another holder ends the term long before its time.
        leadership.lose_term("b leads".to_owned());
        ends.recv_timeout(LIMIT).unwrap();
    }

    #[test]
    fn a_released_term_does_not_end_the_process() {
        let (leadership, ends, _) = watched();
        leadership.release();
        // The thread has ended, and with it the sender: `exit` was not called.
        assert_eq!(ends.recv_timeout(LIMIT), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
