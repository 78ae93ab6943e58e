//! A job of OpenKruise that is followed to its end.

use std::time::Duration;

use anyhow::bail;
use jiff::Timestamp;
use prepull_api::crd::status::JobPhase;

use super::{look_again, read_job};
use crate::cluster::Cluster;
use crate::name::KruiseName;
use crate::problem;
use crate::progress::follow::{note_that_it_goes_on, or_interrupted, run_bounded};
use crate::progress::show::Show;
use crate::progress::view::JobView;
use crate::session::{CommandOutcome, Session};

/// How often a job of OpenKruise is asked for: each look reads all NodeImages, a second's work for ten thousand.
const POLL: Duration = Duration::from_secs(3);

/// Follows a job of OpenKruise in the same way, by polling: the results are in an object per node, and a watch would
/// also deliver every other image of those nodes.
pub(crate) async fn follow_kruise(
    session: &Session,
    cluster: &Cluster,
    name: &KruiseName,
    limit: Option<Duration>,
) -> anyhow::Result<CommandOutcome> {
    let mut show = Show::new(session);
    let mut last = read_job(cluster, name).await?.view(Timestamp::now());
    let ended = run_bounded(Box::pin(ask_until_over(cluster, name, &mut show, &mut last)), limit).await;
    let ended = or_interrupted(ended)?;
    show.finish_bars(ended);
    if matches!(ended, CommandOutcome::Done | CommandOutcome::Failed) {
        problem::unless_unread(show.print_last(&last))?;
    }
    note_that_it_goes_on(ended, &last.command_name(), limit);
    Ok(ended)
}

async fn ask_until_over(
    cluster: &Cluster,
    name: &KruiseName,
    show: &mut Show,
    last: &mut JobView,
) -> anyhow::Result<CommandOutcome> {
    loop {
        show.draw_view(last)?;
        if last.is_over {
            return Ok(if last.phase == JobPhase::Completed {
                CommandOutcome::Done
            } else {
                CommandOutcome::Failed
            });
        }
        tokio::time::sleep(POLL).await;
        match look_again(cluster, name).await {
            Ok(Some(seen)) => {
                show.mark_connected();
                *last = seen.view(Timestamp::now());
            }
            Ok(None) => bail!("job {name} was deleted while it was followed"),
            // A refusal too, since the job was read before: see [`problem::is_lasting`].
            Err(error) => show.mark_disconnected(&error),
        }
    }
}
