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
      nodeLabel: node-restriction.kubernetes.io/region=hangzhou
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
  labels: {node-role.kubernetes.io/edge: "", node-restriction.kubernetes.io/region: hangzhou}
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

async fn no_cluster(_: Option<&Path>) -> anyhow::Result<Client> {
    anyhow::bail!("there is no cluster")
}

/// Runs the command on files with these contents; returns what it prints, or else its error.
async fn plan_of(
    job: &str,
    nodes: &str,
    secrets: Option<&str>,
    output: PlanFormat,
) -> Result<String, String> {
    let (printed, result) = run_on(job, nodes, secrets, output).await;
    result.map(|()| printed)
}

/// Runs the command on files with these contents, without asking for consent; returns what it prints, and its error.
async fn run_on(
    job: &str,
    nodes: &str,
    secrets: Option<&str>,
    output: PlanFormat,
) -> (String, Result<(), String>) {
    run_with(false, SizeArgs::default(), job, nodes, secrets, output).await
}

async fn run_with(
    require_secret_consent: bool,
    sizes: SizeArgs,
    job: &str,
    nodes: &str,
    secrets: Option<&str>,
    output: PlanFormat,
) -> (String, Result<(), String>) {
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
        consent: ConsentArgs { require_secret_consent },
        sizes,
        sites: SiteArgs::default(),
        output,
        kubeconfig: None,
    };
    let mut stdout = Vec::new();
    let result = run(&args, no_cluster, &mut stdout).await;
    let dir = format!("{}/", dir.path().display());
    (String::from_utf8(stdout).unwrap(), result.map_err(|error| format!("{error:#}").replace(&dir, "")))
}

async fn refused(job: &str, nodes: &str, secrets: Option<&str>) -> String {
    plan_of(job, nodes, secrets, PlanFormat::Json).await.unwrap_err()
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
        "warnings": [],
    })
}

#[tokio::test]
async fn json_and_yaml_list_pulls_per_node() {
    let json = plan_of(JOB, NODES, None, PlanFormat::Json).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&Value::Null));
    let yaml = plan_of(JOB, NODES, None, PlanFormat::Yaml).await.unwrap();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), expected(&Value::Null));
}

#[tokio::test]
async fn missing_credentials_fail_the_plan_with_a_reason() {
    let (json, result) = run_on(JOB, NODES, Some(SECRETS), PlanFormat::Json).await;
    let error = "no usable credentials for harbor.docker.hub/jili/example:v1.0.0";
    assert_eq!(result, Err(error.to_owned()));
    let reason =
        "secret default/hangzhou-secret has no entry for hangzhou.registry.io/jili/example; it has other.io";
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&json!(reason)));
    assert!(!json.contains("s3cret") && !json.contains("us3r"));

    let (json, result) = run_on(JOB, NODES, Some(""), PlanFormat::Json).await;
    assert!(json.contains("\"error\": \"secret default/secret does not exist\""), "{json}");
    assert_eq!(result, Err(error.to_owned()));

    let job = JOB.replace("hangzhou-secret", "secret").replace("hangzhou.registry.io", "harbor.docker.hub");
    plan_of(&job, NODES, Some(SECRETS), PlanFormat::Json).await.unwrap();
}

#[tokio::test]
async fn table_lists_images_and_skipped_nodes() {
    let table = plan_of(JOB, NODES, None, PlanFormat::Table).await.unwrap();
    assert_eq!(
        table,
        "\
NODES    IMAGE                                   PULL                                       POLICY         SECRETS
edge-1   nginx:1.25                              hangzhou.registry.io/nginx:1.25            IfNotPresent   <none>
         harbor.docker.hub/jili/example:v1.0.0   hangzhou.registry.io/jili/example:v1.0.0   IfNotPresent   default/hangzhou-secret
edge-2   nginx:1.25                              docker.io/library/nginx:1.25               IfNotPresent   <none>
         harbor.docker.hub/jili/example:v1.0.0   harbor.docker.hub/jili/example:v1.0.0      IfNotPresent   default/secret

SKIPPED NODES   REASON
cloud-1         not an edge node
"
    );
    let (table, _) = run_on(JOB, NODES, Some(SECRETS), PlanFormat::Table).await;
    let line = table.lines().find(|line| line.contains("hangzhou-secret")).unwrap();
    assert!(line.ends_with("it has other.io"), "{table}");
    assert!(!table.contains("s3cret"));
}

