//! Rules that the API server evaluates itself, in CEL: those of the definitions, since Kubernetes 1.25, and the
//! optional admission policy, since 1.30. Older servers don't know them; then these tests print that nothing was tried.

use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const JOBS: &str = "operations.kubeedge.io";
const KRUISE: &str = "apps.kruise.io";
const FLEET_POLICY: &str = "manifests/cloudcore-prepull/optional/remove-and-upgrade-by-right.yaml";
const POLICY: &str = "manifests/cloudcore-prepull/optional/secrets-of-the-author.yaml";

/// Whether the API server is of this minor version or later. Prints a note otherwise.
async fn is_since(cluster: &Cluster, minor: u32) -> Result<bool> {
    let version = cluster.client().apiserver_version().await?;
    let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
    let known = version.major == "1" && digits.parse::<u32>()? >= minor;
    if !known {
        eprintln!("nothing was tried: {} is older than 1.{minor}", version.git_version);
    }
    Ok(known)
}

/// An object of one of our kinds.
fn object(group: &str, version: &str, kind: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": format!("{group}/{version}"), "kind": kind, "metadata": {"name": "tried"}, "spec": spec,
    })
}

fn api(client: Client, object: &Value) -> Result<Api<DynamicObject>> {
    let version = object["apiVersion"].as_str().context("no version")?;
    let (group, version) = version.split_once('/').context("no group")?;
    let kind = object["kind"].as_str().context("no kind")?;
    let plural = format!("{}s", kind.to_lowercase());
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), &plural);
    Ok(match kind {
        "ImagePullJob" | "ImageListPullJob" => Api::namespaced_with(client, "default", &resource),
        _ => Api::all_with(client, &resource),
    })
}

/// Lets the API server create an object without storing it. Returns the reason for a refusal.
async fn refusal_of(client: Client, object: &Value) -> Result<Option<String>> {
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    said(api(client, object)?.create(&dry, &serde_json::from_value(object.clone())?).await)
}

fn said(answer: Result<DynamicObject, Error>) -> Result<Option<String>> {
    match answer {
        Ok(_) => Ok(None),
        Err(Error::Api(status)) if matches!(status.code, 403 | 422) => Ok(Some(status.message.clone())),
        Err(error) => Err(error.into()),
    }
}

/// Fails unless the answer is the expected one: accepted, or refused with these words.
fn check(what: &str, refusal: Option<&str>, expected: Option<&str>) -> Result<()> {
    match (refusal, expected) {
        (None, None) => Ok(()),
        (Some(said), Some(words)) if said.contains(words) => Ok(()),
        _ => bail!("{what}: expected {expected:?}, and the API server says {refusal:?}"),
    }
}

/// `base` with other fields; null removes one.
fn with(base: &Value, changes: &Value) -> Value {
    let mut changed = base.clone();
    for (key, value) in changes.as_object().into_iter().flatten() {
        if value.is_null() {
            changed.as_object_mut().and_then(|fields| fields.remove(key));
        } else {
            changed[key] = value.clone();
        }
    }
    changed
}

