//! A job of OpenKruise that is followed to its end.

use std::time::Duration;

use anyhow::bail;
use jiff::Timestamp;
use prepull_api::crd::status::JobPhase;

use super::{look, look_again};
use crate::cluster::Cluster;
use crate::name::KruiseName;
use crate::problem;
use crate::progress::follow::{bounded, note_that_it_goes_on};
use crate::progress::show::Show;
use crate::progress::view::View;
use crate::session::{Ended, Session};

/// How often a job of OpenKruise is asked for: each look reads all NodeImages, a second's work for ten thousand.
const POLL: Duration = Duration::from_secs(3);

/// Follows a job of OpenKruise in the same way, by polling: the results are in an object per node, and a watch would
/// also deliver every other image of those nodes.
pub(crate) async fn follow_kruise(
    session: &Session,
    cluster: &Cluster,
    name: &KruiseName,
    limit: Option<Duration>,
) -> anyhow::Result<Ended> {
    let mut show = Show::new(session);
    let mut last = look(cluster, name).await?.view(Timestamp::now());
    let ended = bounded(ask_until_over(cluster, name, &mut show, &mut last), limit).await?;
    show.end(ended);
    if matches!(ended, Ended::Done | Ended::Failed) {
        show.last(&last)?;
    }
    note_that_it_goes_on(ended, &last.named(), limit);
    Ok(ended)
}

async fn ask_until_over(
    cluster: &Cluster,
    name: &KruiseName,
    show: &mut Show,
    last: &mut View,
) -> anyhow::Result<Ended> {
    loop {
        show.now(last)?;
        if last.is_over {
            return Ok(if last.phase == JobPhase::Completed { Ended::Done } else { Ended::Failed });
        }
        tokio::time::sleep(POLL).await;
        match look_again(cluster, name).await {
            Ok(Some(seen)) => {
                show.connected();
                *last = seen.view(Timestamp::now());
            }
            Ok(None) => bail!("job {name} was deleted while it was followed"),
            Err(error) if problem::is_lasting(&error) => return Err(error),
            Err(error) => show.disconnected(&error),
        }
    }
}