#[tokio::test]
async fn a_removals_plan_shows_its_rules() {
    let job = "\
apiVersion: operations.kubeedge.io/v1alpha2
kind: ImagePrePullJob
metadata: {name: sample}
spec:
  imagePrePullTemplate:
    nodeNames: [edge-1, edge-2]
    remove:
      images: [nginx:1.25]
      repositories: [harbor.docker.hub/jili/example]
      olderThan: 720h
      keepLast: 3
      dryRun: true
";
    let table = plan_of(job, NODES, None, PlanFormat::Table).await.unwrap();
    assert_eq!(
        table,
        "\
NODES           REMOVE                           RULE
edge-1,edge-2   docker.io/library/nginx:1.25     <none>
                harbor.docker.hub/jili/example   older than 720h, except the newest 3

dry run: nothing is removed, and the status has what would be
"
    );
    let report = plan_of(job, NODES, None, PlanFormat::Json).await.unwrap();
    let remove = json!({
        "images": ["docker.io/library/nginx:1.25"],
        "repositories": ["harbor.docker.hub/jili/example"],
        "olderThan": "720h",
        "keepLast": 3,
        "dryRun": true,
    });
    assert_eq!(serde_json::from_str::<Value>(&report).unwrap()["remove"], remove);
    let table = plan_of(&job.replace("      olderThan: 720h\n", ""), NODES, None, PlanFormat::Table).await;
    assert!(table.unwrap().contains("   all, except the newest 3\n"));
}

#[tokio::test]
async fn reads_mixed_kinds_and_typed_lists() {
    let all = format!("{JOB}---{NODES}---{SECRETS}");
    let whole = run_on(&all, &all, Some(&all), PlanFormat::Json).await;
    assert_eq!(whole, run_on(JOB, NODES, Some(SECRETS), PlanFormat::Json).await);

    // The API server omits the kind of a list's items.
    let node = |name: &str, labels: &Value| {
        let status = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        json!({"metadata": {"name": name, "labels": labels}, "status": status})
    };
    let list = json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": [
        node("edge-1", &json!({"node-role.kubernetes.io/edge": "", "node-restriction.kubernetes.io/region": "hangzhou"})),
        node("edge-2", &json!({"node-role.kubernetes.io/edge": ""})),
        node("cloud-1", &json!({})),
    ]});
    let json = plan_of(JOB, &list.to_string(), None, PlanFormat::Json).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), expected(&Value::Null));
}

#[tokio::test]
async fn reads_ten_thousand_nodes() {
    let mut nodes = "apiVersion: v1\nkind: List\nitems:\n".to_owned();
    for i in 0..10_000 {
        write!(nodes, "- apiVersion: v1\n  kind: Node\n  metadata: {{name: edge-{i}, labels: {{node-role.kubernetes.io/edge: ''").unwrap();
        (0..4).for_each(|l| write!(nodes, ", example.io/label-{l}: 'value-{i}'").unwrap());
        writeln!(nodes, "}}}}\n  status: {{conditions: [{{type: Ready, status: 'True'}}]}}").unwrap();
    }
    let job = JOB.replace("nodeNames: [edge-1, cloud-1, edge-2]", "labelSelector: {}");
    let json = plan_of(&job, &nodes, None, PlanFormat::Json).await.unwrap();
    let plan: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(plan["nodes"].as_array().unwrap().len(), 10_000);
}

