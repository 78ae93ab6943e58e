//! One image of a task, over all its tries.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prepull_api::task::{ImageOutcome, ImagePhase, ImageResult, ImageTask, PullPolicy};
use prepull_api::wire::{Key, truncate_reason};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::once::Fresh;
use super::{BACKOFF, Executor, TaskContext};
use crate::backoff::Backoff;
use crate::images::puller::{ErrorClass, Present, PullError, Pulled, Puller};

/// How an image came to be there.
enum There {
    Pulled(Pulled),
    Present(Present),
}

impl<P: Puller> Executor<P> {
    /// Tries until the image is there, or will not be.
    pub(super) async fn image(
        &self,
        context: &TaskContext<'_>,
        index: usize,
        image: &ImageTask,
    ) -> ImageResult {
        let board = context.board;
        let mut failures = 0;
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let result = loop {
            let error = match self.attempt(context, index, image).await {
                Ok(there) => break there.into(),
                Err(error) => error,
            };
            match error.class {
                ErrorClass::RuntimeDown => {}
                ErrorClass::Transient if failures < image.retries => failures += 1,
                class => {
                    // What passes may be tried by another task, and then goes on where this one ended.
                    if class != ErrorClass::Transient {
                        self.give_up(&image.reference).await;
                    }
                    break failed(&error);
                }
            }
            // At least half of it: a registry that is restarting is not given up within a second.
            let wait = backoff.next(0.5 + (self.random)() / 2.0);
            tracing::info!(image = %image.reference, %error, class = error.class.as_str(), retry_in = ?wait, "pull failed");
            board.waits(index, ImagePhase::BackingOff, &error.message);
            sleep(wait).await;
        };
        board.ends(index, result)
    }

    /// Has the runtime remove what pulls of this reference left, unless somebody else is at it.
    pub(crate) async fn give_up(&self, reference: &str) {
        if let Some(_turn) = self.once.free_turn(reference) {
            self.puller.give_up(reference).await;
        }
    }

    async fn attempt(
        &self,
        context: &TaskContext<'_>,
        index: usize,
        image: &ImageTask,
    ) -> Result<There, PullError> {
        // In this order, always: whoever waits for another pull of the same reference must not take a place
        // from one that could run.
        let mut turn = self.once.turn(&image.reference).await;
        let _place_in_task = acquire(&context.window).await;
        let _place_on_node = acquire(&self.places).await;

        let key = context.key(index);
        if let Key::Unavailable { reason } = &*key {
            return Err(PullError::new(ErrorClass::Permanent, reason));
        }
        match image.policy {
            PullPolicy::Never => {
                return match self.puller.present(&image.reference).await? {
                    Some(present) => Ok(There::Present(present)),
                    None => Err(PullError::new(
                        ErrorClass::Permanent,
                        format!("image {} is not present and its pull policy is Never", image.reference),
                    )),
                };
            }
            PullPolicy::IfNotPresent => {
                if let Some(present) = self.puller.present(&image.reference).await? {
                    return Ok(There::Present(present));
                }
            }
            PullPolicy::Always => {
                if let Some(pulled) = turn.as_ref().and_then(|fresh| fresh.by(&key)) {
                    let Pulled { digest, id, bytes: _ } = pulled.clone();
                    return Ok(There::Present(Present { digest, id }));
                }
            }
        }

        let board = context.board;
        board.tries(index);
        let progress = |bytes| board.bytes(index, bytes);
        let asking = AtomicBool::new(false);
        match in_time(image.timeout, &asking, self.with_key(image, &key, &asking, &progress)).await {
            Ok(pulled) => {
                *turn = Some(Fresh::new(&key, &pulled));
                Ok(There::Pulled(pulled))
            }
            Err(error) => {
                if error.class == ErrorClass::RuntimeDown {
                    board.takes_back_try(index);
                }
                Err(error)
            }
        }
    }
}

/// One try, as long as it may take. What is dropped stops in the runtime, and the next try goes on where it broke.
async fn in_time<T>(
    limit: Option<Duration>,
    asking: &AtomicBool,
    attempt: impl Future<Output = Result<T, PullError>>,
) -> Result<T, PullError> {
    let Some(limit) = limit else { return attempt.await };
    timeout(limit, attempt).await.unwrap_or_else(|_| {
        let mut message = format!("not pulled within timeoutSeconds ({}s)", limit.as_secs_f64());
        if asking.load(Ordering::Relaxed) {
            message.push_str(": the node's credential providers had not answered yet");
        }
        Err(PullError::new(ErrorClass::Transient, message))
    })
}

async fn acquire(places: &Semaphore) -> Option<tokio::sync::SemaphorePermit<'_>> {
    // An error means that the semaphore was closed; these never are.
    places.acquire().await.ok()
}

fn failed(error: &PullError) -> ImageResult {
    let reason = truncate_reason(&error.message);
    ImageResult { outcome: ImageOutcome::Failed, digest: None, id: None, reason, bytes: None, attempts: 0 }
}

impl From<There> for ImageResult {
    fn from(there: There) -> Self {
        let (outcome, digest, id, bytes) = match there {
            There::Pulled(Pulled { digest, id, bytes }) => (ImageOutcome::Pulled, digest, id, bytes),
            There::Present(Present { digest, id }) => (ImageOutcome::Present, digest, id, None),
        };
        Self { outcome, digest, id, reason: String::new(), bytes, attempts: 0 }
    }
}
