#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::*;

const JOB: &str = r"
apiVersion: operations.kubeedge.io/v1alpha1
kind: ImagePrePullJob
metadata:
  name: sample
spec:
  imagePrePullTemplate:
    images:
    - nginx:1.25
    imageSources:
    - name: image1
      registry: harbor.docker.hub
      repository: jili/example
      tag: v1.0.0
      imageSecret: default/secret
    nodeNames: [edge-1, cloud-1, edge-2]
  imagePrePullOverriders:
  - imagePrePullOverrider:
      nodeLabel: region=hangzhou
      overriders:
        imageOverriders:
        - {component: Registry, operator: replace, value: hangzhou.registry.io}
        secretOverriders:
        - {component: SecretName, operator: replace, value: hangzhou-secret}
";

const NODES: &str = r#"
apiVersion: v1
kind: Node
metadata:
  name: edge-1
  creationTimestamp: "2026-11-21T09:00:00Z"
  labels: {node-role.kubernetes.io/edge: "", region: hangzhou}
status:
  conditions:
  - {type: Ready, status: "True", lastHeartbeatTime: 2026-11-21T09:00:00Z}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: ignored}
---
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata: {name: edge-2, labels: {node-role.kubernetes.io/edge: "true"}}
  status: {conditions: [{type: Ready, status: "True"}]}
- apiVersion: v1
  kind: Node
  metadata: {name: cloud-1}
  status: {conditions: [{type: Ready, status: "True"}]}
"#;

const SECRETS: &str = r#"
apiVersion: v1
kind: Secret
type: kubernetes.io/dockerconfigjson
metadata: {name: secret}
stringData:
  .dockerconfigjson: |
    {"auths": {"harbor.docker.hub": {"username": "us3r", "password": "s3cret"}}}
---
apiVersion: v1
kind: Secret
type: kubernetes.io/dockercfg
metadata: {name: hangzhou-secret, namespace: default}
data:
  .dockercfg: eyJvdGhlci5pbyI6eyJhdXRoIjoiZFRwdyJ9fQ==
"#;

/// Runs the command on files with these contents.
async fn plan_of(job: &str, nodes: &str, secrets: Option<&str>, output: Output) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    };
    let args = PlanArgs {
        job: file("job.yaml", job),
        nodes: Some(file("nodes.yaml", nodes)),
        secrets: secrets.map(|secrets| file("secrets.yaml", secrets)),
        output,
        kubeconfig: None,
    };
    let mut stdout = Vec::new();
    let result = run(&args, &mut stdout).await;
    let dir = format!("{}/", dir.path().display());
    result.map_err(|error| format!("{error:#}").replace(&dir, ""))?;
    Ok(String::from_utf8(stdout).unwrap())
}

async fn refused(job: &str, nodes: &str, secrets: Option<&str>) -> String {
    plan_of(job, nodes, secrets, Output::Json).await.unwrap_err()
}

fn expected(error: &Value) -> Value {
    let image = |image: &str, pull: &str, secrets: &[&str], error: &Value| json!({"image": image, "pull": pull, "secrets": secrets, "pullPolicy": "IfNotPresent", "error": error});
    let (nginx, example) = ("nginx:1.25", "harbor.docker.hub/jili/example:v1.0.0");
    json!({
        "nodes": [
            {"name": "edge-1", "images": [
                image(nginx, "hangzhou.registry.io/nginx:1.25", &[], &Value::Null),
                image(example, "hangzhou.registry.io/jili/example:v1.0.0", &["default/hangzhou-secret"], error),
            ]},
            {"name": "edge-2", "images": [
                image(nginx, "docker.io/library/nginx:1.25", &[], &Value::Null),
                image(example, example, &["default/secret"], &Value::Null),
            ]},
        ],
        "skipped": [{"name": "cloud-1", "reason": "not an edge node"}],
    })
}

#[tokio::test]
async fn json_and_yaml_show_what_each_node_would_pull() {
    let json = plan_of(JOB, NODES, None, Output::Json).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&Value::Null));
    let yaml = plan_of(JOB, NODES, None, Output::Yaml).await.unwrap();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), expected(&Value::Null));
}

