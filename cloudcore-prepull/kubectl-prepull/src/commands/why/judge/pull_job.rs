//! The points about a job of OpenKruise on a node.

use jiff::Timestamp;
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::status::NodePhase;

use crate::amounts::{format_duration, seconds_between};
use crate::checklist::Point;
use crate::kruise::OfNode;
use crate::progress::tally::reason_of;

pub(super) fn point(of: &OfNode, node: &str, now: Timestamp) -> Point {
    let OfNode { job, record, has_node_image } = of;
    let name = job.job.as_str();
    let watch = format!("kubectl prepull status {name} --watch");
    let Some(record) = record else {
        return if *has_node_image {
            without_record(of, name, watch)
        } else {
            Point::bad(
                format!("{name} cannot ask for anything on it: there is no NodeImage {node}"),
                format!(
                    "NodeImages are made of Nodes with the label {EDGE_LABEL}, unless --kruise-node-selector names another"
                ),
            )
        };
    };
    let reason = reason_of(record);
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let since = record.start_time.as_ref().map(|start| seconds_between(start.0, now));
    let since = since.map(|since| format!(" for {}", format_duration(since))).unwrap_or_default();
    match record.phase {
        NodePhase::Successful => Point::good(format!("{name} has succeeded on it")),
        NodePhase::InProgress => {
            Point::good(format!("{name} is at work on it{since}{because}")).with_remedy(watch)
        }
        NodePhase::Pending => {
            Point::open(format!("{name} has asked for its image, and it waits{because}")).with_remedy(watch)
        }
        NodePhase::Failure | NodePhase::Unknown => Point::bad(
            format!("{name} has failed on it{because}"),
            "mend that; then delete the job and apply it again, which pulls nothing that is there already",
        ),
    }
}

/// The node has a NodeImage, in which the job is not.
fn without_record(of: &OfNode, name: &str, watch: String) -> Point {
    if of.job.is_over {
        Point::open(format!("{name} is over, and did not select it, or what it asked for was removed"))
    } else if of.job.suspended {
        let edit = format!("kubectl edit {name}: parallelism 0 pauses it");
        Point::bad(format!("{name} is paused, and has not asked for its image"), edit)
    } else {
        Point::open(format!(
            "{name} has not asked for its image: it waits for its turn, or does not select it"
        ))
        .with_remedy(watch)
    }
}
