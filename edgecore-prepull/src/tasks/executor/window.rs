//! The gate of a task: outside of its windows it downloads nothing. A pull is dropped when they close, unless
//! everything has arrived. Its content stays.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use prepull_api::download::DownloadTerms;
use tokio::sync::watch;
use tokio::time::sleep;

use super::board::ImageBoard;
use super::control::{TaskControl, wait_for_change};
use crate::clock::CloudClock;
use crate::images::rate::Bucket;
use crate::tasks::agent::LOOK_AT_CLOCK;

/// Waits until the task may download, or until it may not.
pub(super) async fn wait_until(is_open: bool, mut control: watch::Receiver<TaskControl>, clock: &CloudClock) {
    loop {
        let state = control.borrow_and_update().terms.window_state(clock.wall());
        if state.is_open == is_open {
            return;
        }
        next_look(&mut control, state.until, clock).await;
    }
}

/// Waits until a pull must stop: the window is closed, and bytes of the image are missing. Unpacking takes no link.
pub(super) async fn wait_until_closed(
    control: &watch::Receiver<TaskControl>,
    arrived: &watch::Sender<bool>,
    clock: &CloudClock,
) {
    let mut arrived = arrived.subscribe();
    loop {
        // This can't fail: the sender is borrowed here.
        let _ = arrived.wait_for(|arrived| !arrived).await;
        tokio::select! {
            () = wait_until(false, control.clone(), clock) => return,
            _ = arrived.wait_for(|arrived| *arrived) => {}
        }
    }
}

/// Records on the board the reason for which the task waits, in an endless loop.
pub(super) async fn announce_waits(
    mut control: watch::Receiver<TaskControl>,
    board: &ImageBoard,
    clock: &CloudClock,
) -> Infallible {
    loop {
        let (state, waits) = {
            let terms = &control.borrow_and_update().terms;
            (terms.window_state(clock.wall()), terms.explain_wait(clock.wall()))
        };
        if board.set_waits(waits.unwrap_or_default()) && !state.is_open {
            tracing::info!("nothing is downloaded for this task: it {}", board.wait_reason());
        }
        next_look(&mut control, state.until, clock).await;
    }
}

/// Waits until this time, but only as long as we trust the clock and the terms stay the same.
async fn next_look(control: &mut watch::Receiver<TaskControl>, until: Option<Timestamp>, clock: &CloudClock) {
    let time_passes = async {
        match until {
            None => std::future::pending().await,
            Some(until) => {
                let left = SystemTime::from(until).duration_since(clock.wall()).unwrap_or_default();
                // A timer may fire a little early.
                sleep(left.clamp(Duration::from_millis(1), LOOK_AT_CLOCK)).await;
            }
        }
    };
    tokio::select! {
        () = wait_for_change(control) => {}
        () = time_passes => {}
    }
}

/// Waits until a pull that began under these terms must begin again: other signatures are required, or its layers come
/// another way.
pub(super) async fn wait_for_other_way(mut control: watch::Receiver<TaskControl>, began: &DownloadTerms) {
    let way =
        |terms: &DownloadTerms| (terms.verify.clone(), terms.share, terms.site_rate.is_some(), terms.deltas);
    while way(&control.borrow_and_update().terms.download) == way(began) {
        wait_for_change(&mut control).await;
    }
}

/// Keeps the buckets at the rates of the task and of its site, in an endless loop.
pub(super) async fn follow_rates(
    mut control: watch::Receiver<TaskControl>,
    bucket: &Bucket,
    site: &Bucket,
) -> Infallible {
    loop {
        {
            let download = &control.borrow_and_update().terms.download;
            bucket.set_rate(download.max_rate);
            site.set_rate(download.site_rate);
        }
        wait_for_change(&mut control).await;
    }
}
