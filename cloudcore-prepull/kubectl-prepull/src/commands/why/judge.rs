//! Turns the facts about a node into points and the next step. Pure.

mod job;
mod pull_job;
mod records;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use prepull_api::crd::EDGE_LABEL;
use prepull_api::edges::ListedEdge;
use serde::Serialize;

use super::facts::{NodeFacts, ReadResult};
use crate::amounts::{format_bytes, format_duration, seconds_between};
use crate::checklist::{Mark, Point};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Why {
    pub(super) node: String,
    pub(super) points: Vec<Point>,
    pub(super) next: String,
    /// Whether anything could be read of the node.
    #[serde(skip)]
    has_looked: bool,
}

impl Why {
    /// Whether nothing is in the way, as far as we could look. Where nothing could be read, that is not known.
    pub(super) fn is_clear(&self) -> bool {
        self.has_looked && self.points.iter().all(|point| point.mark != Mark::Bad)
    }
}

pub(super) fn judge_facts(facts: &NodeFacts, now: Timestamp) -> Why {
    let name = &facts.name;
    let mut points = Vec::new();
    let check = "kubectl prepull check looks for the reason";
    points.extend(facts.gone.as_ref().map(|gone| Point::bad(gone.text(), check)));
    points.extend(of_node(name, &facts.node, now));
    points.extend(of_edge(name, &facts.edge, facts.known_since, now));
    let node = facts.node.as_ref().ok().and_then(Option::as_ref);
    match &facts.jobs {
        Err(error) => points.push(Point::open(format!("jobs are not known: {error}"))),
        Ok(jobs) => {
            let mut of_jobs: Vec<_> =
                jobs.iter().filter_map(|of| job::point(of, name, node, facts.is_job_named, now)).collect();
            of_jobs.extend(jobs.iter().flat_map(|of| records::points(of, name)));
            of_jobs.extend(facts.pull_jobs.iter().map(|of| pull_job::point(of, name, now)));
            if of_jobs.is_empty() {
                of_jobs.push(Point::good("no job runs that has selected it"));
            }
            points.extend(of_jobs);
        }
    }
    let next = next_step(&points, name);
    let has_looked = facts.node.is_ok() || facts.edge.is_ok() || facts.jobs.is_ok();
    Why { node: name.clone(), points, next, has_looked }
}

/// The remedy of the first point that is in the way: what comes later often follows from it.
fn next_step(points: &[Point], name: &str) -> String {
    let of =
        |mark| points.iter().filter(move |point| point.mark == mark).find_map(|point| point.remedy.clone());
    of(Mark::Bad)
        .or_else(|| of(Mark::Open))
        .or_else(|| of(Mark::Good))
        .unwrap_or_else(|| format!("nothing is in its way: kubectl prepull run IMAGE --node {name}"))
}

fn of_node(name: &str, node: &ReadResult<Option<Node>>, now: Timestamp) -> Vec<Point> {
    let node = match node {
        Err(error) => return vec![Point::open(format!("its Node cannot be read: {error}"))],
        Ok(None) => {
            let remedy = format!(
                "check the name by `kubectl get nodes` and `kubectl prepull nodes`; a machine is a Node once its kubelet or \
                 EdgeCore has joined the cluster as {name}"
            );
            return vec![Point::bad(format!("there is no Node {name}"), remedy)];
        }
        Ok(Some(node)) => node,
    };
    let mut points = vec![Point::good(format!("the Node {name} exists"))];
    points.push(if node.labels().contains_key(EDGE_LABEL) {
        Point::good(format!("it is an edge node, by its label {EDGE_LABEL}"))
    } else {
        let remedy = format!("kubectl label node {name} {EDGE_LABEL}=");
        Point::bad(format!("it is no edge node: it has no label {EDGE_LABEL}, and jobs skip it"), remedy)
    });
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    let since = ready.and_then(|ready| ready.last_transition_time.as_ref());
    let since = since
        .map(|time| format!(" for {}", format_duration(seconds_between(time.0, now))))
        .unwrap_or_default();
    points.push(if ready.is_some_and(|ready| ready.status == "True") {
        Point::good(format!("it is Ready{since}"))
    } else {
        let message = ready.and_then(|ready| ready.message.as_deref().or(ready.reason.as_deref()));
        let message =
            message.filter(|text| !text.is_empty()).map(|text| format!(": {text}")).unwrap_or_default();
        Point::bad(
            format!("it has not been Ready{since}{message}; jobs that begin now skip it"),
            format!("see to the kubelet or EdgeCore of {name}: kubectl describe node {name}"),
        )
    });
    points
}

