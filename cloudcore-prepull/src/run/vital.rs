//! Tasks that run as long as the process. Without one of them a leader would be ready, and blind or deaf.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

/// Notices when one of them ends. All clones notice the same.
#[derive(Clone, Debug)]
pub(super) struct Vital(Arc<watch::Sender<Option<&'static str>>>);

/// The process is of no use any more; another replica takes over, or the kubelet starts it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} has ended, which it must not: the process ends, to begin anew")]
pub(super) struct Ended(&'static str);

impl Default for Vital {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Vital {
    /// The task, which is noticed however it ends: also where it panics, or is dropped.
    pub(super) fn guard<T, W: Future<Output = T>>(
        &self,
        what: &'static str,
        work: W,
    ) -> impl Future<Output = T> + use<T, W> {
        let guard = Guard { vital: self.clone(), what };
        async move {
            let _guard = guard;
            work.await
        }
    }

    /// The first that ended, once one has.
    pub(super) async fn ended(&self) -> Ended {
        let mut ended = self.0.subscribe();
        let first = ended.wait_for(Option::is_some).await.ok().and_then(|first| *first);
        // We hold the sender: it is never closed.
        first.map_or_else(|| Ended("everything"), Ended)
    }
}

struct Guard {
    vital: Vital,
    what: &'static str,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.vital.0.send_if_modified(|first| first.replace(first.unwrap_or(self.what)).is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_ends_or_panics_is_noticed() {
        let vital = Vital::default();
        tokio::spawn(vital.guard("the one that runs", std::future::pending::<()>()));
        let waiting = tokio::spawn({
            let vital = vital.clone();
            async move { vital.ended().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        tokio::spawn(vital.guard("the watch", async { panic!("as it is told") })).await.unwrap_err();
        let noticed = tokio::time::timeout(std::time::Duration::from_secs(10), waiting).await;
        assert_eq!(noticed.unwrap().unwrap(), Ended("the watch"));
        vital.guard("the listener", async {}).await;
        assert_eq!(vital.ended().await, Ended("the watch"), "the first is the cause");
    }
}
