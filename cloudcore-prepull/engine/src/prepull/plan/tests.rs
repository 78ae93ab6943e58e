#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::needless_pass_by_value)] // json!(…) reads better without a & before it

use std::collections::HashSet;
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use prepull_api::credentials::{RegistryCredential, SecretUser};
use prepull_api::image::Reference;
use prepull_api::wire::{MAX_REASON, PullKey};
use serde_json::{Value, json};

use super::*;
use crate::fleet::node_view::NodeView;
use crate::prepull::validate::validate;

fn job(spec: Value) -> ValidatedJob {
    let job = json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2",
        "kind": "ImagePrePullJob",
        "metadata": {"name": "job"},
        "spec": spec,
    });
    validate(&serde_json::from_value(job).unwrap()).unwrap_or_else(|refusal| panic!("{refusal}"))
}

fn overrider(label: &str, images: &[[&str; 3]], secrets: &[[&str; 3]]) -> Value {
    let rules = |rules: &[[&str; 3]]| -> Value {
        rules.iter().map(|[c, o, v]| json!({"component": c, "operator": o, "value": v})).collect()
    };
    json!({"imagePrePullOverrider": {"nodeLabel": label, "overriders": {
        "imageOverriders": rules(images), "secretOverriders": rules(secrets),
    }}})
}

fn edge(name: &str, labels: &[(&str, &str)]) -> (NodeName, NodeView) {
    let mut labels: BTreeMap<_, _> =
        labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    labels.insert(EDGE_LABEL.to_owned(), String::new());
    (name.into(), NodeView { name: name.into(), labels, ready: true })
}

fn not_ready((name, node): (NodeName, NodeView)) -> (NodeName, NodeView) {
    (name, NodeView { ready: false, ..node })
}

fn cloud((name, mut node): (NodeName, NodeView)) -> (NodeName, NodeView) {
    node.labels.remove(EDGE_LABEL);
    (name, node)
}

/// `image -> pull [secrets] policy` of each image of a node.
fn lines(plan: &NodePlan) -> Vec<String> {
    plan.images
        .iter()
        .map(|PlannedImage { image, name: _, pull, policy, secrets }| {
            let secrets: Vec<_> = secrets.iter().map(SecretRef::to_string).collect();
            format!("{image} -> {pull} [{}] {policy}", secrets.join(","))
        })
        .collect()
}

fn on_edge(spec: Value, labels: &[(&str, &str)]) -> Result<Vec<String>, String> {
    let mut spec = spec;
    spec["imagePrePullTemplate"]["nodeNames"] = json!(["edge"]);
    plan_job(&job(spec), &BTreeMap::from([edge("edge", labels)]))
        .map(|plan| lines(&plan.nodes[0].1))
        .map_err(|refusal| refusal.to_string())
}

#[test]
fn a_node_view_keeps_what_matters() {
    let node = |object: Value| NodeView::from_node(&serde_json::from_value(object).unwrap());
    let view = node(json!({
        "metadata": {"name": "edge-1", "labels": {EDGE_LABEL: "", "a": "b"}},
        "status": {"conditions": [
            {"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"},
        ]},
    }));
    assert_eq!((view.clone(), view.is_edge()), (edge("edge-1", &[("a", "b")]).1, true));
    for status in [json!({}), json!({"conditions": [{"type": "Ready", "status": "Unknown"}]})] {
        let view = node(json!({"metadata": {"name": "n", "labels": {EDGE_LABEL: "x"}}, "status": status}));
        assert!(!view.ready && view.is_edge());
    }
}

#[test]
fn named_nodes_keep_their_order_without_duplicates() {
    let job = job(json!({"imagePrePullTemplate": {
        "images": ["nginx"], "nodeNames": ["edge-2", "ghost", "cloud-1", "edge-2", "edge-1", "edge-3", "ghost"],
    }}));
    let nodes = BTreeMap::from([
        edge("edge-1", &[]),
        edge("edge-2", &[]),
        not_ready(edge("edge-3", &[])),
        edge("edge-4", &[]),
        cloud(not_ready(edge("cloud-1", &[]))),
    ]);
    let Selection { eligible, skipped } = select_nodes(&job, &nodes);
    assert_eq!(eligible, ["edge-2".into(), "edge-1".into()] as [NodeName; 2]);
    let skipped: Vec<_> = skipped.iter().map(|n| (n.node_name.as_str(), n.reason.as_str())).collect();
    assert_eq!(skipped, [("ghost", "not found"), ("cloud-1", "not an edge node"), ("edge-3", "NotReady")]);
}