#[tokio::test]
async fn a_definition_refuses_senseless_jobs() -> Result<()> {
    let cluster = Cluster::start().await?;
    if !is_since(&cluster, 25).await? {
        return Ok(());
    }
    let one_of = Some("set exactly one of nodeNames and labelSelector");
    let no_image = Some("images and imageSources are both empty: name at least one image");
    let base = json!({"images": ["nginx:1.25"], "nodeNames": ["edge-1"]});
    let selector = json!({"matchLabels": {"site": "factory"}});
    let templates = [
        (json!({}), None),
        (json!({"nodeNames": null, "labelSelector": selector}), None),
        (json!({"nodeNames": [], "labelSelector": selector}), None),
        (json!({"nodeNames": null}), one_of),
        (json!({"nodeNames": []}), one_of),
        (json!({"labelSelector": selector}), one_of),
        (json!({"images": null}), no_image),
        (json!({"images": []}), no_image),
        (json!({"images": [], "imageSources": []}), no_image),
        (json!({"images": null, "imageSources": [{"repository": "nginx"}]}), None),
    ];
    let needed = Some("the operator add or replace needs a value");
    let rules = [
        (json!({"operator": "add", "value": "x"}), None),
        (json!({"operator": "replace", "value": "x"}), None),
        (json!({"operator": "remove"}), None),
        (json!({"operator": "remove", "value": ""}), None),
        (json!({"operator": "add"}), needed),
        (json!({"operator": "replace"}), needed),
        (json!({"operator": "replace", "value": ""}), needed),
    ];
    let mut verdicts = 0;
    for version in ["v1alpha1", "v1alpha2"] {
        let mut specs: Vec<_> = templates
            .iter()
            .map(|(changes, expected)| (json!({"imagePrePullTemplate": with(&base, changes)}), *expected))
            .collect();
        for (list, component) in [("imageOverriders", "Tag"), ("secretOverriders", "SecretName")] {
            for (rule, expected) in &rules {
                let rule = with(rule, &json!({"component": component}));
                let overrider = json!({"nodeLabel": "site", "overriders": {list: [rule]}});
                let overriders = json!([{"imagePrePullOverrider": overrider}]);
                let spec = json!({"imagePrePullTemplate": base, "imagePrePullOverriders": overriders});
                specs.push((spec, *expected));
            }
        }
        for (spec, expected) in specs {
            let object = object(JOBS, version, "ImagePrePullJob", &spec);
            let refusal = refusal_of(cluster.client(), &object).await?;
            check(&format!("{version} {spec}"), refusal.as_deref(), expected)?;
            verdicts += 1;
        }
    }
    eprintln!("{verdicts} verdicts on {}", cluster.version().await?);
    Ok(())
}

#[tokio::test]
async fn a_cancel_is_not_taken_back() -> Result<()> {
    let cluster = Cluster::start().await?;
    if !is_since(&cluster, 25).await? {
        return Ok(());
    }
    let job = cluster.job("tried").images(["nginx:1.25"]).on(["edge-1"]).apply().await?;
    let for_good = Some("cancel cannot be taken back: create a new job");
    for (spec, expected) in [
        (json!({"suspend": true}), None),
        (json!({"cancel": false}), None),
        (json!({"cancel": true}), None),
        (json!({"cancel": false}), for_good),
        (json!({"cancel": null}), for_good),
        (json!({"suspend": false}), None),
    ] {
        let answer = job.patch_spec(spec.clone()).await;
        let refusal = answer.as_ref().err().and_then(refused);
        check(&spec.to_string(), refusal.as_deref(), expected)?;
        if expected.is_none() {
            answer?;
        }
    }
    Ok(())
}

/// Changes of a Kruise job that both kinds have, with their refusals.
fn of_kruises_jobs() -> Vec<(Value, Option<&'static str>)> {
    let percent = Some("parallelism does not support percentage value");
    let integer = Some("parallelism must be a valid integer");
    let negative = Some("parallelism must be non-negative");
    let both = Some("can not set both names and labelSelector in this spec.selector");
    let pods = Some("can not set both selector and podSelector");
    let never = Some("activeDeadlineSeconds and ttlSecondsAfterFinished can only work with Always");
    let (names, labels) = (json!(["edge-1"]), json!({"site": "factory"}));
    let expressions = json!([{"key": "site", "operator": "Exists"}]);
    vec![
        (json!({}), None),
        (json!({"parallelism": 0}), None),
        (json!({"parallelism": 7}), None),
        (json!({"parallelism": "7"}), None),
        (json!({"parallelism": "50%"}), percent),
        (json!({"parallelism": "many"}), integer),
        (json!({"parallelism": "1.5"}), integer),
        (json!({"parallelism": -1}), negative),
        (json!({"parallelism": "-1"}), negative),
        (json!({"selector": {"names": names}}), None),
        (json!({"selector": {"matchLabels": labels, "matchExpressions": expressions}}), None),
        (json!({"selector": {"names": names, "matchLabels": labels}}), both),
        (json!({"selector": {"names": names, "matchExpressions": expressions}}), both),
        (json!({"podSelector": {"matchLabels": labels}}), None),
        (json!({"podSelector": {"matchLabels": labels}, "selector": {"names": names}}), pods),
        (json!({"completionPolicy": {"type": "Never"}}), None),
        (
            json!({"completionPolicy": {"type": "Always", "activeDeadlineSeconds": 900, "ttlSecondsAfterFinished": 1}}),
            None,
        ),
        (json!({"completionPolicy": {"ttlSecondsAfterFinished": 1}}), None),
        (json!({"completionPolicy": {"type": "Never", "activeDeadlineSeconds": 900}}), never),
        (json!({"completionPolicy": {"type": "Never", "ttlSecondsAfterFinished": 1}}), never),
    ]
}

