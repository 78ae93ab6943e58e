//! Turns the facts into points, in sections. Pure.

mod cloud;
mod others;

use jiff::{SignedDuration, Timestamp};
use prepull_api::crd::{job, report, settings};
use serde::Serialize;

use super::facts::{ClusterFacts, EdgeCounts};
use super::schema::missing_fields;
use crate::amounts::{format_count, format_duration, format_names};
use crate::checklist::{Mark, Point};
use crate::version;

/// Clocks that differ by more than this are wrong: TLS, Leases and people's times go by them.
const CLOCKS: SignedDuration = SignedDuration::from_secs(30);
/// Names that are given of edges that have something in common.
const EXAMPLES: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct CheckReport {
    pub(super) wrong: usize,
    pub(super) sections: Vec<Section>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) points: Vec<Point>,
}

pub(super) fn judge_facts(facts: &ClusterFacts, now: Timestamp) -> CheckReport {
    let now = facts.clock.map_or(now, |ahead| now + ahead);
    let sections = vec![
        Section { title: "cluster", points: cluster_points(facts) },
        Section { title: "your rights", points: rights_points(facts) },
        Section { title: "cloudcore-prepull", points: cloud::points(facts, now) },
        Section { title: "other controllers", points: others::points(facts, now) },
        Section { title: "edges", points: edge_points(facts) },
    ];
    let points = sections.iter().flat_map(|section| &section.points);
    let wrong = points.filter(|point| point.mark == Mark::Bad).count();
    CheckReport { wrong, sections }
}

fn cluster_points(facts: &ClusterFacts) -> Vec<Point> {
    let mut points =
        vec![Point::good(format!("the API server {} answers, version {}", facts.server, facts.version))];
    points.push(match facts.clock {
        None => Point::open("the clock of the API server is not known"),
        Some(ahead) if ahead.abs() > CLOCKS => {
            let way = if ahead.is_negative() { "behind" } else { "ahead of" };
            let by = format_duration(ahead.unsigned_abs().as_secs());
            Point::bad(
                format!("the clock of the API server is {by} {way} this one"),
                "set both by NTP (chronyc tracking, timedatectl): certificates and the times that you read go by them",
            )
        }
        Some(_) => Point::good("the clocks of the API server and of this machine agree"),
    });
    let apply = "kubectl apply -f manifests/crds";
    if facts.served == Ok(false) {
        points.push(Point::bad(
            "the definitions are not installed: the API server does not know ImagePrePullJobs",
            apply,
        ));
        return points;
    }
    for (kind, ours, found) in [
        ("ImagePrePullJob", job::crd(), &facts.jobs),
        ("ImagePrePullReport", report::crd(), &facts.reports),
        ("ImagePrePullSettings", settings::crd(), &facts.settings),
    ] {
        points.push(match found {
            Err(error) => Point::open(format!(
                "whether the definition of {kind} is of this version is not known: {error}"
            )),
            Ok(None) => Point::bad(format!("the definition of {kind} is missing"), apply),
            Ok(Some(found)) => {
                let lacking = missing_fields(&ours, found);
                if lacking.is_empty() {
                    Point::good(format!(
                        "the definition of {kind} has every field of version {}",
                        env!("CARGO_PKG_VERSION")
                    ))
                } else {
                    let shown = &lacking[..lacking.len().min(EXAMPLES)];
                    let fields = format_names(shown, lacking.len() as u64);
                    Point::bad(
                        format!("the definition of {kind} is of another version, and drops {fields}"),
                        apply,
                    )
                }
            }
        });
    }
    points
}

fn rights_points(facts: &ClusterFacts) -> Vec<Point> {
    let missing = match &facts.missing {
        Err(error) => return vec![Point::open(format!("your rights are not known: {error}"))],
        Ok(missing) => missing,
    };
    let mut points = Vec::new();
    for (is_look, all) in [
        (true, "you may look: list, status, failures, events, nodes, sites, why"),
        (
            false,
            "you may act: run, from, remove, upgrade, set, retry, verify, suspend, pause, resume, cancel",
        ),
    ] {
        let lacking = missing.iter().filter(|right| right.is_look == is_look);
        let before = points.len();
        points.extend(lacking.map(|right| {
            let text = format!("you lack the right {}, for {}", right.text(&facts.namespace), right.commands);
            let remedy =
                "an administrator of the cluster can grant it: manifests/kubectl-prepull/rbac.yaml has roles";
            // A person without a right is no fault of the installation. Who only looks needs no other.
            if is_look { Point::open(text).with_remedy(remedy) } else { Point::open(text) }
        }));
        if points.len() == before {
            points.push(Point::good(all));
        }
    }
    points
}

