//! Questions to a disk that may hang.

use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::{JoinError, spawn_blocking};

/// Questions to file systems that may block for long, one at a time. The thread of an abandoned one hangs until the kernel
/// answers, and there are few threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct OneQuestion(Arc<Mutex<()>>);

impl OneQuestion {
    /// Asks once the question before has its answer.
    ///
    /// # Errors
    /// The question panicked, or the program ends.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = Arc::clone(&self.0).lock_owned().await;
        let asked = spawn_blocking(move || {
            let _turn = turn;
            question()
        });
        asked.await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn abandoned_questions_keep_one_thread() {
        let one = OneQuestion::default();
        let (asked, questions) = std::sync::mpsc::channel();
        let (answer, answers) = std::sync::mpsc::channel::<()>();
        let answers = Arc::new(std::sync::Mutex::new(answers));
        for _ in 0..4 {
            let (asked, answers) = (asked.clone(), Arc::clone(&answers));
            let hangs = one.ask(move || {
                asked.send(()).unwrap();
                let _ = answers.lock().unwrap().recv();
            });
            assert!(tokio::time::timeout(std::time::Duration::from_millis(20), hangs).await.is_err());
        }
        assert_eq!(questions.try_iter().count(), 1);
        drop(answer);
        assert_eq!(one.ask(|| 7).await.unwrap(), 7);
    }
}
