//! The tasks that have to run as long as the process. Without one of them a leader would be ready, but see or hear
//! nothing.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

/// Notices when one of the vital tasks ends. All clones notice the same one.
#[derive(Clone, Debug)]
pub(super) struct Vital(Arc<watch::Sender<Option<&'static str>>>);

/// A vital task has ended. The process is of no use any more; another replica takes over, or the kubelet restarts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} has ended, although it must not: the process exits, to be restarted")]
pub(super) struct VitalTaskEnd(&'static str);

impl Default for Vital {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Vital {
    /// Wraps a task so that its end is noticed, even if it panics or is dropped.
    pub(super) fn guard<T, W: Future<Output = T>>(
        &self,
        what: &'static str,
        work: W,
    ) -> impl Future<Output = T> + use<T, W> {
        let guard = VitalTaskGuard { vital: self.clone(), what };
        async move {
            let _guard = guard;
            work.await
        }
    }

    /// Waits until a vital task has ended, and returns the first one.
    pub(super) async fn wait_for_end(&self) -> VitalTaskEnd {
        let mut ended = self.0.subscribe();
        let first = ended.wait_for(Option::is_some).await.ok().and_then(|first| *first);
        // `self` holds the sender, so the channel is never closed.
        first.map_or_else(|| VitalTaskEnd("a vital task"), VitalTaskEnd)
    }
}

struct VitalTaskGuard {
    vital: Vital,
    what: &'static str,
}

impl Drop for VitalTaskGuard {
    fn drop(&mut self) {
        self.vital.0.send_if_modified(|first| first.replace(first.unwrap_or(self.what)).is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_the_first_ended_vital_task() {
        let vital = Vital::default();
        tokio::spawn(vital.guard("the one that runs", std::future::pending::<()>()));
        let waiting = tokio::spawn({
            let vital = vital.clone();
            async move { vital.wait_for_end().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        tokio::spawn(vital.guard("the watch", async { panic!("on purpose") })).await.unwrap_err();
        let noticed = tokio::time::timeout(std::time::Duration::from_secs(10), waiting).await;
        assert_eq!(noticed.unwrap().unwrap(), VitalTaskEnd("the watch"));
        vital.guard("the listener", async {}).await;
        assert_eq!(vital.wait_for_end().await, VitalTaskEnd("the watch"), "the first one stays the cause");
    }
}