fn images(count: usize) -> Value {
    (0..count).map(|number| format!("app-{number}:v1")).collect()
}

#[tokio::test]
async fn kruises_definitions_refuse_senseless_objects() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    if !is_since(&cluster, 25).await? {
        return Ok(());
    }
    let empty = Some("image can not be empty");
    let too_many = Some("the maximum number of images cannot > 255");
    let lists = [
        (json!({"images": images(255)}), None),
        (json!({"images": []}), empty),
        (json!({"images": images(256)}), too_many),
    ];
    let no_tag = Some("tag for an image can not be empty");
    let below_zero = Some("version can not be less than 0");
    let no_ttl = Some("pullPolicy.ttlSecondsAfterFinished must set");
    let tag = json!({"tag": "1.25", "pullPolicy": {"ttlSecondsAfterFinished": 1}});
    let tags = [
        (json!({}), None),
        (json!({"version": 0}), None),
        (json!({"version": -1}), below_zero),
        (json!({"tag": ""}), no_tag),
        (json!({"tag": null}), no_tag),
        (json!({"pullPolicy": null}), no_ttl),
        (json!({"pullPolicy": {"timeoutSeconds": 1}}), no_ttl),
    ];
    let mut verdicts = 0;
    for version in ["v1alpha1", "v1beta1"] {
        let single = (json!({"image": "nginx:1.25"}), vec![(json!({"image": ""}), empty)]);
        let list = (json!({"images": ["nginx:1.25"]}), lists.to_vec());
        let mut objects = Vec::new();
        for (kind, (base, of_kind)) in [("ImagePullJob", single), ("ImageListPullJob", list)] {
            for (changes, expected) in of_kruises_jobs().into_iter().chain(of_kind) {
                objects.push((object(KRUISE, version, kind, &with(&base, &changes)), expected));
            }
        }
        for (changes, expected) in &tags {
            let spec = json!({"images": {"nginx": {"tags": [with(&tag, changes)]}}});
            objects.push((object(KRUISE, version, "NodeImage", &spec), *expected));
        }
        for (object, expected) in objects {
            let refusal = refusal_of(cluster.client(), &object).await?;
            check(&object.to_string(), refusal.as_deref(), expected)?;
            verdicts += 1;
        }
    }
    eprintln!("{verdicts} verdicts on {}", cluster.version().await?);
    Ok(())
}