fn edge_points(facts: &ClusterFacts) -> Vec<Point> {
    let edges = match &facts.edges {
        Err(error)
            if facts
                .missing
                .as_ref()
                .is_ok_and(|missing| missing.iter().any(|right| right.is_of_edges())) =>
        {
            return vec![Point::open(format!("whether edges are connected is not known: {error}"))];
        }
        Err(error) => {
            return vec![Point::bad(
                format!("the edges are not listed: {error}"),
                "see to what is wrong above",
            )];
        }
        Ok(edges) => edges,
    };
    let EdgeCounts { total, connected, versions, ending, revoked } = edges;
    let mut points = vec![match (*total, *connected) {
        (0, _) => Point::open("there is no edge: no Node has the label node-role.kubernetes.io/edge")
            .with_remedy("kubectl label node NODE node-role.kubernetes.io/edge=, and docs/operations/join.md shows how it joins"),
        (total, connected) if connected == total => {
            Point::good(format!("{} connected", format_count(total as u64, "edge")))
        }
        (total, connected) => Point::open(format!(
            "{connected} of {} connected",
            format_count(total as u64, "edge")
        ))
        .with_remedy(
            "kubectl prepull nodes --away lists the others, kubectl prepull why NODE shows what one lacks",
        ),
    }];
    if *revoked > 0 {
        points.push(Point::open(format!(
            "{} locked out by `node revoke`",
            format_count(*revoked as u64, "edge")
        )));
    }
    let ours = version::parse(env!("CARGO_PKG_VERSION"));
    let mut old = 0;
    for (version, edges) in versions {
        if is_too_old(version.as_deref(), ours) {
            old += edges;
            let edges = format_count(*edges as u64, "edge");
            let text = match version {
                Some(version) => format!("{edges} with {version}, more than one minor version behind"),
                None => format!("{edges} with a version too old to report it"),
            };
            points.push(Point::bad(
                text,
                "upgrade their agents (docs/operations/upgrade.md): they go on working, without what has come since",
            ));
        }
    }
    if old == 0 && *connected > 0 {
        let known: Vec<_> = versions.keys().flatten().cloned().collect();
        points.push(Point::good(format!("their versions are not too old: {}", known.join(", "))));
    }
    if ending.is_empty() {
        points.push(Point::good("no certificate of an edge that is connected ends within three days"));
    } else {
        let names = format_names(&ending[..ending.len().min(EXAMPLES)], ending.len() as u64);
        points.push(Point::bad(
            format!("the certificate of {} ends within three days: {names}", format_count(ending.len() as u64, "edge")),
            "they renew when a third of its life is left: can they reach port 10002? journalctl -u edgecore-prepull",
        ));
    }
    points
}

/// Whether a version is more than one minor version behind, or so old that it does not tell. One of another kind, such as of
/// somebody's own build, is not judged.
fn is_too_old(version: Option<&str>, ours: Option<(u32, u32, u32)>) -> bool {
    let (Some(version), Some(ours)) = (version, ours) else { return version.is_none() };
    version::parse(version)
        .is_some_and(|(major, minor, _)| major < ours.0 || (major == ours.0 && minor + 1 < ours.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_may_be_one_minor_version_behind() {
        for (version, is_old) in [
            ("1.5.9", false),
            ("1.4.0", false),
            ("1.3.9", true),
            ("0.9.0", true),
            ("2.0.0-rc.1", false),
            ("mine", false),
        ] {
            assert_eq!(is_too_old(Some(version), Some((1, 5, 0))), is_old, "{version}");
        }
        assert!(is_too_old(None, Some((0, 1, 0))));
    }
}