#[test]
fn labelled_nodes_are_sorted_by_name() {
    let job = job(json!({"imagePrePullTemplate": {
        "images": ["nginx"], "labelSelector": {"matchLabels": {"region": "x"}},
    }}));
    let nodes = BTreeMap::from([
        edge("b", &[("region", "x")]),
        edge("a", &[("region", "x")]),
        edge("other", &[("region", "y")]),
        cloud(edge("cloud", &[("region", "x")])),
        not_ready(edge("away", &[("region", "x")])),
    ]);
    let JobPlan { nodes, skipped } = plan_job(&job, &nodes).unwrap();
    let names: Vec<_> = nodes.iter().map(|(name, _)| name.as_str()).collect();
    let skipped: Vec<_> = skipped.iter().map(|n| (n.node_name.as_str(), n.reason.as_str())).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(skipped, [("away", "NotReady"), ("cloud", "not an edge node")]);
}

#[test]
fn without_eligible_nodes_the_job_is_refused() {
    let by_name =
        |names: &[&str]| job(json!({"imagePrePullTemplate": {"images": ["nginx"], "nodeNames": names}}));
    let nodes = BTreeMap::from([cloud(edge("cloud-1", &[]))]);
    assert_eq!(
        plan_job(&by_name(&["cloud-1", "a", "b", "c", "d"]), &nodes).unwrap_err().to_string(),
        "spec.imagePrePullTemplate.nodeNames: no node is eligible: cloud-1 is not an edge node, a is not found, b is \
         not found, 2 more (a node needs the label node-role.kubernetes.io/edge and must be Ready)"
    );
    let of_three = plan_job(&by_name(&["a", "b", "c"]), &nodes).unwrap_err().to_string();
    assert!(of_three.contains("b is not found, c is not found (a node needs"), "{of_three}");
    let by_label = job(json!({"imagePrePullTemplate": {
        "images": ["nginx"], "labelSelector": {"matchLabels": {"region": "x"}},
    }}));
    assert_eq!(
        plan_job(&by_label, &nodes).unwrap_err().to_string(),
        "spec.imagePrePullTemplate.labelSelector: no node matches: check the labels of the edge nodes"
    );
}

#[test]
fn the_seeds_sample_plans_as_documented() {
    let spec = json!({
        "imagePrePullTemplate": {"imageSources": [{
            "name": "image1", "registry": "harbor.docker.hub", "repository": "jili/example", "tag": "v1.0.0",
            "imageSecret": "default/secret",
        }]},
        "imagePrePullOverriders": [overrider(
            "labelexample",
            &[["Registry", "replace", "hangzhou.registry.io"]],
            &[["SecretName", "replace", "hangzhou-secret"]],
        )],
    });
    assert_eq!(
        on_edge(spec.clone(), &[("labelexample", "")]).unwrap(),
        ["harbor.docker.hub/jili/example:v1.0.0 -> hangzhou.registry.io/jili/example:v1.0.0 \
          [default/hangzhou-secret] IfNotPresent"]
    );
    assert_eq!(
        on_edge(spec, &[]).unwrap(),
        ["harbor.docker.hub/jili/example:v1.0.0 -> harbor.docker.hub/jili/example:v1.0.0 [default/secret] \
          IfNotPresent"]
    );
}

#[test]
fn overriders_apply_in_order_before_normalising() {
    let spec = json!({
        "imagePrePullTemplate": {"images": ["nginx:1.25"]},
        "imagePrePullOverriders": [
            overrider("region=x", &[["Registry", "replace", "r.io"], ["Registry", "add", ":5000"]], &[]),
            overrider("!region", &[["Registry", "replace", "never.io"]], &[]),
            overrider("gpu", &[["Repository", "add", "-cuda"]], &[]),
            overrider("region in (x)", &[["Tag", "add", "-x"]], &[]),
        ],
    });
    for (labels, pull) in [
        (vec![], "never.io/nginx:1.25"),
        (vec![("region", "y")], "docker.io/library/nginx:1.25"),
        (vec![("region", "x")], "r.io:5000/nginx:1.25-x"),
        (vec![("region", "x"), ("gpu", "")], "r.io:5000/nginx-cuda:1.25-x"),
    ] {
        assert_eq!(
            on_edge(spec.clone(), &labels).unwrap(),
            [format!("nginx:1.25 -> {pull} [] IfNotPresent")],
            "{labels:?}"
        );
    }
}