/// Nodes with these names and this label, as YAML.
fn node_list(names: impl Iterator<Item = String>, label: &str) -> String {
    let node = |name: String| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{{label}}}}}\n\
             status: {{conditions: [{{type: Ready, status: 'True'}}]}}\n"
        )
    };
    names.map(node).collect()
}

#[tokio::test]
async fn nodes_with_equal_pulls_share_lines() {
    let edges = node_list((0..500).map(|i| format!("edge-{i:03}")), "node-role.kubernetes.io/edge: ''");
    let others = node_list((0..6).map(|i| format!("cloud-{}", i + 2)), "a: b");
    let job = JOB.replace("nodeNames: [edge-1, cloud-1, edge-2]", "labelSelector: {}");
    let table = plan_of(&job, &(NODES.to_owned() + &edges + &others), None, PlanFormat::Table).await.unwrap();
    let first: Vec<_> = table.lines().map(|line| line.split("   ").next().unwrap()).collect();
    assert_eq!(
        first,
        [
            "NODES",
            "edge-000,edge-001,edge-002 and 498 more",
            "",
            "edge-1",
            "",
            "",
            "SKIPPED NODES",
            "cloud-1,cloud-2,cloud-3 and 4 more",
        ],
        "{table}"
    );
}

#[tokio::test]
async fn fields_without_effect_are_warnings() {
    let job = JOB.replace("region=hangzhou", "region=beijing").replace(
        "    nodeNames:",
        "    registrySecrets:\n    - {registry: harbor.docker.hub, imageSecret: a/b}\n    - {registry: harbor.docker.hbu, \
         imageSecret: a/b}\n    nodeNames:",
    );
    let table = plan_of(&job, NODES, None, PlanFormat::Table).await.unwrap();
    let warnings: Vec<_> = table.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert_eq!(
        warnings,
        [
            "warning: spec.imagePrePullOverriders[0] applies to no node: none of the 2 has \"node-restriction.kubernetes.io/region=beijing\"",
            "warning: spec.imagePrePullTemplate.registrySecrets[1] serves no image: none is at harbor.docker.hbu",
        ]
    );
}

#[tokio::test]
async fn unknown_node_names_are_warnings_unless_allowed() {
    let job = JOB.replace("[edge-1, cloud-1, edge-2]", "[edge-1, egde-2, edge-3]");
    let json: Value =
        serde_json::from_str(&plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap()).unwrap();
    let warning = "spec.imagePrePullTemplate.nodeNames: 2 names have no Node and would count as failed, such as egde-2: \
                   correct them, or set spec.allowMissingNodes";
    assert_eq!(json["warnings"], json!([warning]));
    let job = job.replace("spec:\n", "spec:\n  allowMissingNodes: true\n");
    let json: Value =
        serde_json::from_str(&plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap()).unwrap();
    assert_eq!(json["warnings"], json!([]));
}

