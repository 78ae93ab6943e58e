#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::sync::Arc;

use futures::future::join_all;
use proptest::prelude::*;
use tokio::time::{sleep, timeout};

use super::*;

const MIB: u64 = 1 << 20;

fn rate(bytes: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(bytes)
}

/// Lets streams that read pieces of these sizes take from the bucket for `seconds`. Returns the time, the stream and
/// the bytes of each piece.
async fn passed(bucket: &Bucket, streams: &[usize], seconds: u64) -> Vec<(Duration, usize, u64)> {
    let log = RefCell::new(Vec::new());
    let begun = Instant::now();
    let stream = |(number, &piece): (usize, &usize)| {
        let log = &log;
        async move {
            loop {
                bucket.take(piece).await;
                log.borrow_mut().push((begun.elapsed(), number, piece as u64));
            }
        }
    };
    let all = join_all(streams.iter().enumerate().map(stream));
    let _: Result<Vec<()>, _> = timeout(Duration::from_secs(seconds), all).await;
    log.into_inner()
}

/// The most and the fewest bytes within any ten seconds.
fn extremes(log: &[(Duration, usize, u64)], seconds: u64) -> (u64, u64) {
    const WINDOW: Duration = Duration::from_secs(10);
    let from = (0..(seconds - WINDOW.as_secs()) * 20).map(|step| Duration::from_millis(step * 50));
    let sums = from.map(|from| {
        let within = log.iter().filter(|(at, ..)| *at >= from && *at < from + WINDOW);
        within.map(|(.., bytes)| bytes).sum::<u64>()
    });
    sums.fold((0, u64::MAX), |(most, least), sum| (most.max(sum), least.min(sum)))
}

#[tokio::test(start_paused = true)]
async fn three_streams_keep_a_rate_together() {
    let bucket = Bucket::new(rate(MIB));
    let log = passed(&bucket, &[16 * 1024, 64 * 1024, 128 * 1024], 40).await;
    let (most, least) = extremes(&log, 40);
    assert!(most <= MIB * 10 * 102 / 100, "{most}");
    assert!(least >= MIB * 10 * 98 / 100, "{least}");
}

#[tokio::test(start_paused = true)]
async fn streams_get_equal_shares() {
    let bucket = Bucket::new(rate(MIB));
    let log = passed(&bucket, &[1 << 16, 1 << 17, 1 << 18], 60).await;
    for stream in 0..3 {
        let own: u64 = log.iter().filter(|(_, number, _)| *number == stream).map(|(.., bytes)| bytes).sum();
        assert!(own.abs_diff(20 * MIB) < MIB, "{own} of {} for stream {stream}", 60 * MIB);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_allows_no_burst() {
    let bucket = Bucket::new(rate(MIB));
    bucket.take(1).await;
    sleep(Duration::from_secs(3600)).await;
    let (begun, mut burst) = (Instant::now(), 0);
    while begun.elapsed().is_zero() {
        bucket.take(1024).await;
        burst += 1024;
    }
    assert!(burst <= MIB / 5, "{burst}");
}

#[tokio::test(start_paused = true)]
async fn a_new_rate_holds_immediately() {
    let bucket = Arc::new(Bucket::new(rate(1024)));
    let begun = Instant::now();
    let waiting = tokio::spawn({
        let bucket = bucket.clone();
        async move { bucket.take(11 * 1024).await }
    });
    sleep(Duration::from_secs(1)).await;
    bucket.set_rate(rate(10 * 1024));
    waiting.await.unwrap();
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(1800) && took < Duration::from_millis(2200), "{took:?}");

    let waiting = tokio::spawn({
        let bucket = bucket.clone();
        async move { bucket.take(usize::MAX).await }
    });
    sleep(Duration::from_secs(1)).await;
    bucket.set_rate(None);
    timeout(Duration::from_millis(100), waiting).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_a_rate_nothing_waits() {
    let begun = Instant::now();
    Bucket::new(None).take(usize::MAX).await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_rate_is_never_exceeded(
        bytes_per_second in 64_u64..(64 * MIB),
        pieces in prop::collection::vec(1_usize..(256 * 1024), 1..5),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (most, _) = runtime.block_on(async {
            // Allow one large piece, since a piece counts as a whole when its last byte passes.
            let largest = usize::try_from(bytes_per_second / 50).unwrap().max(1);
            let pieces: Vec<_> = pieces.iter().map(|piece| *piece.min(&largest)).collect();
            let bucket = Bucket::new(rate(bytes_per_second));
            extremes(&passed(&bucket, &pieces, 12).await, 12)
        });
        let allowed = bytes_per_second * 10;
        prop_assert!(most <= allowed + allowed / 20 + 1, "{most} of {allowed}");
    }
}