#[tokio::test]
async fn an_image_without_usable_credentials_carries_the_reason_if_secrets_are_given() {
    let json = plan_of(JOB, NODES, Some(SECRETS), Output::Json).await.unwrap();
    let reason =
        "secret default/hangzhou-secret has no entry for hangzhou.registry.io/jili/example; it has other.io";
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&json!(reason)));
    assert!(!json.contains("s3cret") && !json.contains("us3r"));

    let json = plan_of(JOB, NODES, Some(""), Output::Json).await.unwrap();
    assert!(json.contains("\"error\": \"secret default/secret does not exist\""), "{json}");
}

#[tokio::test]
async fn the_table_lists_images_by_node_and_skipped_nodes() {
    let table = plan_of(JOB, NODES, None, Output::Table).await.unwrap();
    assert_eq!(
        table,
        "\
NODE     IMAGE                                   PULL                                       POLICY         SECRETS
edge-1   nginx:1.25                              hangzhou.registry.io/nginx:1.25            IfNotPresent   <none>
edge-1   harbor.docker.hub/jili/example:v1.0.0   hangzhou.registry.io/jili/example:v1.0.0   IfNotPresent   default/hangzhou-secret
edge-2   nginx:1.25                              docker.io/library/nginx:1.25               IfNotPresent   <none>
edge-2   harbor.docker.hub/jili/example:v1.0.0   harbor.docker.hub/jili/example:v1.0.0      IfNotPresent   default/secret

SKIPPED NODE   REASON
cloud-1        not an edge node
"
    );
    let table = plan_of(JOB, NODES, Some(SECRETS), Output::Table).await.unwrap();
    let line = table.lines().find(|line| line.contains("hangzhou-secret")).unwrap();
    assert!(line.ends_with("it has other.io"), "{table}");
    assert!(!table.contains("s3cret"));
}

#[tokio::test]
async fn one_file_may_hold_all_kinds_and_lists_may_be_typed() {
    let all = format!("{JOB}---{NODES}---{SECRETS}");
    let whole = plan_of(&all, &all, Some(&all), Output::Json).await.unwrap();
    assert_eq!(whole, plan_of(JOB, NODES, Some(SECRETS), Output::Json).await.unwrap());

    // The API server omits the kind of a list's items.
    let node = |name: &str, labels: &Value| {
        let status = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        json!({"metadata": {"name": name, "labels": labels}, "status": status})
    };
    let list = json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": [
        node("edge-1", &json!({"node-role.kubernetes.io/edge": "", "region": "hangzhou"})),
        node("edge-2", &json!({"node-role.kubernetes.io/edge": ""})),
        node("cloud-1", &json!({})),
    ]});
    let json = plan_of(JOB, &list.to_string(), None, Output::Json).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&Value::Null));
}

#[tokio::test]
async fn a_file_of_ten_thousand_nodes_is_read() {
    let mut nodes = "apiVersion: v1\nkind: List\nitems:\n".to_owned();
    for i in 0..10_000 {
        write!(nodes, "- apiVersion: v1\n  kind: Node\n  metadata: {{name: edge-{i}, labels: {{node-role.kubernetes.io/edge: ''").unwrap();
        (0..20).for_each(|l| write!(nodes, ", example.io/label-{l}: 'value-{i}'").unwrap());
        writeln!(nodes, "}}}}\n  status: {{conditions: [{{type: Ready, status: 'True'}}]}}").unwrap();
    }
    let job = JOB.replace("nodeNames: [edge-1, cloud-1, edge-2]", "labelSelector: {}");
    let json = plan_of(&job, &nodes, None, Output::Json).await.unwrap();
    let plan: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(plan["nodes"].as_array().unwrap().len(), 10_000);
}

#[tokio::test]
async fn a_refused_job_is_an_error_with_the_reason() {
    let job = JOB.replace("nginx:1.25", "Nginx");
    assert_eq!(
        refused(&job, NODES, None).await,
        "the job is refused: spec.imagePrePullTemplate.images[0]: repository \"Nginx\" in image \"Nginx\" must be \
         lowercase"
    );
    let job = JOB.replace("[edge-1, cloud-1, edge-2]", "[cloud-1]");
    assert_eq!(
        refused(&job, NODES, None).await,
        "the job is refused: spec.imagePrePullTemplate.nodeNames: no node is eligible: cloud-1 is not an edge node (a \
         node needs the label node-role.kubernetes.io/edge and must be Ready)"
    );
}

