//! Compares the results of the demo with the expectations. Only this decides its exit status.

use std::collections::BTreeMap;

use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, Tristate};
use prepull_e2e::jobs::StatusExt;
use prepull_e2e::registry::Registry;

use super::scenario::{
    CLOUD_NODE, HANGZHOU_USER, HARBOR, HARBOR_USER, MAIN, NODES, OFFLINE_NODE, SECOND, registry_for,
};
use super::stage::DemoStage;
use super::story::Story;

/// Expectations, each with whether it was met.
#[derive(Default)]
pub(super) struct DemoVerdict(Vec<(bool, String)>);

impl DemoVerdict {
    pub(super) fn add_expectation(&mut self, met: bool, what: impl Into<String>) {
        self.0.push((met, what.into()));
    }

    /// Whether there are expectations and all of them were met.
    pub(super) fn is_good(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|(met, _)| *met)
    }

    pub(super) fn print(&self, story: &Story) {
        story.begin_step("What was expected");
        for (met, what) in &self.0 {
            story.print_check(*met, what);
        }
        let met = self.0.iter().filter(|(met, _)| *met).count();
        let seconds = story.elapsed().as_secs_f64();
        let words =
            if self.is_good() { "The demo went as expected" } else { "The demo did NOT go as expected" };
        story.print_note(&story.bold(&format!("{words}: {met} of {} in {seconds:.0} s.", self.0.len())));
    }

    /// Checks the status of the first job.
    pub(super) fn check_main_job(&mut self, stage: &DemoStage, status: &ImagePrePullJobStatus) {
        let summary = &status.summary;
        self.add_expectation(
            status.phase == JobPhase::Completed
                && (summary.desired, summary.successful, summary.failure) == (3, 3, 0),
            format!("{} is Completed on three of three nodes", MAIN.name),
        );
        let skipped = [(CLOUD_NODE, "not an edge node"), (OFFLINE_NODE, "NotReady")];
        let reasons = skipped
            .iter()
            .all(|(node, reason)| status.skipped(node).is_some_and(|said| said.contains(reason)));
        self.add_expectation(
            summary.skipped == 2 && reasons,
            format!("{CLOUD_NODE} and {OFFLINE_NODE} are left out, each with its reason"),
        );
        for (node, _) in NODES {
            let good = MAIN.images.iter().all(|(registry, path)| {
                let pulled = format!("{}/{path}", registry_for(node, registry));
                status.image(node, &format!("{registry}/{path}")).is_some_and(|image| {
                    image.status == Tristate::True
                        && image.pulled_image == pulled
                        && image.digest.as_deref() == Some(stage.image_digest(path))
                })
            });
            let from = if registry_for(node, HARBOR) == HARBOR {
                "both registries"
            } else {
                "hangzhou.example only"
            };
            self.add_expectation(
                good,
                format!("the status of {node} has four images from {from}, with their digests"),
            );
        }
    }

    /// Checks the images of a node.
    pub(super) fn check_node(&mut self, stage: &DemoStage, node: &str, images: &BTreeMap<String, String>) {
        let expected = MAIN.images.iter().map(|(registry, path)| {
            (format!("{}/{path}", registry_for(node, registry)), stage.image_digest(path).to_owned())
        });
        let expected: BTreeMap<_, _> = expected.collect();
        self.add_expectation(
            *images == expected,
            format!("the containerd of {node} has these four images and no other"),
        );
    }

    /// Checks the users that the registries have served.
    pub(super) fn check_registries(&mut self, stage: &DemoStage) {
        let only = |registry: &Registry, user: &str| {
            let fetches = registry.requests().blob_fetches();
            !fetches.is_empty() && fetches.0.iter().all(|fetch| fetch.user == user)
        };
        self.add_expectation(
            only(&stage.harbor, HARBOR_USER) && only(&stage.hangzhou, HANGZHOU_USER),
            "each registry has served its own user and no other",
        );
    }

    /// Checks the status of the second job.
    pub(super) fn check_second_job(
        &mut self,
        stage: &DemoStage,
        status: &ImagePrePullJobStatus,
        images: &BTreeMap<String, String>,
    ) {
        let node = SECOND.nodes[0];
        let [bad, good @ ..] = SECOND.images else {
            return self.add_expectation(false, "the second job has images");
        };
        let name = |(registry, path): &(&str, &str)| format!("{registry}/{path}");
        let failed = status.image(node, &name(bad));
        self.add_expectation(
            failed.is_some_and(|image| {
                image.status == Tristate::False
                    && image.reason.contains("401")
                    && !images.contains_key(&name(bad))
            }),
            format!("{} failed for its wrong password, with the registry's 401 as the reason", bad.1),
        );
        let others = good.iter().all(|image| {
            status.image(node, &name(image)).is_some_and(|status| status.status == Tristate::True)
                && images.get(&name(image)).is_some_and(|digest| digest == stage.image_digest(image.1))
        });
        self.add_expectation(others, "the two other images of that job are there");
        let phase = status.node(node).map(|node| node.phase);
        self.add_expectation(
            status.phase == JobPhase::Failure && phase == Some(NodePhase::Failure),
            format!("{} is a Failure, as is {node}: one of one node is more than a tenth", SECOND.name),
        );
    }
}
