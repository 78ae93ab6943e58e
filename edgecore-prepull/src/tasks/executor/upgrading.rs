//! Tasks that upgrade this program: the image is pulled like any other, and its program put on trial. The trial ends this
//! program, and the one that runs afterwards ends the task.

use std::future::pending;

use anyhow::{anyhow, bail};
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageOutcome, ImageResult, ImageTask, PullPolicy, Upgrade};
use prepull_api::wire::truncate_reason;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;

use super::context::TaskContext;
use super::image::already_present;
use super::progress::TaskUpdate;
use super::window::wait_until;
use super::{Executor, log_end, open_images};
use crate::images::puller::Puller;
use crate::tasks::agent::Execution;
use crate::upgrade::{MOST_BYTES, PATH, UpgradeStage, Upgrades};

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
            None => Err(anyhow!("upgrades by hand take `edgecore-prepull upgrade`")),
            Some(upgrades) => self.try_program(upgrades, upgrade, (index, image), &mut context).await,
        };
        let result = result.unwrap_or_else(|error| ImageResult {
            reason: truncate_reason(&with_causes(error.as_ref())),
            code: Some(FailureCode::UpgradeFailed),
            ..ImageResult::new(ImageOutcome::Failed)
        });
        let mut result = context.board.end_image(index, result);
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
        context: &mut TaskContext<'_>,
    ) -> anyhow::Result<ImageResult> {
        match upgrades.wait_out_trial(context.task).await? {
            // No program is on trial any more.
            UpgradeStage::New | UpgradeStage::OnTrial => {}
            UpgradeStage::Proved => return Ok(self.find_present(image).await),
            UpgradeStage::WentBack(reason) => bail!(reason),
        }
        context.verification = Some(upgrades.check_upgradable(upgrade)?);
        // What is present may not have been verified by the key of this machine.
        let image = ImageTask { policy: PullPolicy::Always, ..image.clone() };
        let mut result = self.images.pull(context, index, &image).await;
        if !result.outcome.is_on_node() {
            return Ok(result);
        }
        wait_until(true, context.control.clone(), &self.images.clock).await;
        let reference = &image.reference;
        // What was verified: the reference may have got another image during the wait.
        let id = result.id.as_deref().ok_or_else(|| anyhow!("the runtime reports no id of the image"))?;
        let read = self.images.puller.read_file(id, PATH, MOST_BYTES).await;
        let program = read.map_err(|why| anyhow!("cannot take /{PATH} out of the image: {why}"))?;
        if upgrades.begin_trial(context.task, reference, &program, upgrade).await? {
            upgrades.request_restart();
            pending::<()>().await;
        }
        "its program runs already".clone_into(&mut result.reason);
        Ok(result)
    }

    /// The image that the trial came from. It may be gone by now, and its program stays.
    async fn find_present(&self, image: &ImageTask) -> ImageResult {
        let present = self.images.puller.look_up(&image.reference).await;
        present.ok().flatten().map_or_else(|| ImageResult::new(ImageOutcome::Present), already_present)
    }
}