#[tokio::test]
async fn an_unknown_field_gets_a_suggestion() {
    let template = |line: &str| JOB.replace("    nodeNames:", &format!("    {line}\n    nodeNames:"));
    for (job, message) in [
        (
            template("concurency: 5"),
            "spec.imagePrePullTemplate.concurency: unknown field: did you mean concurrency?",
        ),
        // As KubeEdge's own proposal spells it. Ignored, it made an anonymous pull.
        (
            template("imageSecret: default/secret"),
            "spec.imagePrePullTemplate.imageSecret: unknown field: did you mean imageSecrets?",
        ),
        (
            template("FailureTolerate: '0.1'"),
            "spec.imagePrePullTemplate.FailureTolerate: unknown field: did you mean failureTolerate?",
        ),
        (
            template("suspend: true"),
            "spec.imagePrePullTemplate.suspend: unknown field: suspend is a field of spec",
        ),
        (template("priority: 5"), "spec.imagePrePullTemplate.priority: unknown field"),
        (
            JOB.replace("imageOverriders:", "imageOverrider:"),
            "spec.imagePrePullOverriders[0].imagePrePullOverrider.overriders.imageOverrider: unknown field: did you \
             mean imageOverriders?",
        ),
        (
            JOB.replace("imageSecret: default/secret", "secret: default/secret"),
            "spec.imagePrePullTemplate.imageSources[0].secret: unknown field",
        ),
        (
            JOB.replace("spec:", "spce:"),
            "spce: unknown field: did you mean spec?\n  spec: required, and not there",
        ),
        (JOB.replace("spec:", "retry: 1\nspec:"), "retry: unknown field: retry is a field of spec"),
        (
            JOB.replace("      repository: jili/example\n", "      repo: jili/example\n"),
            "spec.imagePrePullTemplate.imageSources[0].repo: unknown field\n  \
             spec.imagePrePullTemplate.imageSources[0].repository: required, and not there",
        ),
    ] {
        let error = refused(&job, NODES, None).await;
        assert_eq!(error, format!("job.yaml: ImagePrePullJob sample: {message}"));
    }
    // What kubectl prints of a job that runs has a status, perhaps that of another version, and metadata.
    let printed = JOB
        .replace("  name: sample", "  name: sample\n  uid: abc\n  managedFields: []\n  generation: 3")
        + "status: {phase: Later, somethingNew: 1}\n";
    plan_of(&printed, NODES, None, PlanFormat::Json).await.unwrap();
}

#[tokio::test]
async fn a_list_is_not_read_as_an_object() {
    for (job, message) in [
        (
            "spec: [{images: [nginx], nodeNames: [edge-1]}]".to_owned(),
            "spec: an object with named fields is expected, and not a list",
        ),
        (
            "spec:\n  imagePrePullTemplate:\n    images: [docker.io/a]\n    nodeNames: [edge-1]\n    registrySecrets: \
             [[docker.io, x/s]]"
                .to_owned(),
            "spec.imagePrePullTemplate.registrySecrets[0]: an object with named fields is expected, and not a list",
        ),
    ] {
        let head = JOB.split("spec:").next().unwrap();
        let error = refused(&format!("{head}{job}\n"), NODES, None).await;
        assert_eq!(error, format!("job.yaml: ImagePrePullJob sample: {message}"));
    }
}

#[tokio::test]
async fn a_wrong_type_names_field_and_remedy() {
    for (line, message) in [
        ("failureTolerate: 0.25", "failureTolerate: a text is expected, and not 0.25: quote it"),
        (
            "timeoutSeconds: 5m",
            "timeoutSeconds: seconds are expected, as a whole number without quotes and without a unit, and not the \
             text \"5m\"",
        ),
        (
            "concurrency: \"5\"",
            "concurrency: a whole number without quotes is expected, and not the text \"5\"",
        ),
        ("retryTimes: 1.5", "retryTimes: a whole number without quotes is expected, and not 1.5"),
        ("retryTimes: 1e20", "retryTimes: a whole number without quotes is expected, and not 1e+20"),
        ("checkItems: disk", "checkItems: a list is expected, and not the text \"disk\""),
        (
            "labelSelector: site=factory",
            "labelSelector: an object with named fields is expected, and not the text \"site=factory\"",
        ),
        (
            "labelSelector: {matchLabels: {a: true}}",
            "labelSelector.matchLabels.a: a text is expected, and not true: quote it",
        ),
        ("checkItems: [null]", "checkItems[0]: a text is expected, and not null"),
    ] {
        let job = JOB.replace("    nodeNames:", &format!("    {line}\n    nodeNames:"));
        let error = refused(&job, NODES, None).await;
        assert_eq!(error, format!("job.yaml: ImagePrePullJob sample: spec.imagePrePullTemplate.{message}"));
    }
    let nodes = NODES.replace("{type: Ready, status: \"True\", ", "{type: Ready, status: 1.5, ");
    let error = refused(JOB, &nodes, None).await;
    assert!(error.starts_with("nodes.yaml: Node edge-1: status.conditions[0].status: "), "{error}");
}

