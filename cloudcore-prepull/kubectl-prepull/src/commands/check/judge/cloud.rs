//! The leader, its pods, the way to it, and its CA.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use x509_parser::pem::Pem;

use super::super::facts::ClusterFacts;
use crate::amounts::{format_count, format_duration, seconds_between};
use crate::checklist::Point;
use crate::leader::current_leader;

/// A CA that ends earlier than this is to be replaced now: edges that are away for weeks have to learn of the next one.
const ROTATE: SignedDuration = SignedDuration::from_hours(90 * 24);

pub(super) fn points(facts: &ClusterFacts, now: Timestamp) -> Vec<Point> {
    let mut points = vec![leader_point(facts, now)];
    points.push(pods_point(facts));
    points.push(service_point(facts));
    points.push(ca_point(facts, now));
    points
}

fn leader_point(facts: &ClusterFacts, now: Timestamp) -> Point {
    let namespace = &facts.namespace;
    let start = format!(
        "kubectl -n {namespace} get pods; kubectl -n {namespace} logs -l app.kubernetes.io/name=cloudcore-prepull"
    );
    let lease = match &facts.lease {
        Err(error) => return Point::open(format!("whether a replica leads is not known: {error}")),
        // A single one may lead without a Lease.
        Ok(None) if facts.edges.is_ok() => {
            return Point::open("the leader has no Lease: it runs with --leader-elect=false");
        }
        Ok(None) => {
            return Point::bad(
                format!("no replica leads: namespace {namespace} has no Lease cloudcore-prepull"),
                "install cloudcore-prepull (docs/operations/install.md); --system-namespace names another namespace",
            );
        }
        Ok(Some(lease)) => lease,
    };
    let gone = match current_leader(lease, now) {
        Ok(holder) => return Point::good(format!("{holder} leads")),
        Err(gone) => gone,
    };
    let ago = format_duration(seconds_between(gone.since, now));
    let how = match gone.holder {
        None => format!("the last leader gave its Lease back {ago} ago"),
        Some(holder) => format!("{holder} has not renewed its Lease for {ago}"),
    };
    Point::bad(format!("no replica leads: {how}"), start)
}

fn pods_point(facts: &ClusterFacts) -> Point {
    let namespace = &facts.namespace;
    let pods = match &facts.pods {
        Err(error) => return Point::open(format!("its pods are not known: {error}")),
        Ok(pods) => pods,
    };
    let unready = pods.iter().find(|pod| !is_ready(pod)).map(ResourceExt::name_any);
    match (pods.len(), unready) {
        // Outside of a cluster there are none.
        (0, _) => Point::open(format!(
            "namespace {namespace} has no pod of it: it runs outside of the cluster, or not at all"
        )),
        (all, None) => Point::good(format!("{} ready", format_count(all as u64, "pod"))),
        (all, Some(unready)) => {
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            Point::bad(
                format!("{ready} of {} ready; {unready} is not", format_count(all as u64, "pod")),
                format!(
                    "kubectl -n {namespace} describe pod {unready}; /availablez of the pod, port 10003, has the reason"
                ),
            )
        }
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn service_point(facts: &ClusterFacts) -> Point {
    let namespace = &facts.namespace;
    match &facts.door {
        Err(error) => Point::open(format!("whether the Service leads to it is not known: {error}")),
        Ok(None) => Point::open(format!(
            "namespace {namespace} has no Service cloudcore-prepull: edges dial something else"
        )),
        Ok(Some(pods)) => match pods.len() {
            0 => Point::bad(
                "the Service cloudcore-prepull leads to no pod: no edge can connect",
                format!(
                    "kubectl -n {namespace} get pods -L prepull.kubeedge.io/leader: the leader's is to have the label, and to be \
                         ready"
                ),
            ),
            1 => Point::good("the Service cloudcore-prepull leads to one pod"),
            more => Point::bad(
                format!("the Service cloudcore-prepull leads to {more} pods, and only one is the leader"),
                "its selector is to have prepull.kubeedge.io/leader: \"true\" (manifests/cloudcore-prepull/service.yaml)",
            ),
        },
    }
}

fn ca_point(facts: &ClusterFacts, now: Timestamp) -> Point {
    let namespace = &facts.namespace;
    let pem = match &facts.ca {
        Err(error) => return Point::open(format!("the CA of the edges is not known: {error}")),
        Ok(None) => {
            return Point::bad(
                format!("namespace {namespace} has no CA of the edges, ConfigMap prepull-ca"),
                "cloudcore-prepull publishes it when it leads first",
            );
        }
        Ok(Some(pem)) => pem,
    };
    // The first one signs.
    let end = Pem::iter_from_buffer(pem.as_bytes()).next().and_then(|pem| {
        let pem = pem.ok()?;
        let not_after = pem.parse_x509().ok()?.validity().not_after.timestamp();
        Timestamp::from_second(not_after).ok()
    });
    let rotate = "cloudcore-prepull ca rotate (docs/operations/certificates.md)";
    match end {
        None => Point::bad("the CA in the ConfigMap prepull-ca is no certificate", rotate),
        Some(end) if end <= now => Point::bad(
            format!("the CA of the edges ended {} ago", format_duration(seconds_between(end, now))),
            rotate,
        ),
        Some(end) if end.duration_since(now) < ROTATE => Point::bad(
            format!("the CA of the edges ends in {}", format_duration(seconds_between(now, end))),
            rotate,
        ),
        Some(end) => Point::good(format!("the CA of the edges is good until {}", end.strftime("%Y-%m-%d"))),
    }
}