#[tokio::test]
async fn an_error_names_the_file_that_caused_it() {
    for (job, nodes, secrets, message) in [
        ("", NODES, None, "job.yaml: no ImagePrePullJob in it, but nothing at all"),
        (NODES, NODES, None, "job.yaml: no ImagePrePullJob in it, but 1 ConfigMap, 3 Node"),
        (
            &format!("{JOB}---{}", JOB.replace("sample", "other")),
            NODES,
            None,
            "job.yaml: plan takes one job, and there are 2: ImagePrePullJob sample, ImagePrePullJob other",
        ),
        (
            &JOB.replace("v1alpha1", "v1"),
            NODES,
            None,
            "job.yaml: ImagePrePullJob sample has apiVersion \"operations.kubeedge.io/v1\": write \
             operations.kubeedge.io/v1alpha2 or operations.kubeedge.io/v1alpha1",
        ),
        (
            &JOB.replace("operations.kubeedge.io", "apps.kruise.io"),
            NODES,
            None,
            "job.yaml: ImagePrePullJob sample has apiVersion \"apps.kruise.io/v1alpha1\": write \
             operations.kubeedge.io/v1alpha2 or operations.kubeedge.io/v1alpha1",
        ),
        (
            &JOB.replace("tag: v1.0.0", "tag: 1.0"),
            NODES,
            None,
            "job.yaml: ImagePrePullJob sample: invalid type: floating point `1.0`, expected a string",
        ),
        (JOB, JOB, None, "nodes.yaml: no Node in it"),
        (JOB, "a: [", None, "reading nodes.yaml: not YAML: line "),
        (JOB, "just a text", None, "nodes.yaml: document 1: not a Kubernetes object"),
        (JOB, "a: b", None, "nodes.yaml: document 1: not a Kubernetes object: it has no kind"),
    ] {
        let error = refused(job, nodes, secrets).await;
        assert!(error.starts_with(message), "{error}");
    }
    let missing = PlanArgs {
        job: "/no/such/file".into(),
        nodes: None,
        secrets: None,
        output: Output::Json,
        kubeconfig: None,
    };
    let error = run(&missing, &mut Vec::new()).await.unwrap_err();
    assert!(format!("{error:#}").starts_with("reading /no/such/file: No such file"), "{error:#}");
}

#[tokio::test]
async fn no_error_quotes_a_secrets_file() {
    for secrets in [
        "a: \"s3cret",
        "kind: Secret\napiVersion: v1\nmetadata: {name: a}\nstringData: {x: y}\ndata: {.dockerconfigjson: s3cret*}",
        "kind: Secret\napiVersion: v1\nmetadata: {name: a}\ndata: s3cret",
        "kind: Secret\napiVersion: v1\nmetadata: {name: a}\ndata:\n  a: *s3cret\n",
        "kind: Secret\napiVersion: v1\nmetadata: {name: a}\ntype: [s3cret]",
        "s3cret",
        "- s3cret: s3cret\n  s3cret: s3cret",
    ] {
        let error = refused(JOB, NODES, Some(secrets)).await;
        assert!(error.contains("secrets.yaml") && !error.contains("s3cret"), "{secrets}: {error}");
    }
}

#[test]
fn only_the_job_is_required_and_the_output_is_a_table_by_default() {
    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        plan: PlanArgs,
    }
    let parse = |args: &str| <Program as clap::Parser>::try_parse_from(args.split(' '));
    let args = parse("plan --job j --nodes n --secrets s -o yaml").unwrap().plan;
    assert_eq!((args.nodes, args.secrets, args.output), (Some("n".into()), Some("s".into()), Output::Yaml));
    assert_eq!(parse("plan --job j").unwrap().plan.output, Output::Table);
    assert!(parse("plan --nodes n").is_err());
    assert!(parse("plan --job j -o xml").is_err());
}