#[tokio::test]
async fn a_field_that_is_null_is_absent() {
    let job = JOB.replace("    images:\n    - nginx:1.25\n", "    images:\n    imagePullPolicy:\n");
    let json = plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap();
    assert!(!json.contains("nginx"), "{json}");
}

#[tokio::test]
async fn the_same_object_twice_is_an_error() {
    let again = NODES.replace("name: edge-2", "name: edge-1");
    assert_eq!(refused(JOB, &again, None).await, "nodes.yaml: Node edge-1 is there more than once");
    let again =
        SECRETS.replace("name: hangzhou-secret, namespace: default", "name: secret, namespace: default");
    let error = refused(JOB, NODES, Some(&again)).await;
    assert_eq!(error, "secrets.yaml: Secret default/secret is there more than once");
}

#[tokio::test]
async fn aliases_cannot_make_a_small_file_large() {
    // 10 KB are said 1,000 times more: 10 MB of text, or a list of lists.
    let long = "x".repeat(10_000);
    let aliases = "*long,".repeat(1000);
    let error = refused(JOB, &format!("a: &long {long}\nb: [{aliases}]\n"), None).await;
    assert!(error.starts_with("reading nodes.yaml: not YAML"), "{error}");
    let lists = "a: &a [[],[],[],[],[],[],[],[],[],[]]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c \
                 [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]\n";
    let error = refused(JOB, lists, None).await;
    assert!(error.starts_with("reading nodes.yaml: not YAML"), "{error}");
    // A few aliases are what they are for.
    let job = JOB
        .replace("- {component: Registry", "- &rule {component: Registry")
        .replace("        secretOverriders:", "        - *rule\n        secretOverriders:");
    plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap();
}

#[tokio::test]
async fn a_refused_job_fails_with_a_reason() {
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
async fn a_job_without_ready_nodes_waits() {
    let nodes = NODES.replace("status: \"True\"", "status: \"False\"");
    let table = plan_of(JOB, &nodes, None, PlanFormat::Table).await.unwrap();
    assert!(table.contains("the job waits for a Ready node: no node is eligible: "), "{table}");
    assert!(table.contains("SKIPPED NODES") && !table.contains("applies to no node"), "{table}");
}

#[tokio::test]
async fn an_error_names_its_file() {
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
            "job.yaml: ImagePrePullJob sample: spec.imagePrePullTemplate.imageSources[0].tag: a text is expected, and \
             not 1.0: quote it",
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
        consent: ConsentArgs { require_secret_consent: true },
        sizes: SizeArgs::default(),
        sites: SiteArgs::default(),
        output: PlanFormat::Json,
        kubeconfig: None,
    };
    let error = run(&missing, no_cluster, &mut Vec::new()).await.unwrap_err();
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
fn plan_requires_a_job_and_prints_tables() {
    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        plan: PlanArgs,
    }
    let parse = |args: &str| <Program as clap::Parser>::try_parse_from(args.split(' '));
    let args = parse("plan --job j --nodes n --secrets s -o yaml").unwrap().plan;
    assert_eq!(
        (args.nodes, args.secrets, args.output),
        (Some("n".into()), Some("s".into()), PlanFormat::Yaml)
    );
    assert_eq!(parse("plan --job j").unwrap().plan.output, PlanFormat::Table);
    let consent = |args: &str| parse(args).unwrap().plan.consent.require_secret_consent;
    assert!(consent("plan --job j") && !consent("plan --job j --require-secret-consent=false"));
    assert!(parse("plan --nodes n").is_err());
    assert!(parse("plan --job j -o xml").is_err());
}

