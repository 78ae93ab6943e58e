#![allow(clippy::unwrap_used)]

use super::*;
use crate::images::puller::fake::Fake;

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_runtime_is_short() {
    let fake = Fake::new();
    fake.state.lock().unwrap().outages = 5;
    wait_for_runtime(&*fake).await.unwrap();

    fake.state.lock().unwrap().outages = usize::MAX;
    let began = Instant::now();
    let error = wait_for_runtime(&*fake).await.unwrap_err().to_string();
    assert_eq!(began.elapsed().as_secs(), 10);
    assert_eq!(error, "the container runtime did not answer for 10 s: connection refused");
}
