//! The person's own rights, as the API server answers for them (SelfSubjectAccessReview, which everybody may ask).

use futures::future::join_all;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use prepull_api::crd::GROUP;
use prepull_api::edges::SERVICE;

use crate::cluster::Cluster;

pub(crate) struct Right {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    subresource: &'static str,
    name: &'static str,
    place: Where,
    pub(crate) commands: &'static str,
    pub(crate) is_look: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Cluster,
    System,
}

const fn of_jobs(verb: &'static str, commands: &'static str, is_look: bool) -> Right {
    let (resource, subresource, name) = ("imageprepulljobs", "", "");
    Right { verb, group: GROUP, resource, subresource, name, place: Where::Cluster, commands, is_look }
}

const fn of_cluster(
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    commands: &'static str,
) -> Right {
    Right { verb, group, resource, subresource: "", name: "", place: Where::Cluster, commands, is_look: true }
}

pub(crate) const CHANGE: Right =
    of_jobs("patch", "set, retry, verify, suspend, pause, resume, cancel", false);

static RIGHTS: [Right; 9] = [
    of_jobs("get", "status, failures, why", true),
    of_jobs("list", "list, status --watch, why", true),
    of_jobs("watch", "status --watch", true),
    of_cluster("list", GROUP, "imageprepullreports", "status, failures, why"),
    of_cluster("get", "", "nodes", "why"),
    of_cluster("list", "", "events", "events"),
    Right {
        verb: "get",
        group: "",
        resource: "services",
        subresource: "proxy",
        name: SERVICE,
        place: Where::System,
        commands: "nodes, why",
        is_look: true,
    },
    of_jobs("create", "run, from, remove, upgrade", false),
    CHANGE,
];

#[cfg(test)]
pub(crate) fn all() -> impl Iterator<Item = &'static Right> {
    RIGHTS.iter()
}

impl Right {
    /// Whether it is the one to read the list of the edges.
    pub(crate) fn is_of_edges(&self) -> bool {
        self.name == SERVICE
    }

    pub(crate) fn text(&self, namespace: &str) -> String {
        let Self { verb, group, resource, subresource, .. } = self;
        let subresource = if subresource.is_empty() { String::new() } else { format!("/{subresource}") };
        let group = if group.is_empty() { String::new() } else { format!(".{group}") };
        let place = match self.place {
            Where::Cluster => "in the whole cluster".to_owned(),
            Where::System => format!("of {SERVICE} in namespace {namespace}"),
        };
        format!("to {verb} {resource}{subresource}{group} {place}")
    }

    fn review(&self, namespace: &str) -> SelfSubjectAccessReview {
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let attributes = ResourceAttributes {
            verb: text(self.verb),
            group: text(self.group),
            resource: text(self.resource),
            subresource: text(self.subresource),
            name: text(self.name),
            namespace: (self.place == Where::System).then(|| namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() }
    }
}

pub(crate) async fn missing_rights(cluster: &Cluster) -> anyhow::Result<Vec<&'static Right>> {
    let answers = join_all(RIGHTS.iter().map(|right| has_right(cluster, right))).await;
    let mut missing = Vec::new();
    for (right, has) in RIGHTS.iter().zip(answers) {
        if !has? {
            missing.push(right);
        }
    }
    Ok(missing)
}

pub(crate) async fn has_right(cluster: &Cluster, right: &Right) -> anyhow::Result<bool> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(cluster.client());
    let answer = reviews.create(&PostParams::default(), &right.review(cluster.system_namespace())).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_named_as_in_rbac() {
        let texts: Vec<_> = RIGHTS.iter().map(|right| right.text("prepull-system")).collect();
        assert_eq!(texts[0], "to get imageprepulljobs.operations.kubeedge.io in the whole cluster");
        assert_eq!(texts[4], "to get nodes in the whole cluster");
        assert_eq!(texts[6], "to get services/proxy of cloudcore-prepull-edges in namespace prepull-system");
    }
}