#[tokio::test]
async fn a_missing_consent_is_shown_with_its_remedy() {
    let of = async |secrets: &str| {
        let (printed, result) =
            run_with(true, SizeArgs::default(), JOB, NODES, Some(secrets), PlanFormat::Json).await;
        let report: Value = serde_json::from_str(&printed).unwrap();
        let image = report["nodes"][1]["images"][1].clone();
        assert_eq!(image["secrets"], json!(["default/secret"]));
        (image["error"].as_str().unwrap_or_default().to_owned(), result)
    };
    let with = |annotations: &str| {
        SECRETS.replacen(
            "metadata: {name: secret}",
            &format!("metadata: {{name: secret, annotations: {{{annotations}}}}}"),
            1,
        )
    };
    let (error, result) = of(SECRETS).await;
    assert_eq!(
        error,
        "secret default/secret: its owner has allowed no use of it: kubectl prepull allow default/secret sample"
    );
    assert!(result.unwrap_err().contains("no usable credentials for harbor.docker.hub/jili/example:v1.0.0"));
    let (error, _) = of(&with("prepull.kubeedge.io/allow: \"a, b-*\"")).await;
    assert!(error.ends_with("is allowed to use it: kubectl prepull allow default/secret sample"), "{error}");
    let (error, _) = of(&with("prepull.kubeedge.io/allow: A")).await;
    assert!(error.contains("has \"A\", which is no name"), "{error}");
    let (error, _) = of(&with("prepull.kubeedge.io/allow: samp*")).await;
    assert_eq!(error, "");
}

#[tokio::test]
async fn kubelet_settable_labels_are_warnings() {
    let job = JOB.replace("node-restriction.kubernetes.io/region=hangzhou", "\"!region\"");
    let json = plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap();
    let plan: Value = serde_json::from_str(&json).unwrap();
    let [Value::String(warning)] = plan["warnings"].as_array().unwrap().as_slice() else { panic!("{json}") };
    assert!(warning.starts_with("a node may give itself the labels of these selectors"), "{warning}");
    assert!(warning.contains("region in spec.imagePrePullOverriders[0]"), "{warning}");
}

#[tokio::test]
async fn shows_download_settings_and_useless_keys() {
    let said = "
  download: {maxRate: 2Mi}
  windows:
  - {days: [Mon, Fri], start: '01:00', duration: 4h, timeZone: Europe/Berlin}
  - {start: '22:30', duration: 90m, timeZone: Node}
  windowJitter: 20m
  pin: true
  verify: {keys: [{secretRef: default/cosign}], mode: Warn}
";
    let job = format!("{}{said}", JOB.trim_end());
    let json = plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&json).unwrap()["download"],
        json!({
            "maxRate": 2 << 20,
            "windows": ["Mon,Fri 01:00+4h Europe/Berlin", "22:30+1h30m Node"],
            "windowJitter": "20m",
            "pin": true,
            "verify": {"mode": "Warn", "secrets": ["default/cosign"]},
        })
    );
    let (table, result) = run_on(&job, NODES, Some(SECRETS), PlanFormat::Table).await;
    let windows = "windows: Mon,Fri 01:00+4h Europe/Berlin; 22:30+1h30m Node, each node up to 20m later";
    assert!(table.contains(&format!("\n{windows}\n")), "{table}");
    assert!(table.contains("\ndownload: at most 2097152 bytes a second on each node\n"), "{table}");
    let verify = "verify: Warn, keys of default/cosign: secret default/cosign does not exist";
    assert!(table.contains(verify), "{table}");
    assert!(result.is_err());
    let refused = refused(&job.replace("duration: 4h", "duration: 4x"), NODES, None).await;
    assert!(refused.starts_with("the job is refused: spec.windows[0].duration: "), "{refused}");
}