#[tokio::test]
async fn pull_secrets_cannot_be_changed() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    if !is_since(&cluster, 25).await? {
        return Ok(());
    }
    let immutable = Some("spec.pullSecrets is immutable");
    for (kind, base) in [
        ("ImagePullJob", json!({"image": "nginx:1.25"})),
        ("ImageListPullJob", json!({"images": ["nginx:1.25"]})),
    ] {
        for (before, after, expected) in [
            (json!(["a"]), json!(["a"]), None),
            (json!(["a"]), json!(["b"]), immutable),
            (json!(["a"]), json!(["a", "b"]), immutable),
            (json!(["a"]), Value::Null, immutable),
            (Value::Null, json!(["a"]), immutable),
        ] {
            let object = object(KRUISE, "v1beta1", kind, &with(&base, &json!({"pullSecrets": before})));
            let api = api(cluster.client(), &object)?;
            api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
            let change = Patch::Merge(json!({"spec": {"pullSecrets": after}}));
            let answer = said(api.patch("tried", &PatchParams::default(), &change).await)?;
            check(&format!("{kind}: from {before} to {after}"), answer.as_deref(), expected)?;
            api.delete("tried", &kube::api::DeleteParams::default()).await?;
        }
    }
    Ok(())
}

/// A job with this in its template, and with these rules for secrets.
fn with_secrets(template: &Value, rules: &Value) -> Value {
    let base = json!({"images": ["r.example/app:v1"], "nodeNames": ["edge-1"]});
    let mut spec = json!({"imagePrePullTemplate": with(&base, template)});
    if !rules.is_null() {
        let overrider = json!({"nodeLabel": "site", "overriders": {"secretOverriders": rules}});
        spec["imagePrePullOverriders"] = json!([{"imagePrePullOverrider": overrider}]);
    }
    object(JOBS, "v1alpha2", "ImagePrePullJob", &spec)
}

/// Gives ann the rights to create and change jobs, and to read only the Secret default/harbor.
fn rights_of_ann() -> String {
    let role = |kind: &str, rules: Value| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "rules": rules,
            "metadata": {"name": "ann", "namespace": (kind == "Role").then_some("default")},
        })
    };
    let binding = |kind: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": format!("{kind}Binding"),
            "metadata": {"name": "ann", "namespace": (kind == "Role").then_some("default")},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "ann"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}],
        })
    };
    let jobs = json!([{"apiGroups": [JOBS], "resources": ["imageprepulljobs"],
        "verbs": ["get", "create", "patch"]}]);
    let secret = json!([{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["harbor"],
        "verbs": ["get"]}]);
    let items = [role("ClusterRole", jobs), binding("ClusterRole"), role("Role", secret), binding("Role")];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