#[test]
fn policy_precedence_is_image_template_reference() {
    let spec = |template: Value| {
        json!({
            "imagePrePullTemplate": template,
            "imagePrePullOverriders": [overrider("", &[["Tag", "replace", "latest"]], &[])],
        })
    };
    let images =
        json!({"images": ["a:1"], "imageSources": [{"repository": "b", "imagePullPolicy": "Never"}]});
    let mut with_default = images.clone();
    with_default["imagePullPolicy"] = json!("IfNotPresent");
    assert_eq!(
        on_edge(spec(images), &[]).unwrap(),
        ["a:1 -> docker.io/library/a:latest [] Always", "b -> docker.io/library/b:latest [] Never"]
    );
    assert_eq!(
        on_edge(spec(with_default), &[]).unwrap(),
        ["a:1 -> docker.io/library/a:latest [] IfNotPresent", "b -> docker.io/library/b:latest [] Never"]
    );
}

#[test]
fn secret_precedence_is_image_match_fallback() {
    let template = json!({
        "images": ["r.io/team/app:1", "r.io/other:1", "q.io/app:1", "nginx:1"],
        "imageSources": [{"registry": "r.io", "repository": "team/own", "tag": "1", "imageSecret": "own/own"}],
        "registrySecrets": [
            {"registry": "*.io", "imageSecret": "reg/wild"},
            {"registry": "r.io", "imageSecret": "reg/host"},
            {"registry": "r.io/team", "imageSecret": "reg/team"},
            {"registry": "r.io", "imageSecret": "reg/late"},
            {"registry": "*.example", "imageSecret": "reg/unused"},
        ],
        "imageSecrets": "default/fallback",
    });
    let mut to_example = template.clone();
    to_example["registrySecrets"] = json!([{"registry": "s.example", "imageSecret": "reg/overridden"}]);
    assert_eq!(
        on_edge(json!({"imagePrePullTemplate": template}), &[]).unwrap(),
        [
            "r.io/team/app:1 -> r.io/team/app:1 [reg/team] IfNotPresent",
            "r.io/other:1 -> r.io/other:1 [reg/host] IfNotPresent",
            "q.io/app:1 -> q.io/app:1 [reg/wild] IfNotPresent",
            "nginx:1 -> docker.io/library/nginx:1 [reg/wild] IfNotPresent",
            "r.io/team/own:1 -> r.io/team/own:1 [own/own] IfNotPresent",
        ]
    );
    to_example["images"] = json!(["q.io/app:1", "t.io/app:1"]);
    let spec = json!({
        "imagePrePullTemplate": to_example,
        "imagePrePullOverriders": [
            overrider("", &[["Registry", "replace", "s.example"]], &[["SecretName", "add", "more"]]),
        ],
    });
    assert_eq!(
        on_edge(spec, &[]).unwrap(),
        [
            "q.io/app:1 -> s.example/app:1 [reg/overridden,reg/more] IfNotPresent",
            // The same reference now: both entries stay, and the runtime fetches nothing twice.
            "t.io/app:1 -> s.example/app:1 [reg/overridden,reg/more] IfNotPresent",
            "r.io/team/own:1 -> s.example/team/own:1 [own/own,own/more] IfNotPresent",
        ]
    );
}

#[test]
fn docker_hubs_legacy_key_serves_its_images() {
    for key in ["https://index.docker.io/v1/", "index.docker.io/v1/", "index.docker.io", "docker.io"] {
        let template = json!({
            "images": ["nginx:1", "foo/bar:1", "docker.io/team/app:1", "index.docker.io/team/app:2", "r.io/app:1"],
            "registrySecrets": [{"registry": key, "imageSecret": "reg/hub"}],
        });
        assert_eq!(
            on_edge(json!({"imagePrePullTemplate": template}), &[]).unwrap(),
            [
                "nginx:1 -> docker.io/library/nginx:1 [reg/hub] IfNotPresent",
                "foo/bar:1 -> docker.io/foo/bar:1 [reg/hub] IfNotPresent",
                "docker.io/team/app:1 -> docker.io/team/app:1 [reg/hub] IfNotPresent",
                "index.docker.io/team/app:2 -> docker.io/team/app:2 [reg/hub] IfNotPresent",
                "r.io/app:1 -> r.io/app:1 [] IfNotPresent",
            ],
            "{key}"
        );
    }
    // As within a secret, the legacy key counts only if nothing else matches.
    let template = json!({
        "images": ["nginx:1", "team/app:1"],
        "registrySecrets": [
            {"registry": "https://index.docker.io/v1/", "imageSecret": "reg/hub"},
            {"registry": "docker.io/team", "imageSecret": "reg/team"},
        ],
    });
    assert_eq!(
        on_edge(json!({"imagePrePullTemplate": template}), &[]).unwrap(),
        [
            "nginx:1 -> docker.io/library/nginx:1 [reg/hub] IfNotPresent",
            "team/app:1 -> docker.io/team/app:1 [reg/team] IfNotPresent",
        ]
    );
}