fn of_edge(
    name: &str,
    edge: &ReadResult<Option<ListedEdge>>,
    known_since: Option<Timestamp>,
    now: Timestamp,
) -> Vec<Point> {
    let edge = match edge {
        Err(error) => {
            let remedy = "without the list of the edges it is not known whether its agent is connected: see to that first \
                          (kubectl prepull check)";
            return vec![Point::open(format!("its edge is not known: {error}")).with_remedy(remedy)];
        }
        Ok(edge) => edge.clone().unwrap_or_default(),
    };
    let mut points =
        vec![certificate_point(name, &edge, now), connection_point(name, &edge, known_since, now)];
    if !edge.connected {
        return points;
    }
    match &edge.runtime {
        Some(runtime) => points.push(Point::good(format!("its runtime is {runtime}"))),
        None => points.push(
            Point::open("its agent does not report the container runtime: that does not answer, or the agent is of an older version")
                .with_remedy(format!("on {name}: journalctl -u edgecore-prepull")),
        ),
    }
    if let Some(disk) = &edge.disk {
        let text = format!(
            "{} of {} are free at {}",
            format_bytes(disk.available),
            format_bytes(disk.capacity),
            disk.mountpoint
        );
        // The default threshold of the kubelet and of the agent.
        points.push(if disk.available < disk.capacity / 100 * 15 {
            Point::open(format!("only {text}: jobs may find no room")).with_remedy(format!(
                "make room on {name}, or give it a larger disk; --disk-min-free is what the agent keeps free"
            ))
        } else {
            Point::good(text)
        });
    }
    match (edge.tasks, edge.max_tasks) {
        (Some(0), _) => points.push(Point::good("it has no task")),
        (Some(tasks), Some(most)) if tasks >= most => {
            points.push(Point::open(format!(
                "it has {tasks} of at most {most} tasks: further ones wait in line"
            )));
        }
        (Some(tasks), _) => points.push(Point::good(format!("it has tasks ({tasks}), and room for more"))),
        (None, _) => {}
    }
    points
}

fn certificate_point(name: &str, edge: &ListedEdge, now: Timestamp) -> Point {
    let token = format!("kubectl prepull tokens create --node {name} --install-line --server CLOUDCORE");
    let Some(until) = edge.certificate_until.as_ref().map(|until| until.0) else {
        // A connected one has a certificate; its record comes from a version that kept none.
        return if edge.connected {
            Point::good("it has a certificate")
        } else {
            Point::bad(
                "it has never joined: no certificate was issued to it",
                format!("{token}, and run the line on {name}"),
            )
        };
    };
    let day = until.strftime("%Y-%m-%d");
    if edge.revoked {
        Point::bad(
            "it is locked out: `node revoke` has been used on it",
            format!("a false alarm: kubectl prepull node allow {name}; a new machine in its place: {token}"),
        )
    } else if until <= now {
        Point::bad(
            format!("its certificate ended {} ago, on {day}", format_duration(seconds_between(until, now))),
            format!(
                "start its agent, which renews it within --renew-grace of the cloud; after that: {token}"
            ),
        )
    } else {
        Point::good(format!(
            "its certificate is good for {}, until {day}",
            format_duration(seconds_between(now, until))
        ))
    }
}

fn connection_point(name: &str, edge: &ListedEdge, known_since: Option<Timestamp>, now: Timestamp) -> Point {
    let ago = |time: Timestamp| format_duration(seconds_between(time, now));
    if edge.connected {
        let since =
            edge.connected_since.as_ref().map(|since| format!(" for {}", ago(since.0))).unwrap_or_default();
        let version = edge.version.as_ref().map(|version| format!(", version {version}")).unwrap_or_default();
        return Point::good(format!("its agent has been connected{since}{version}"));
    }
    let seen = match (&edge.last_seen, known_since) {
        (Some(seen), _) => format!("it was last seen {} ago", ago(seen.0)),
        (None, Some(since)) => format!("not since this leader began, {} ago", ago(since)),
        (None, None) => "when it was last seen is not known".to_owned(),
    };
    Point::bad(
        format!("its agent is not connected: {seen}; jobs wait for it"),
        format!(
            "on {name}: systemctl status edgecore-prepull, and journalctl -u edgecore-prepull shows what keeps it from the cloud"
        ),
    )
}
