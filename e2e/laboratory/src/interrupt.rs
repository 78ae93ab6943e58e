//! Ctrl-C in the programs of this crate.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

/// Exit status after Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;
/// Time after a failure within which a Ctrl-C may arrive that caused it. The signal goes to the whole group, and a
/// program that we wait for may end before we get the signal.
const GRACE: Duration = Duration::from_millis(300);

/// Runs the work to its end, or until Ctrl-C, with the result `None`.
pub(crate) async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Option<Result<T>> {
    let mut interrupts = match signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C") {
        Ok(interrupts) => interrupts,
        Err(error) => return Some(Err(error)),
    };
    let result = tokio::select! {
        biased;
        _ = interrupts.recv() => return None,
        result = work => result,
    };
    if result.is_err() && timeout(GRACE, interrupts.recv()).await.is_ok() {
        return None;
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// One test, since the signal reaches all listeners in this process.
    #[tokio::test]
    async fn a_failure_before_ctrl_c_is_an_interruption() {
        let fails = async || -> Result<()> { anyhow::bail!("skopeo ended") };
        assert!(unless_interrupted(fails()).await.unwrap().is_err(), "it wasn't interrupted");
        let interrupt = async || {
            tokio::time::sleep(GRACE / 3).await;
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::INT).unwrap();
        };
        let (result, ()) = tokio::join!(unless_interrupted(fails()), interrupt());
        assert!(result.is_none());
        let (result, ()) =
            tokio::join!(unless_interrupted(std::future::pending::<Result<()>>()), interrupt());
        assert!(result.is_none());
    }
}