#[test]
fn secrets_of_every_matching_overrider_apply() {
    let spec = json!({
        "imagePrePullTemplate": {"images": ["app:1"], "imageSecrets": "a/b"},
        "imagePrePullOverriders": [
            overrider("x", &[], &[["SecretName", "remove", ""]]),
            overrider("y", &[], &[["SecretName", "add", "c/d"]]),
        ],
    });
    for (labels, secrets) in [
        (vec![], "a/b"),
        (vec![("x", "")], ""),
        (vec![("y", "")], "a/b,c/d"),
        (vec![("x", ""), ("y", "")], "c/d"),
    ] {
        let line = format!("app:1 -> docker.io/library/app:1 [{secrets}] IfNotPresent");
        assert_eq!(on_edge(spec.clone(), &labels).unwrap(), [line]);
    }
}

#[test]
fn an_override_without_a_reference_is_refused() {
    let spec = json!({
        "imagePrePullTemplate": {"images": ["nginx", "app"]},
        "imagePrePullOverriders": [
            overrider("other", &[["Repository", "replace", "Never"]], &[]),
            overrider("region=x", &[["Registry", "replace", "r.io"], ["Tag", "add", "-x"]], &[]),
        ],
    });
    assert_eq!(
        on_edge(spec, &[("region", "x")]).unwrap_err(),
        "spec.imagePrePullOverriders[1].imagePrePullOverrider.overriders.imageOverriders[1]: for nodes with \
         \"region=x\", image \"nginx\": Tag add \"-x\" makes \"r.io/nginx:-x\" of r.io/nginx, which is no image \
         reference: tag \"-x\" in image \"r.io/nginx:-x\" is malformed: it takes at most 128 letters, digits, _ . and \
         -, and begins with none of . and -"
    );
    let spec = json!({
        "imagePrePullTemplate": {"images": ["nginx"]},
        "imagePrePullOverriders": [overrider("region", &[], &[["SecretName", "add", "s"]])],
    });
    assert_eq!(
        on_edge(spec, &[("region", "x")]).unwrap_err(),
        "spec.imagePrePullOverriders[0].imagePrePullOverrider.overriders.secretOverriders[0]: for nodes with \
         \"region\", image \"nginx\": SecretName add \"s\" gives no namespace, and the image has no secret to take it \
         from: write {namespace}/{name}"
    );
}

#[test]
fn ten_thousand_nodes_share_few_plans() {
    let names: Vec<_> = (0..10_000).map(|i| format!("edge-{i}")).collect();
    let images: Vec<_> = (0..50).map(|i| format!("r.io/app-{i}:1")).collect();
    let job = job(json!({
        "imagePrePullTemplate": {"images": images, "nodeNames": names},
        "imagePrePullOverriders": (0..10)
            .map(|i| overrider(&format!("region=r{i}"), &[["Registry", "replace", "s.io"]], &[]))
            .collect::<Vec<_>>(),
    }));
    let nodes: BTreeMap<_, _> = names
        .iter()
        .enumerate()
        .map(|(i, name)| edge(name, &[("region", &format!("r{}", i % 10)), ("n", &i.to_string())]))
        .collect();
    #[expect(clippy::disallowed_methods, reason = "measures how long planning takes")]
    let start = Instant::now();
    let plan = plan_job(&job, &nodes).unwrap();
    let took = start.elapsed();
    let distinct: HashSet<_> = plan.nodes.iter().map(|(_, plan)| Arc::as_ptr(plan)).collect();
    assert_eq!((plan.nodes.len(), distinct.len()), (10_000, 10));
    // Some 20 ms in a debug build. A plan for each node would take seconds.
    assert!(took.as_millis() < 1000, "{took:?}");
}