#[tokio::test]
async fn a_job_names_only_secrets_of_its_author() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    if !is_since(&cluster, 30).await? {
        return Ok(());
    }
    cluster.apply(&rights_of_ann()).await?;
    cluster.apply_file(&workspace().join(POLICY)).await?;
    let ann = Cluster::client_of(&cluster.kubeconfig_as("ann")?).await?;
    let refused = Some("the author of the job may not read all of its secrets");
    let harbor = json!({"imageSecrets": "default/harbor"});
    let other = with_secrets(&json!({"imageSecrets": "default/other"}), &Value::Null);
    eventually("the policy is in force", SOON, async || {
        check("another secret", refusal_of(ann.clone(), &other).await?.as_deref(), refused)
    })
    .await?;

    let sources = |count: usize| -> Value {
        let source = |n| json!({"repository": format!("app-{n}"), "imageSecret": "default/harbor"});
        json!({"imageSources": (0..count).map(source).collect::<Vec<_>>()})
    };
    let registry =
        |secret: &str| json!({"registrySecrets": [{"registry": "r.example", "imageSecret": secret}]});
    let rule = |component: &str, value: &str| json!([{"component": component, "operator": "replace", "value": value}]);
    let removed = json!([{"component": "SecretName", "operator": "remove"}]);
    let with_keys = |secret: &str| {
        let mut job = with_secrets(&json!({}), &Value::Null);
        job["spec"]["verify"] = json!({"keys": [{"secretRef": secret}]});
        job
    };
    let many = Some("in more than 16 places");
    for (what, job, expected) in [
        ("no secret", with_secrets(&json!({}), &Value::Null), None),
        ("a secret of ann's", with_secrets(&harbor, &Value::Null), None),
        ("another secret", other.clone(), Some("default/other")),
        ("of a registry, ann's", with_secrets(&registry("default/harbor"), &Value::Null), None),
        (
            "of a registry",
            with_secrets(&registry("kube-system/harbor"), &Value::Null),
            Some("kube-system/harbor"),
        ),
        (
            "of a source",
            with_secrets(
                &json!({"imageSources": [{"repository": "app", "imageSecret": "default/other"}]}),
                &Value::Null,
            ),
            refused,
        ),
        ("an overrider's name", with_secrets(&harbor, &rule("SecretName", "other")), Some("default/other")),
        (
            "an overrider's namespace",
            with_secrets(&harbor, &rule("Namespace", "other")),
            Some("other/harbor"),
        ),
        ("an overrider that removes", with_secrets(&harbor, &removed), None),
        ("keys of a secret of ann's", with_keys("default/harbor"), None),
        ("keys of another secret", with_keys("default/other"), Some("default/other")),
        ("16 mentions", with_secrets(&sources(16), &Value::Null), None),
        ("17 mentions", with_secrets(&sources(17), &Value::Null), many),
    ] {
        let refusal = refusal_of(ann.clone(), &job).await?;
        check(what, refusal.as_deref(), expected)?;
        // Users who may read all secrets may name all.
        check(what, refusal_of(cluster.client(), &job).await?.as_deref(), None)?;
    }

    // Ann may label another author's job, but not change its spec.
    let jobs = api(cluster.client(), &other)?;
    jobs.create(&PostParams::default(), &serde_json::from_value(other.clone())?).await?;
    for (change, expected) in [
        (json!({"metadata": {"labels": {"of": "ann"}}}), None),
        (json!({"spec": {"imagePrePullTemplate": {"retryTimes": 1}}}), refused),
    ] {
        let patched = api(ann.clone(), &other)?
            .patch("tried", &PatchParams::default(), &Patch::Merge(change.clone()))
            .await;
        check(&change.to_string(), said(patched)?.as_deref(), expected)?;
    }
    Ok(())
}

#[tokio::test]
async fn removals_and_upgrades_take_a_right() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    if !is_since(&cluster, 30).await? {
        return Ok(());
    }
    cluster.apply(&rights_of_ann()).await?;
    cluster.apply_file(&workspace().join(FLEET_POLICY)).await?;
    let kubeconfig = cluster.kubeconfig_as("ann")?;
    let ann = Cluster::client_of(&kubeconfig).await?;
    let removal = with_secrets(&json!({"images": null, "remove": {"images": ["nginx:1.25"]}}), &Value::Null);
    let upgrade = with_secrets(&json!({"upgrade": {}}), &Value::Null);
    let refused = [(&removal, "the verb \"remove\""), (&upgrade, "the verb \"upgrade\"")];
    for (job, words) in refused {
        eventually("the policy is in force", SOON, async || {
            check("without the right", refusal_of(ann.clone(), job).await?.as_deref(), Some(words))
        })
        .await?;
        check("with all rights", refusal_of(cluster.client(), job).await?.as_deref(), None)?;
    }
    check(
        "a pull",
        refusal_of(ann.clone(), &with_secrets(&json!({}), &Value::Null)).await?.as_deref(),
        None,
    )?;
    let words =
        "the admission policy prepull-remove-and-upgrade refuses it: spec.imagePrePullTemplate.remove";
    let me = Person::new(&kubeconfig);
    let said = me.runs("remove nginx:1.25 --node edge-1 --wait=0").await?.is(1, &[words])?;
    assert_eq!(said.err.matches("prepull-fleet-admin").count(), 1, "{}", said.err);

    let binding =
        ["create", "clusterrolebinding", "ann-fleet", "--clusterrole=prepull-fleet-admin", "--user=ann"];
    cluster.kubectl(&binding).await?;
    for (job, _) in refused {
        eventually("the right counts", SOON, async || {
            check("with the right", refusal_of(ann.clone(), job).await?.as_deref(), None)
        })
        .await?;
    }
    Ok(())
}
