//! Tasks that upgrade this program: the image is pulled like any other, and its program put on trial. The trial ends this
//! program, and the one that runs afterwards ends the task.

use std::future::pending;
use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageOutcome, ImageResult, ImageTask, PullPolicy, Upgrade};
use prepull_api::wire::truncate_reason;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::context::TaskContext;
use super::image::already_present;
use super::progress::TaskUpdate;
use super::window::wait_until;
use super::{Executor, log_end, open_images};
use crate::images::puller::Puller;
use crate::tasks::agent::Execution;
use crate::upgrade::{MOST_BYTES, PATH, Stage, Upgrades};

/// How often we look whether a trial has ended. It takes seconds to minutes.
const LOOK: Duration = Duration::from_secs(1);

impl<P: Puller> Executor<P> {
    /// Carries out an upgrade, and doesn't return if this program will be restarted.
    pub(super) async fn upgrade(
        &self,
        upgrade: Upgrade,
        execution: &Execution,
        mut context: TaskContext<'_>,
        updates: &mpsc::Sender<TaskUpdate>,
    ) {
        let Some((index, image)) = open_images(execution).next() else { return };
        let result = match &self.upgrades {
            None => failed("upgrades by hand take `edgecore-prepull upgrade`"),
            Some(upgrades) => match upgrades.prepare(upgrade) {
                Err(error) => failed(&with_causes(error.as_ref())),
                Ok(verification) => {
                    context.verification = Some(verification);
                    self.try_program(upgrades, upgrade, (index, image), &context).await
                }
            },
        };
        let mut result = context.board.end(index, result);
        result.took = context.board.time_since_first_attempt(index);
        log_end(image, &result);
        // The receiver is gone when the agent stops.
        let _ = updates.send(TaskUpdate::ImageEnded { index, result: Box::new(result) }).await;
    }

    async fn try_program(
        &self,
        upgrades: &Upgrades,
        upgrade: Upgrade,
        (index, image): (usize, &ImageTask),
        context: &TaskContext<'_>,
    ) -> ImageResult {
        loop {
            match upgrades.stage(context.task) {
                Err(error) => return failed(&with_causes(error.as_ref())),
                Ok(Stage::New) => break,
                Ok(Stage::OnTrial) => sleep(LOOK).await,
                Ok(Stage::Proved) => return self.find_present(image).await,
                Ok(Stage::WentBack(reason)) => return failed(&reason),
            }
        }
        // What is present may not have been verified by the key of this machine.
        let image = ImageTask { policy: PullPolicy::Always, ..image.clone() };
        let mut result = self.images.pull(context, index, &image).await;
        if !result.outcome.is_on_node() {
            return result;
        }
        wait_until(true, context.control.clone(), &self.images.clock).await;
        let reference = &image.reference;
        let program = match self.images.puller.read_file(reference, PATH, MOST_BYTES).await {
            Ok(program) => program,
            Err(why) => return failed(&format!("cannot take /{PATH} out of the image: {why}")),
        };
        match upgrades.begin(context.task, reference, &program, upgrade).await {
            Ok(true) => {
                upgrades.restart();
                pending().await
            }
            Ok(false) => {
                "its program runs already".clone_into(&mut result.reason);
                result
            }
            Err(error) => failed(&with_causes(error.as_ref())),
        }
    }

    /// The image that the trial came from. It may be gone by now, and its program stays.
    async fn find_present(&self, image: &ImageTask) -> ImageResult {
        let present = self.images.puller.look_up(&image.reference).await;
        present.ok().flatten().map_or_else(|| ImageResult::new(ImageOutcome::Present), already_present)
    }
}

fn failed(reason: &str) -> ImageResult {
    ImageResult {
        reason: truncate_reason(reason),
        code: Some(FailureCode::UpgradeFailed),
        ..ImageResult::new(ImageOutcome::Failed)
    }
}