#[test]
fn nodes_are_looked_up() {
    let names: Vec<_> = (0..50_000).map(|i| format!("edge-{i}")).collect();
    let job = job(json!({"imagePrePullTemplate": {"images": ["app:1"], "nodeNames": names}}));
    let (_, other) = edge("other-12345", &[]);
    #[expect(clippy::disallowed_methods, reason = "measures how long the look-ups take")]
    let start = Instant::now();
    let chosen = (0..50_000).filter(|_| chooses_node(&job, &other)).count();
    let took = start.elapsed();
    assert_eq!(chosen, 0);
    // A search of the whole list for each node would take many seconds.
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn readiness_does_not_change_a_nodes_plan() {
    let job = job(json!({
        "imagePrePullTemplate": {"images": ["nginx:1"], "nodeNames": ["edge"]},
        "imagePrePullOverriders": [overrider("a", &[["Registry", "replace", "r.io"]], &[])],
    }));
    let (name, node) = edge("edge", &[("a", "")]);
    let whole = plan_job(&job, &BTreeMap::from([(name.clone(), node.clone())])).unwrap();
    assert_eq!(plan_one(&job, &node).unwrap(), whole.nodes[0].1);
    assert_eq!(plan_one(&job, &not_ready((name, node)).1).unwrap(), whole.nodes[0].1);
}

#[test]
fn recorded_images_beat_current_overriders() {
    let job = job(json!({
        "imagePrePullTemplate": {"images": ["app:1", "db:1"], "nodeNames": ["edge"]},
        "imagePrePullOverriders": [
            overrider("a", &[["Registry", "replace", "r.io"]], &[["SecretName", "add", "s/r"]]),
            overrider("b", &[["Registry", "replace", "q.io"]], &[["SecretName", "add", "s/q"]]),
        ],
    }));
    let present = plan_one(&job, &edge("edge", &[("a", "")]).1).unwrap();
    for (recorded, expected) in [
        (["q.io/app:1", "q.io/db:1"], ["q.io/app:1 [s/q]", "q.io/db:1 [s/q]"]),
        (
            ["docker.io/library/app:1", "docker.io/library/db:1"],
            ["docker.io/library/app:1 []", "docker.io/library/db:1 []"],
        ),
        // No overrider makes these any more, and the second one is no reference.
        (["old.io/app:1", "?"], ["old.io/app:1 [s/r]", "r.io/db:1 [s/r]"]),
    ] {
        let images = recorded
            .map(|pulled| JobImageStatus { pulled_image: pulled.to_owned(), ..JobImageStatus::default() });
        let plan = SharedPlans::default().plan_as_recorded(&job, &present, &images);
        let [app, db] = expected;
        assert_eq!(
            lines(&plan),
            [format!("app:1 -> {app} IfNotPresent"), format!("db:1 -> {db} IfNotPresent")]
        );
    }
}

mod key {
    use super::*;

    #[test]
    fn secret_objects_parse_as_in_kubernetes() {
        let config = |user: &str| json!({"auths": {"r.io": {"username": user, "password": "p"}}}).to_string();
        let key = ".dockerconfigjson".to_owned();
        let mut secret = Secret {
            type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
            data: Some([(key.clone(), ByteString(config("data").into_bytes()))].into()),
            string_data: Some([(key, config("text"))].into()),
            ..Secret::default()
        };
        let allow = ("prepull.kubeedge.io/allow".to_owned(), "release".to_owned());
        secret.metadata.annotations = Some([allow].into());
        let lookup = SecretLookup::from_secret(&secret);
        let is_allowed = |lookup: &SecretLookup| {
            ["release", "other"].map(|job| lookup.is_allowed_to(SecretUser::Job(job)))
        };
        assert_eq!(is_allowed(&lookup), [true, false]);
        assert_eq!(is_allowed(&SecretLookup::Missing), [false, false]);
        assert_eq!(users(&[lookup]), ["text"]);
        secret.string_data = None;
        assert_eq!(users(&[SecretLookup::from_secret(&secret)]), ["data"]);
        secret.type_ = None;
        let reason = reason(&[SecretLookup::from_secret(&secret)]);
        assert!(reason.starts_with("secret s/0: type \"Opaque\" holds no registry credentials"), "{reason}");
    }

    fn found(auths: &Value) -> SecretLookup {
        let data = json!({ "auths": auths }).to_string().into_bytes();
        SecretLookup::found(
            "kubernetes.io/dockerconfigjson",
            &BTreeMap::from([(".dockerconfigjson".to_owned(), data)]),
            &BTreeMap::new(),
        )
    }

    /// The key for r.io/app, where the secrets in the order given are named s/0, s/1 and so on.
    fn key(lookups: &[SecretLookup]) -> PullKey {
        let names: Vec<_> =
            (0..lookups.len()).map(|i| SecretRef::new("s", &i.to_string()).unwrap()).collect();
        let reference = Reference::parse("r.io/app").unwrap().normalized();
        let lookup = |secret: &SecretRef| lookups[secret.name().parse::<usize>().unwrap()].clone();
        resolve_key(&names, &reference, None, lookup).key
    }

    #[test]
    fn useless_pull_secrets_are_passed_over() {
        let secrets = ["s/0", "s/1"].map(|name| SecretRef::parse(name).unwrap());
        let reference = Reference::parse("r.io/app").unwrap().normalized();
        let good = found(&json!({"r.io": {"auth": "dTpw"}}));
        let key = |second: &SecretLookup| {
            let lookup = |secret: &SecretRef| match secret.name() {
                "0" => SecretLookup::Missing,
                _ => second.clone(),
            };
            resolve_pull_secrets(&secrets, &reference, |_| None, lookup).key
        };
        assert!(matches!(key(&good), PullKey::Credentials { credentials } if credentials.len() == 1));
        let note = "secret s/0 does not exist; secret s/1 has no entry for r.io/app";
        assert_eq!(key(&found(&json!({}))), PullKey::Anonymous { note: note.to_owned() });
    }

    fn reason(lookups: &[SecretLookup]) -> String {
        match key(lookups) {
            PullKey::Unavailable { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    fn users(lookups: &[SecretLookup]) -> Vec<String> {
        match key(lookups) {
            PullKey::Credentials { credentials } => {
                credentials.iter().map(|c: &RegistryCredential| c.username.expose().to_owned()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_images_without_secrets_pull_anonymously() {
        assert_eq!(key(&[]), PullKey::anonymous());
        for (lookup, message) in [
            (SecretLookup::Missing, "secret s/0 does not exist"),
            (SecretLookup::Forbidden("no".to_owned()), "secret s/0 may not be read by cloudcore-prepull: no"),
            (SecretLookup::Error("timeout".to_owned()), "secret s/0 could not be read: timeout"),
            (
                SecretLookup::found("Opaque", &BTreeMap::new(), &BTreeMap::new()),
                "secret s/0: type \"Opaque\" holds no registry credentials: it must be kubernetes.io/dockerconfigjson \
                 or kubernetes.io/dockercfg (kubectl create secret docker-registry makes one)",
            ),
            (
                found(&json!({"a.io": {"auth": "dTpw"}, "b.io": {"auth": "dTpw"}})),
                "secret s/0 has no entry for r.io/app",
            ),
            (found(&json!({})), "secret s/0 has no entry for r.io/app"),
            (
                found(&json!({"r.io": {"auth": "*"}})),
                "secret s/0: the entry for r.io has an auth that is not base64",
            ),
        ] {
            assert_eq!(reason(&[lookup]), message);
        }
    }

    #[test]
    fn usable_secrets_are_tried_in_order() {
        let one = found(&json!({"r.io": {"username": "one", "password": "p"}}));
        let two = found(&json!({
            "*.io": {"username": "wide", "password": "p"}, "r.io/app": {"username": "two", "password": "p"},
        }));
        assert_eq!(users(&[one.clone(), two.clone()]), ["one", "two", "wide"]);
        assert_eq!(users(&[two.clone(), one.clone(), two]), ["two", "wide", "one"]);
        assert_eq!(users(&[SecretLookup::Missing, one]), ["one"]);
        assert_eq!(
            reason(&[SecretLookup::Missing, SecretLookup::Error("x".to_owned())]),
            "secret s/0 does not exist; secret s/1 could not be read: x"
        );
    }

    #[test]
    fn a_reason_is_bounded() {
        let many: Vec<_> = (0..40).map(|_| SecretLookup::Forbidden("x".repeat(200))).collect();
        assert!(reason(&many).len() <= MAX_REASON);
    }

    #[test]
    fn a_secrets_registries_are_only_logged() {
        let (names, reference) = ([SecretRef::parse("s/0").unwrap()], Reference::parse("r.io/app").unwrap());
        let registries: serde_json::Map<_, _> =
            (10..25).map(|i| (format!("{i}.io"), json!({"auth": "dTpw"}))).collect();
        let wide = found(&json!({"*.io": {"auth": "*"}}));
        for (lookup, status, log) in [
            (
                found(&registries.into()),
                "secret s/0 has no entry for r.io/app",
                "secret s/0 has no entry for r.io/app; it has 10.io, 11.io, 12.io, 13.io, 14.io, 15.io, 16.io, 17.io, \
                 18.io, 19.io and 5 more",
            ),
            (
                wide,
                "secret s/0: the entry for r.io has an auth that is not base64",
                "secret s/0: the entry for *.io has an auth that is not base64",
            ),
        ] {
            let resolved = resolve_key(&names, &reference.normalized(), None, |_| lookup.clone());
            assert_eq!(resolved.key, PullKey::Unavailable { reason: status.to_owned() });
            assert_eq!(resolved.details, [log]);
        }
    }

    #[test]
    fn long_registries_are_abbreviated() {
        let long = format!("x.y/{}", "a".repeat(200_000));
        let lookup = found(&json!({ long: {"auth": "dTpw"} }));
        let (names, reference) = ([SecretRef::parse("s/0").unwrap()], Reference::parse("r.io/app").unwrap());
        let resolved = resolve_key(&names, &reference.normalized(), None, |_| lookup.clone());
        let detail = &resolved.details[0];
        assert!(detail.contains("it has x.y/aaa") && detail.len() < 1024, "{} bytes", detail.len());
    }

    #[test]
    fn debug_shows_no_credential() {
        let lookup = found(&json!({"r.io": {"username": "us3r", "password": "s3cret"}}));
        assert_eq!(format!("{lookup:?}"), "Found([\"r.io\"])");
    }
}

mod consent {
    use prepull_api::credentials::SecretUser;

    use super::*;

    const HARBOR: &str = r#"{"auths": {"harbor.example": {"username": "u", "password": "p"}}}"#;
    const WIDE: &str = r#"{"auths": {"*.example": {"username": "u", "password": "p"}}}"#;

    fn secret(type_: &str, config: &str, annotations: &[(&str, &str)]) -> SecretLookup {
        let data = BTreeMap::from([(".dockerconfigjson".to_owned(), config.as_bytes().to_vec())]);
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        SecretLookup::found(type_, &data, &annotations.collect())
    }

    fn docker(config: &str, annotations: &[(&str, &str)]) -> SecretLookup {
        secret("kubernetes.io/dockerconfigjson", config, annotations)
    }

    /// What the job `release` gets of the secret bank/harbor for an image.
    fn resolved(image: &str, lookup: &SecretLookup) -> ResolvedKey {
        let names = [SecretRef::parse("bank/harbor").unwrap()];
        let reference = Reference::parse(image).unwrap().normalized();
        resolve_key(&names, &reference, Some(SecretUser::Job("release")), |_| lookup.clone())
    }

    #[test]
    fn a_secret_without_consent_reveals_nothing() {
        let allow = |value| [("prepull.kubeedge.io/allow", value)];
        let cases = [
            (SecretLookup::Missing, "secret bank/harbor does not exist"),
            (
                docker(HARBOR, &[]),
                "secret bank/harbor: its owner has allowed no use of it: kubectl prepull allow bank/harbor \
                 release",
            ),
            (
                docker(HARBOR, &allow("payroll,night-*")),
                "secret bank/harbor: only \"payroll,night-*\" is allowed to use it: kubectl prepull allow \
                 bank/harbor release",
            ),
            (
                docker(HARBOR, &allow("*,Release")),
                "secret bank/harbor: the annotation prepull.kubeedge.io/allow has \"Release\", which is no name: write \
                 names of jobs, with * for any text, separated by commas; nodeimage/NAME for a NodeImage; or * for \
                 everybody",
            ),
            (
                secret("Opaque", HARBOR, &[]),
                "secret bank/harbor: its owner has allowed no use of it: kubectl prepull allow bank/harbor \
                 release",
            ),
            (
                docker("{", &[]),
                "secret bank/harbor: its owner has allowed no use of it: kubectl prepull allow bank/harbor \
                 release",
            ),
        ];
        for (lookup, log) in cases {
            // Also for an image that the secret could serve, and for one that it could not.
            for image in ["harbor.example/app", "other.example/app"] {
                let resolved = resolved(image, &lookup);
                let reason = "secret bank/harbor does not exist, or its owner has not allowed this use: kubectl \
                              prepull allow bank/harbor release";
                assert_eq!(resolved.key, PullKey::Unavailable { reason: reason.to_owned() }, "{lookup:?}");
                assert_eq!(resolved.details, [log]);
                assert_eq!(resolved.withheld, [SecretRef::parse("bank/harbor").unwrap()]);
            }
        }
    }

    #[test]
    fn an_allowed_secret_works_or_explains_itself() {
        for allow in ["release", "*", "a,rel*,b"] {
            let resolved =
                resolved("harbor.example/app", &docker(HARBOR, &[("prepull.kubeedge.io/allow", allow)]));
            assert!(matches!(resolved.key, PullKey::Credentials { .. }), "{allow}: {resolved:?}");
            assert!(resolved.withheld.is_empty());
        }
        let resolved = resolved(
            "harbor.example/app",
            &secret("Opaque", HARBOR, &[("prepull.kubeedge.io/allow", "release")]),
        );
        let PullKey::Unavailable { reason } = resolved.key else { panic!("{resolved:?}") };
        assert!(
            reason.starts_with("secret bank/harbor: type \"Opaque\" holds no registry credentials"),
            "{reason}"
        );
        assert!(resolved.withheld.is_empty(), "to wait for its owner would be in vain");
    }

    #[test]
    fn a_wildcard_serves_only_consented_hosts() {
        let (allow, hosts) = ("prepull.kubeedge.io/allow", "prepull.kubeedge.io/allow-hosts");
        let none = docker(WIDE, &[(allow, "*")]);
        let one = docker(WIDE, &[(allow, "*"), (hosts, "harbor.example")]);
        let all = docker(WIDE, &[(allow, "*"), (hosts, "*.example")]);
        let bad = docker(WIDE, &[(allow, "*"), (hosts, "harbor.example, %")]);
        let gets = |image: &str, lookup: &SecretLookup| {
            matches!(resolved(image, lookup).key, PullKey::Credentials { .. })
        };
        let (harbor, evil) = ("harbor.example/app", "evil.example/app");
        for (lookup, is_harbor, is_evil) in
            [(&none, false, false), (&one, true, false), (&all, true, true), (&bad, false, false)]
        {
            assert_eq!((gets(harbor, lookup), gets(evil, lookup)), (is_harbor, is_evil), "{lookup:?}");
        }
        // Trying out hosts doesn't reveal whether a wildcard would match.
        let reason = |image: &str| match resolved(image, &none).key {
            PullKey::Unavailable { reason } => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            reason(harbor),
            "secret bank/harbor has no entry for harbor.example/app; one with * in its host serves only the hosts in its \
             annotation prepull.kubeedge.io/allow-hosts"
        );
        assert_eq!(
            reason(harbor),
            reason("harbor.elsewhere/app").replace("harbor.elsewhere", "harbor.example")
        );
        assert_eq!(
            resolved(harbor, &none).details,
            [
                "secret bank/harbor has no entry for harbor.example/app; it has *.example; entries with * serve only the hosts \
              that its owner names: kubectl prepull allow bank/harbor --host harbor.example"
            ]
        );
        assert!(resolved("harbor.elsewhere/app", &none).details[0].ends_with("it has *.example"));
        assert!(resolved(harbor, &bad).details[0].contains("allow-hosts has \"%\", which is no registry"));
        // An entry that names its host is not concerned.
        let exact = docker(HARBOR, &[(allow, "*"), (hosts, "%")]);
        assert!(gets(harbor, &exact));
    }

    #[test]
    fn each_secret_needs_its_owners_consent() {
        let names = ["bank/harbor", "shop/harbor"].map(|name| SecretRef::parse(name).unwrap());
        let reference = Reference::parse("harbor.example/app").unwrap().normalized();
        let allowed = docker(
            r#"{"auths": {"harbor.example": {"username": "shop", "password": "p"}}}"#,
            &[("prepull.kubeedge.io/allow", "release")],
        );
        let lookup = |secret: &SecretRef| match secret.namespace() {
            "bank" => docker(HARBOR, &[]),
            _ => allowed.clone(),
        };
        let resolved = resolve_key(&names, &reference, Some(SecretUser::Job("release")), lookup);
        let PullKey::Credentials { credentials } = resolved.key else { panic!("{resolved:?}") };
        let users: Vec<_> = credentials.iter().map(|credential| credential.username.expose()).collect();
        assert_eq!(
            (users, resolved.withheld),
            (vec!["shop"], Vec::new()),
            "nothing is waited for that is not needed"
        );
        // Of a NodeImage, those of the jobs that it is pulled for need none.
        let user =
            |secret: &SecretRef| (secret.namespace() != "bank").then_some(SecretUser::NodeImage("edge-1"));
        let resolved = resolve_pull_secrets(&names, &reference, user, lookup);
        let PullKey::Credentials { credentials } = resolved.key else { panic!("{resolved:?}") };
        let users: Vec<_> = credentials.iter().map(|credential| credential.username.expose()).collect();
        assert_eq!(users, ["u"], "shop/harbor allows the job release, and not this NodeImage");
    }

    #[test]
    fn api_errors_about_secrets_are_only_logged() {
        let of = |lookup| resolved("harbor.example/app", &lookup);
        let unreadable = of(SecretLookup::Error("cannot decrypt".to_owned()));
        let reason = "secret bank/harbor could not be read; the reason is in the log of cloudcore-prepull";
        assert_eq!(unreadable.key, PullKey::Unavailable { reason: reason.to_owned() });
        assert_eq!(unreadable.details, ["secret bank/harbor could not be read: cannot decrypt"]);
    }
}

#[test]
fn an_entitlement_is_short_and_differs_by_keys() {
    let of = |images: &[String], secret: &str, has_keys| {
        let spec =
            json!({"imagePrePullTemplate": {"images": images, "imageSecrets": secret, "nodeNames": ["a"]}});
        let nodes = [edge("a", &[])].into();
        plan_job(&job(spec), &nodes).unwrap().nodes[0].1.entitlement(has_keys)
    };
    let many: Vec<String> = (0..256).map(|n| format!("registry.example/{}:{n}", "a".repeat(200))).collect();
    let all = [
        of(&many, "s/a", true),
        of(&many, "s/b", true),
        of(&many, "s/a", false),
        of(&many[..255], "s/a", true),
    ];
    assert!(all.iter().all(|text| text.len() == 64), "sites keep it for each blob: {all:?}");
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    let backwards: Vec<String> = many.iter().rev().cloned().collect();
    assert_eq!(of(&backwards, "s/a", true), all[0]);
}
