#![allow(clippy::unwrap_used)]

use k8s_openapi::api::core::v1::Taint;
use prepull_api::crd::EDGE_LABEL;
use serde_json::json;

use super::choice::describe_taint;
use super::*;

fn only(yaml: &str) -> Workload {
    let mut found = find_workloads(&parse_documents(yaml).unwrap()).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[test]
fn finds_images_of_all_containers_and_volumes() {
    let web = only(
        "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  template:
    spec:
      serviceAccountName: web
      initContainers: [{name: a, image: 'r.io/init:1'}]
      containers: [{name: b, image: 'r.io/web:2'}, {name: c, image: 'r.io/init:1'}, {name: d}]
      ephemeralContainers: [{name: e, image: 'r.io/debug:3'}]
      volumes: [{name: f, image: {reference: 'r.io/model:4'}}, {name: g, emptyDir: {}}]
",
    );
    assert_eq!(web.images, ["r.io/init:1", "r.io/web:2", "r.io/debug:3", "r.io/model:4"]);
    assert_eq!((web.title.as_str(), web.namespace.as_deref()), ("Deployment web", Some("shop")));
    assert_eq!(web.service_account, "web");
}

#[test]
fn an_empty_service_account_is_none() {
    for (fields, account) in [
        ("serviceAccountName: ''", "default"),
        ("serviceAccount: web", "web"),
        ("serviceAccountName: '', serviceAccount: web", "web"),
        ("serviceAccountName: web, serviceAccount: old", "web"),
    ] {
        let pod = format!(
            "{{kind: Pod, metadata: {{name: a}}, spec: {{{fields}, containers: [{{name: b, image: a}}]}}}}"
        );
        assert_eq!(only(&pod).service_account, account, "{fields}");
    }
}

#[test]
fn what_pods_pull_always_is_known() {
    let web = only(
        "
kind: Deployment
metadata: {name: web}
spec:
  template:
    spec:
      initContainers:
        - {name: a, image: 'r.io/init'}
        - {name: b, image: 'r.io/seed:latest', imagePullPolicy: IfNotPresent}
      containers:
        - {name: c, image: 'r.io/web:stable', imagePullPolicy: Always}
        - {name: d, image: 'r.io/side:1'}
        - {name: e, image: 'r.io/local:latest', imagePullPolicy: Never}
        - {name: f, image: 'r.io/both:1', imagePullPolicy: IfNotPresent}
        - {name: g, image: 'r.io/both:1', imagePullPolicy: Always}
      ephemeralContainers: [{name: h, image: 'r.io/debug:1', imagePullPolicy: Always}]
      volumes:
        - {name: i, image: {reference: 'r.io/model:latest'}}
        - {name: j, image: {reference: 'r.io/data:1', pullPolicy: Always}}
",
    );
    let always = ["init", "web:stable", "both:1", "debug:1", "model:latest", "data:1"];
    assert_eq!(web.always, always.map(|image| format!("r.io/{image}")));
    assert_eq!(web.images.len(), 9);
}

#[test]
fn only_kinds_with_pods_are_workloads() {
    let pod = json!({"containers": [{"name": "a", "image": "a:1"}]});
    let in_template = json!({"template": {"spec": pod}});
    for kind in ["Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CloneSet", "Rollout"] {
        let object = json!({"kind": kind, "metadata": {"name": "a"}, "spec": in_template});
        assert_eq!(Workload::from_object(&object).unwrap().unwrap().images, ["a:1"], "{kind}");
    }
    for object in [
        json!({"kind": "Pod", "spec": pod}),
        json!({"kind": "PodTemplate", "template": {"spec": pod}}),
        json!({"kind": "CronJob", "spec": {"jobTemplate": {"spec": in_template}}}),
    ] {
        assert!(Workload::from_object(&object).unwrap().is_some(), "{object}");
    }
    for object in [json!({"kind": "Service", "spec": {"ports": []}}), json!({"kind": "ConfigMap"})] {
        assert_eq!(Workload::from_object(&object).unwrap(), None);
    }
}

#[test]
fn reads_lists_and_multiple_documents() {
    let yaml = "
---
kind: List
items:
  - {kind: Pod, metadata: {name: a}, spec: {containers: [{name: a, image: 'a:1'}]}}
  - {kind: Secret, metadata: {name: s}}
---
kind: Pod
metadata: {name: b}
spec: {containers: [{name: a, image: 'b:1'}]}
";
    let found = find_workloads(&parse_documents(yaml).unwrap()).unwrap();
    assert_eq!(found.iter().map(|workload| workload.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let error = parse_documents("kind: Secret\nstringData: {a: s3cret: b}").unwrap_err().to_string();
    assert!(error.starts_with("not YAML: line 2") && !error.contains("s3cret"), "{error}");
    let bad = json!({"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "A:1"}]}});
    assert!(Workload::from_object(&bad).unwrap_err().to_string().contains("Pod a: image \"A:1\""));
}

#[test]
fn a_pods_node_choice_becomes_the_selector() {
    let pod = only(
        "
kind: Pod
metadata: {name: a}
spec:
  nodeSelector: {site: factory}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions: [{key: arch, operator: NotIn, values: [arm64]}]
  containers: [{name: a, image: 'a:1'}]
",
    );
    let expected = json!({
        "matchLabels": {"site": "factory"},
        "matchExpressions": [
            {"key": EDGE_LABEL, "operator": "Exists"}, {"key": "arch", "operator": "NotIn", "values": ["arm64"]},
        ],
    });
    assert_eq!(serde_json::to_value(&pod.choice.selector).unwrap(), expected);
    assert_eq!(pod.choice.beyond, None);
    let affinity = |terms: Value| {
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        let spec =
            json!({"affinity": {"nodeAffinity": required}, "containers": [{"name": "a", "image": "a:1"}]});
        Workload::from_object(&json!({"kind": "Pod", "spec": spec})).unwrap().unwrap().choice.beyond
    };
    let cores = json!([{"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["4"]}]}]);
    assert_eq!(affinity(cores).as_deref(), Some("cores Gt"));
    assert_eq!(affinity(json!([{}, {}])).as_deref(), Some("several nodeSelectorTerms"));
}

#[test]
fn a_taint_excludes_pods_without_toleration() {
    let pod = |tolerations: Value| {
        let spec = json!({"tolerations": tolerations, "containers": [{"name": "a", "image": "a:1"}]});
        Workload::from_object(&json!({"kind": "Pod", "spec": spec})).unwrap().unwrap().choice
    };
    let taint = |key: &str, value: &str, effect: &str| Taint {
        key: key.to_owned(),
        value: Some(value.to_owned()),
        effect: effect.to_owned(),
        ..Taint::default()
    };
    let gpu = [taint("gpu", "a", "NoSchedule")];
    let keeps = |tolerations: Value| pod(tolerations).kept_away_by(&gpu).map(describe_taint);
    assert_eq!(keeps(json!([])).as_deref(), Some("gpu=a:NoSchedule"));
    for tolerated in [
        json!([{"key": "gpu", "operator": "Exists"}]),
        json!([{"key": "gpu", "value": "a", "effect": "NoSchedule"}]),
        json!([{"operator": "Exists"}]),
    ] {
        assert_eq!(keeps(tolerated.clone()), None, "{tolerated}");
    }
    for not in [
        json!([{"key": "gpu", "value": "b"}]),
        json!([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]),
        json!([{"key": "tpu", "operator": "Exists"}]),
    ] {
        assert!(keeps(not.clone()).is_some(), "{not}");
    }
    let harmless =
        [taint("a", "", "PreferNoSchedule"), taint("node.kubernetes.io/not-ready", "", "NoExecute")];
    assert_eq!(pod(json!([])).kept_away_by(&harmless), None);
}

#[test]
fn secrets_go_to_the_images_registries() {
    let of = |images: &[&str], secrets: &[&str]| {
        let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assign_logins(&texts(images), &texts(secrets))
    };
    let login = |registry: &str, secret: &str| (registry.to_owned(), secret.to_owned());
    assert_eq!(of(&["a:1"], &[]).unwrap(), Logins::default());
    assert_eq!(of(&["a:1"], &["shop/hub"]).unwrap().by_registry, [login("docker.io", "shop/hub")]);
    let mixed = of(&["nginx:1", "r.io/a:1", "q.io/b:1"], &["shop/x"]).unwrap();
    assert_eq!(mixed.by_registry, [login("r.io", "shop/x"), login("q.io", "shop/x")]);
    assert_eq!(mixed.without.as_deref(), Some("docker.io"));
    let two = of(&["r.io/a:1"], &["shop/x", "shop/y"]).unwrap();
    assert_eq!((two.by_registry, two.more), (vec![login("r.io", "shop/x")], vec!["shop/y".to_owned()]));
    assert_eq!(of(&["nginx:1", "r.io/a:1"], &["shop/x", "shop/y"]).unwrap_err(), "docker.io, r.io");
}

#[test]
fn finds_secrets_of_the_files_service_account() {
    let yaml = "
kind: ServiceAccount
metadata: {name: web, namespace: shop}
imagePullSecrets: [{name: harbor}]
";
    let objects = parse_documents(yaml).unwrap();
    assert_eq!(account_secrets(&objects, "shop", "web"), Some(vec!["harbor".to_owned()]));
    assert_eq!(account_secrets(&objects, "other", "web"), None);
    assert_eq!(account_secrets(&objects, "shop", "default"), None);
}
