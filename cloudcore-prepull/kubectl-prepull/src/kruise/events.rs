//! The events of a job of OpenKruise, and those of its NodeImages that are about its image.

use k8s_openapi::api::core::v1::Event;
use kube::{Resource, ResourceExt};

use super::{KruiseJob, records};
use crate::cluster::Cluster;
use crate::events::{EventRow, read_events};

/// The events, in no order.
pub(crate) async fn events(cluster: &Cluster, seen: &KruiseJob) -> anyhow::Result<Vec<EventRow>> {
    let mut rows = Vec::new();
    let list = seen.list.iter().map(|list| list.meta().uid.clone());
    let jobs = seen.jobs.iter().map(|(job, _)| job.meta().uid.clone());
    for uid in list.chain(jobs).flatten() {
        let fields = format!("involvedObject.uid={uid}");
        rows.extend(
            read_events(cluster, Some(&seen.namespace), &fields).await?.iter().map(EventRow::from_event),
        );
    }
    let of_nodes = read_events(cluster, None, "involvedObject.kind=NodeImage").await?;
    for (job, nodes) in &seen.jobs {
        let Some((name, tag)) = records::name_and_tag(&job.spec.image) else { continue };
        let since = job.creation_timestamp().map(|time| time.0);
        let is_of_job = |event: &&Event| {
            let object = event.involved_object.name.as_deref();
            let is_of_image = |note: &String| note.contains(&name) && note.contains(&tag);
            nodes.iter().any(|node| Some(node.node_name.as_str()) == object)
                && event.message.as_ref().is_some_and(is_of_image)
        };
        rows.extend(
            of_nodes.iter().filter(is_of_job).map(EventRow::from_event).filter(|row| row.time() >= since),
        );
    }
    rows.sort();
    rows.dedup();
    Ok(rows)
}
