//! Messages and inputs in the trace of a failed run.

use prepull_api::wire::{CloudMessage, EdgeMessage};
use prepull_engine::engine::Input;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::SessionEvent;
use prepull_engine::prepull::controller::{Content, Input as JobInput};

pub(crate) fn told(message: &CloudMessage) -> String {
    match message {
        CloudMessage::Assign(assign) => format!("Assign {} for {:?}", assign.task.id, assign.remaining),
        CloudMessage::ResultAck { task } => format!("ResultAck {task}"),
        CloudMessage::Cancel { task, reason } => format!("Cancel {task}: {reason}"),
        CloudMessage::Welcome(_) => "Welcome".to_owned(),
        CloudMessage::Unpin { jobs } => format!("Unpin {jobs:?}"),
        CloudMessage::Sources(sources) => format!("Sources {}", sources.task),
        CloudMessage::Trust(_) => "Trust".to_owned(),
        CloudMessage::Settings(_) => "Settings".to_owned(),
        CloudMessage::Goaway { .. } => "Goaway".to_owned(),
        CloudMessage::Other => "Other".to_owned(),
    }
}

pub(crate) fn said(message: &EdgeMessage) -> String {
    match message {
        EdgeMessage::Hello(_) => "Hello".to_owned(),
        EdgeMessage::Trusts { .. } => "Trusts".to_owned(),
        EdgeMessage::State(_) => "State".to_owned(),
        EdgeMessage::Configured { .. } => "Configured".to_owned(),
        EdgeMessage::Other => "Other".to_owned(),
        EdgeMessage::Blobs(blobs) => format!("Blobs {}", blobs.task),
        EdgeMessage::Accepted { task } => format!("Accepted {task}"),
        EdgeMessage::Progress(progress) => format!("Progress {}", progress.task),
        EdgeMessage::Result(result) => {
            format!("Result {} {:?} {}", result.task, result.outcome, result.reason)
        }
    }
}

pub(crate) fn shown(content: &Content) -> String {
    match content {
        Content::Status(status) => {
            format!("status {:?} {:?} {}", status.phase, status.summary, status.reason)
        }
        Content::Report(report) => {
            let node = |node: &prepull_api::crd::status::NodeStatus| {
                format!("{} {:?}/{}", node.node_name, node.phase, node.attempt)
            };
            format!(
                "report {}: {}",
                report.index,
                report.node_status.iter().map(node).collect::<Vec<_>>().join(", ")
            )
        }
    }
}

pub(crate) fn brief(input: &Input) -> String {
    match input {
        Input::Fleet(event) => match event {
            FleetEvent::Nodes(nodes) => format!("{} nodes", nodes.len()),
            FleetEvent::Node(node) => format!("node {} ready {}", node.name, node.ready),
            FleetEvent::NodeGone(node) => format!("node {node} gone"),
            FleetEvent::Session(SessionEvent::Up { node, session, .. }) => {
                format!("{node} up, session {session}")
            }
            FleetEvent::Session(SessionEvent::Down { node, session }) => {
                format!("{node} down, session {session}")
            }
            FleetEvent::Session(SessionEvent::Message { node, session, message }) => {
                format!("{node} (session {session}) says {}", said(message))
            }
        },
        Input::Prepull(input) => match input {
            JobInput::ReportsListed(reports) => format!("{} reports exist", reports.len()),
            JobInput::ReportGone { job, index } => format!("report {index} of {job} gone"),
            JobInput::Recalled(job, reports, _) => format!("{} reports of {job}", reports.len()),
            JobInput::Jobs(jobs) => format!("{} jobs", jobs.len()),
            JobInput::Job(Ok(job)) => format!(
                "job {} generation {}",
                job.metadata.uid.as_deref().unwrap_or_default(),
                job.metadata.generation.unwrap_or_default()
            ),
            JobInput::Job(Err(job)) => format!("unreadable job {:?}", job.rest.metadata.uid),
            JobInput::JobGone(job) => format!("job {job} gone"),
            JobInput::Dispatched { job, node, attempt, outcome, .. } => {
                format!("dispatched {job}/{attempt} to {node}: {outcome:?}")
            }
            JobInput::Written { job, object, version, outcome, .. } => {
                format!("written {object:?} of {job} v{version}: {outcome:?}")
            }
            JobInput::SecretAllowed { job, secret } => format!("{job} may use {secret}"),
        },
        other => format!("{other:?}"),
    }
}