#[tokio::test]
async fn an_unreachable_registry_leaves_sizes_unknown() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (silent_at, gone_at) = (silent.local_addr().unwrap(), gone.local_addr().unwrap());
    drop(gone);
    let job = JOB
        .replace("    - nginx:1.25\n", &format!("    - {silent_at}/slow:v1\n    - {gone_at}/gone:v1\n"))
        .replace("value: hangzhou.registry.io", "value: other.io/x")
        .replace("region=hangzhou", "region=nowhere");
    let sizes = || SizeArgs {
        sizes: true,
        sizes_timeout: std::time::Duration::from_millis(500),
        ..SizeArgs::default()
    };
    let (json, result) = run_with(false, sizes(), &job, NODES, None, PlanFormat::Json).await;
    assert_eq!(result, Ok(()));
    let report: Value = serde_json::from_str(&json).unwrap();
    let images = &report["nodes"][0]["images"];
    let error = |index: usize| images[index]["sizeError"].as_str().unwrap_or_default();
    assert_eq!(error(0), "no answer within 500ms");
    assert!(error(1).contains("refused"), "{json}");
    assert_eq!(error(2), "its secrets are not known: add --secrets");
    assert_eq!(report["nodes"][0]["size"], json!({"downloadBytes": 0, "diskBytes": 0, "unknownImages": 3}));
    // Without credentials: why is said once.
    let (json, _) = run_with(false, sizes(), &job, NODES, Some(""), PlanFormat::Json).await;
    let report: Value = serde_json::from_str(&json).unwrap();
    let image = &report["nodes"][0]["images"][2];
    assert_eq!((&image["sizeError"], image["error"].is_string()), (&Value::Null, true), "{json}");
    let (table, _) = run_with(false, sizes(), &job, NODES, None, PlanFormat::Table).await;
    let line = table.lines().find(|line| line.contains("slow:v1")).unwrap();
    assert!(line.ends_with("unknown    unknown    no answer within 500ms"), "{table}");
    assert!(table.contains("\nall 2 together   unknown\n"), "{table}");
}

#[tokio::test]
async fn a_sharing_node_without_site_is_a_warning() {
    let label = prepull_engine::sites::SITE_LABEL;
    let nodes = NODES.replace("region: hangzhou}", &format!("region: hangzhou, {label}: ship-7}}"));
    let json = plan_of(JOB, &nodes, None, PlanFormat::Json).await.unwrap();
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["sites"], json!([{"site": "ship-7", "nodes": ["edge-1"], "shared": false}]));
    assert_eq!(report["warnings"], json!([]));

    let job = format!("{}\n  download: {{shareWithinSite: true}}\n", JOB.trim_end());
    let table = plan_of(&job, &nodes, None, PlanFormat::Table).await.unwrap();
    assert!(table.contains("\nSITE     NODES\nship-7   edge-1\n"), "{table}");
    let warning = format!(
        "1 of 2 nodes, such as edge-2, would each download for itself: their Nodes have no label {label}"
    );
    assert!(table.ends_with(&format!("\nwarning: {warning}\n")), "{table}");
    let json = plan_of(&job, NODES, None, PlanFormat::Json).await.unwrap();
    assert!(!json.contains("\"sites\""), "{json}");
}

/// Users copy the examples, so each of them must work as it is.
#[test]
fn samples_and_documented_examples_are_valid() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = |folder: &str| {
        let files = std::fs::read_dir(root.join(folder)).unwrap().flatten().map(|file| file.path());
        files.filter(|path| path.is_file()).map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
    };
    let readme = root.join("README.md");
    let pages = files("docs").chain([(readme.clone(), std::fs::read_to_string(readme).unwrap())]);
    let blocks = pages.flat_map(|(path, page)| {
        let blocks = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
        blocks.map(|block| (path.clone(), block.to_owned())).collect::<Vec<_>>()
    });
    let examples: Vec<_> = files("manifests/samples")
        .chain(blocks)
        .filter(|(_, text)| text.lines().any(|line| line == "kind: ImagePrePullJob"))
        .collect();
    assert!(examples.len() >= 10, "{} examples", examples.len());
    let file = tempfile::NamedTempFile::new().unwrap();
    for (path, text) in examples {
        let path = path.display();
        std::fs::write(file.path(), &text).unwrap();
        let job =
            manifests::read_job(file.path()).unwrap_or_else(|error| panic!("{path}: {error:#}\n{text}"));
        validate(&job).unwrap_or_else(|refusal| panic!("{path}: {refusal}\n{text}"));
    }
}
