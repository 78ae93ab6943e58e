use std::collections::BTreeMap;

use prepull_api::crd::kruise::{ImageSpec, ImageTagSpec};
use serde_json::{Value, json};

use super::*;

const SHA: &str = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

/// A spec with these fields replaced or added.
fn with(mut spec: Value, changes: &Value) -> Value {
    spec.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    spec
}

fn pull(changes: &Value) -> Result<ValidPullJob, String> {
    pull_job(&serde_json::from_value(with(json!({"image": "nginx:1.9.1"}), changes)).unwrap())
}

fn list(changes: &Value) -> Result<ValidListJob, String> {
    list_job(&serde_json::from_value(with(json!({"images": ["nginx:1.9.1", "redis"]}), changes)).unwrap())
}

#[test]
fn unset_fields_get_kruises_defaults() {
    let template = ValidTemplate {
        nodes: NodeChoice::All,
        parallelism: 1,
        timeout: 600,
        backoff_limit: 3,
        completion: Completion::Always { deadline: None, ttl: None },
        policy: PullPolicy::IfNotPresent,
        secrets: vec![],
        sandbox: None,
    };
    let image = TagKey::new("nginx", "1.9.1");
    assert_eq!(pull(&json!({})).unwrap(), ValidPullJob { image, template: template.clone() });
    let images = vec!["nginx:1.9.1".to_owned(), "redis".to_owned()];
    assert_eq!(list(&json!({})).unwrap(), ValidListJob { images, template });
}

#[test]
fn every_field_is_parsed() {
    let said = json!({
        "image": format!("r.io/app:1@{SHA}"),
        "pullSecrets": ["one", "two"],
        "selector": {"names": ["b", "a"]},
        "parallelism": "10",
        "pullPolicy": {"timeoutSeconds": 30, "backoffLimit": 0},
        "completionPolicy": {"type": "Always", "activeDeadlineSeconds": 30, "ttlSecondsAfterFinished": 0},
        "sandboxConfig": {"labels": {"a": "b"}},
        "imagePullPolicy": "Always",
    });
    let expected = ValidPullJob {
        image: TagKey::new("r.io/app", SHA),
        template: ValidTemplate {
            nodes: NodeChoice::Names(["a", "b"].map(NodeName::from).into()),
            parallelism: 10,
            timeout: 30,
            backoff_limit: 0,
            completion: Completion::Always {
                deadline: Some(Duration::from_secs(30)),
                ttl: Some(Duration::ZERO),
            },
            policy: PullPolicy::Always,
            secrets: vec!["one".to_owned(), "two".to_owned()],
            sandbox: Some(SandboxConfig {
                labels: Some([("a".to_owned(), "b".to_owned())].into()),
                annotations: None,
            }),
        },
    };
    assert_eq!(pull(&said).unwrap(), expected);
}

#[test]
fn kruises_empty_and_negative_values_are_valid() {
    let template = |changes: Value| pull(&changes).unwrap().template;
    assert_eq!(template(json!({"selector": {}})).nodes, NodeChoice::All);
    assert_eq!(template(json!({"selector": {"matchLabels": {}}})).nodes, NodeChoice::All);
    assert_eq!(template(json!({"selector": {"names": []}})).nodes, NodeChoice::Names(BTreeSet::new()));
    assert_eq!(template(json!({"parallelism": 0})).parallelism, 0);
    assert_eq!(template(json!({"pullPolicy": {"backoffLimit": -1}})).backoff_limit, 3);
    assert_eq!(template(json!({"imagePullPolicy": ""})).policy, PullPolicy::IfNotPresent);
    assert_eq!(template(json!({"completionPolicy": {"type": "Never"}})).completion, Completion::Never);
    let forever = template(json!({"completionPolicy": {"type": "", "activeDeadlineSeconds": i64::MAX}}));
    let deadline = Some(Duration::from_secs(i64::MAX.unsigned_abs()));
    assert_eq!(forever.completion, Completion::Always { deadline, ttl: None });
}

#[test]
fn node_and_pod_selectors_are_parsed() {
    let labels = |text: &str| -> BTreeMap<String, String> {
        text.split(',').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    };
    for (selector, matching, other) in [
        (json!({"matchLabels": {"a": "1"}}), "a=1,b=2", "a=2"),
        (json!({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}), "b=1", "a=1"),
    ] {
        let NodeChoice::Labels(read) = pull(&json!({"selector": selector})).unwrap().template.nodes else {
            panic!("not by labels");
        };
        assert!(read.matches(&labels(matching)) && !read.matches(&labels(other)), "{selector}");
    }
    for (selector, matching, other) in [
        (json!({"matchLabels": {"a": "1"}}), "a=1", "a=2"),
        (json!({"a": "1", "b": "2"}), "a=1,b=2", "a=1"),
        (json!({"matchLabels": {"a": "1"}, "a": "1", "b": "2"}), "a=1,b=2", "a=1"),
    ] {
        let NodeChoice::Pods(read) = pull(&json!({"podSelector": selector})).unwrap().template.nodes else {
            panic!("not by pods");
        };
        assert!(read.matches(&labels(matching)) && !read.matches(&labels(other)), "{selector}");
    }
}

const NEVER: &str =
    "activeDeadlineSeconds and ttlSecondsAfterFinished can only work with Always CompletionPolicyType";
const DEADLINE: &str =
    "completionPolicy.activeDeadlineSeconds must be greater than pullPolicy.timeoutSeconds(default 600)";

#[test]
fn an_invalid_job_is_refused_in_kruises_words() {
    let both = [
        (
            json!({"selector": {"names": [], "matchLabels": {}}}),
            "can not set both names and labelSelector in this spec.selector",
        ),
        (json!({"selector": {"names": ["a", "a"]}}), "duplicated name in selector names"),
        (
            json!({"selector": {"matchLabels": {"a b": ""}}}),
            "invalid selector: \"a b\" is not a label key: it takes letters, digits, - _ and . (at most 63, a letter or digit at both ends), after an optional DNS name and a slash",
        ),
        (
            json!({"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            "invalid podSelector: label a: the operator in needs at least one value",
        ),
        (json!({"selector": {}, "podSelector": {}}), "can not set both selector and podSelector"),
        (json!({"parallelism": "10%"}), "parallelism does not support percentage value"),
        (
            json!({"parallelism": "ten"}),
            "parallelism must be a valid integer: \"ten\": invalid digit found in string",
        ),
        (json!({"parallelism": -1}), "parallelism must be non-negative"),
        (json!({"parallelism": "-1"}), "parallelism must be non-negative"),
        (json!({"completionPolicy": {"activeDeadlineSeconds": 599}}), DEADLINE),
        (json!({"completionPolicy": {"activeDeadlineSeconds": -1}}), DEADLINE),
        (json!({"completionPolicy": {"type": "Never", "activeDeadlineSeconds": 1000}}), NEVER),
        (json!({"completionPolicy": {"type": "Never", "ttlSecondsAfterFinished": 1}}), NEVER),
        (json!({"completionPolicy": {"type": "Maybe"}}), "unknown type of completionPolicy: Maybe"),
        // Ours from here.
        (
            json!({"podSelector": {"matchLabels": {"a": "1"}, "a": "2"}}),
            "invalid podSelector: label a stands there twice, with different values: keep the one in matchLabels",
        ),
        (json!({"pullPolicy": {"timeoutSeconds": 0}}), "pullPolicy.timeoutSeconds must be at least 1"),
        (json!({"pullPolicy": {"timeoutSeconds": -1}}), "pullPolicy.timeoutSeconds must be at least 1"),
        (
            json!({"completionPolicy": {"ttlSecondsAfterFinished": -1}}),
            "completionPolicy.ttlSecondsAfterFinished must be non-negative",
        ),
        (
            json!({"imagePullPolicy": "Never"}),
            "unknown imagePullPolicy \"Never\": use Always or IfNotPresent",
        ),
    ];
    for (changes, words) in both {
        assert_eq!(pull(&changes).unwrap_err(), words, "{changes}");
        assert_eq!(list(&changes).unwrap_err(), words, "{changes}");
    }
    for (name, words) in [("", "pullSecrets[1]: "), ("../../other/secrets/x", "pullSecrets[1]: ")] {
        let error = pull(&json!({"pullSecrets": ["fine", name]})).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    }
    assert_eq!(pull(&json!({"image": ""})).unwrap_err(), "image can not be empty");
    assert_eq!(list(&json!({"images": []})).unwrap_err(), "image can not be empty");
    let twice = json!({"images": ["nginx", "redis", "nginx"]});
    assert_eq!(list(&twice).unwrap_err(), "images cannot have duplicate values");
    let many: Vec<String> = (0..256).map(|i| format!("app:{i}")).collect();
    assert_eq!(list(&json!({"images": many})).unwrap_err(), "the maximum number of images cannot > 255");
    assert_eq!(list(&json!({"images": many[1..]})).unwrap().images.len(), 255);
    for error in
        [pull(&json!({"image": "Nginx"})).unwrap_err(), list(&json!({"images": ["a", "Nginx"]})).unwrap_err()]
    {
        assert!(error.starts_with("invalid image Nginx: repository \"Nginx\""), "{error}");
    }
}

fn tag_spec(changes: &Value) -> ImageTagSpec {
    let fine = json!({"tag": "1", "version": 4, "pullPolicy": {"ttlSecondsAfterFinished": 60}});
    serde_json::from_value(with(fine, changes)).unwrap()
}

#[test]
fn a_valid_tag_is_parsed() {
    let reference = |text: &str| Reference::parse(text).unwrap().normalized();
    let plain = ValidTag {
        reference: reference("nginx:1"),
        policy: PullPolicy::IfNotPresent,
        attempt: 5,
        timeout: Duration::from_secs(600),
        retries: 3,
        active_deadline: None,
        ttl: Duration::from_secs(60),
    };
    assert_eq!(tag_rules("nginx", &tag_spec(&json!({}))).unwrap(), plain);
    assert_eq!(tag_rules("docker.io/library/nginx", &tag_spec(&json!({}))).unwrap(), plain);
    let full = json!({
        "tag": SHA,
        "imagePullPolicy": "Always",
        "version": u32::MAX - 1,
        "pullPolicy": {"ttlSecondsAfterFinished": 0, "timeoutSeconds": 7, "backoffLimit": 0, "activeDeadlineSeconds": 1},
    });
    let expected = ValidTag {
        reference: reference(&format!("r.io:5000/app@{SHA}")),
        policy: PullPolicy::Always,
        attempt: u32::MAX,
        timeout: Duration::from_secs(7),
        retries: 0,
        active_deadline: Some(Duration::from_secs(1)),
        ttl: Duration::ZERO,
    };
    assert_eq!(tag_rules("r.io:5000/app", &tag_spec(&full)).unwrap(), expected);
}

#[test]
fn an_invalid_tag_is_refused_with_reason() {
    let digest = "invalid image nginx: digest \"sha256:12\" in image \"nginx@sha256:12\" is malformed: write sha256: and 64 lowercase hexadecimal digits, or sha384: with 96, or sha512: with 128";
    let ttl = |ttl: i32| json!({"pullPolicy": {"ttlSecondsAfterFinished": ttl}});
    for (name, changes, words) in [
        ("", json!({}), "image name can not be empty"),
        ("nginx", json!({"tag": ""}), "tag for image nginx can not be empty"),
        ("nginx", json!({"version": -1}), "version for nginx/1 can not be less than 0"),
        ("nginx", json!({"version": u32::MAX}), "version for nginx/1 can not be more than 4294967294"),
        ("nginx", json!({"version": i64::MAX}), "version for nginx/1 can not be more than 4294967294"),
        ("nginx", json!({"pullPolicy": null}), "pullPolicy field for nginx/1 must set"),
        (
            "nginx",
            json!({"pullPolicy": {"timeoutSeconds": 1}}),
            "pullPolicy.ttlSecondsAfterFinished for nginx/1 must set",
        ),
        ("nginx", ttl(-1), "pullPolicy.ttlSecondsAfterFinished for nginx/1 must be non-negative"),
        (
            "nginx",
            json!({"pullPolicy": {"ttlSecondsAfterFinished": 1, "timeoutSeconds": 0}}),
            "pullPolicy.timeoutSeconds for nginx/1 must be at least 1",
        ),
        (
            "nginx",
            json!({"pullPolicy": {"ttlSecondsAfterFinished": 1, "activeDeadlineSeconds": 0}}),
            "pullPolicy.activeDeadlineSeconds for nginx/1 must be at least 1",
        ),
        (
            "nginx",
            json!({"imagePullPolicy": "Never"}),
            "unknown imagePullPolicy for nginx/1 \"Never\": use Always or IfNotPresent",
        ),
        ("nginx", json!({"tag": "sha256:12"}), digest),
        (
            "nginx:2",
            json!({}),
            "invalid image nginx:2: it has a tag of its own: write the name here, and the tag in tags",
        ),
    ] {
        assert_eq!(tag_rules(name, &tag_spec(&changes)).unwrap_err(), words, "{name} {changes}");
    }
}

#[test]
fn duplicate_tags_are_refused() {
    let tags = ["1", "2", "1", "", ""].map(|tag| tag_spec(&json!({"tag": tag}))).to_vec();
    let rules = image_rules("nginx", &ImageSpec { tags, ..ImageSpec::default() });
    let words: Vec<_> =
        rules.into_iter().map(|rule| rule.map_or_else(|words| words, |_| String::new())).collect();
    let (empty, twice) = ("tag for image nginx can not be empty", "duplicated tag 1 for image nginx");
    assert_eq!(words, [twice, "", twice, empty, empty]);
}

#[test]
fn what_every_node_would_store_is_bounded() {
    let secrets = |count: usize| json!({"image": "a", "pullSecrets": vec!["s"; count]});
    let sandbox = |kind: &str, value: String| json!({"image": "a", "sandboxConfig": {kind: {"k": value}}});
    assert!(pull(&secrets(16)).is_ok());
    assert_eq!(pull(&secrets(17)).unwrap_err(), "pullSecrets has 17 names: name at most 16");
    for kind in ["labels", "annotations"] {
        // The key counts twice, and the signs around it.
        let longest = MAX_SANDBOX - 18;
        assert!(pull(&sandbox(kind, "v".repeat(longest))).is_ok());
        let refused = pull(&sandbox(kind, "v".repeat(longest + 1))).unwrap_err();
        assert_eq!(refused, "sandboxConfig takes 16385 bytes in a NodeImage: give it at most 16384");
        let refused = pull(&sandbox(kind, "\u{1}".repeat(16_000))).unwrap_err();
        assert!(refused.starts_with("sandboxConfig takes 96018 bytes"), "{refused}");
    }
}

#[test]
fn repeated_selectors_are_bounded() {
    let names = |count: usize| json!({"names": (0..count).map(|i| format!("{i:05}")).collect::<Vec<_>>()});
    assert!(pull(&json!({"selector": names(20_000)})).is_ok());
    let refused = pull(&json!({"selector": names(20_001)})).unwrap_err();
    assert_eq!(refused, "selector has 20001 names: name at most 20000, or select the nodes by labels");
    let images: Vec<String> = (0..255).map(|i| format!("app:{i}")).collect();
    assert!(list(&json!({"images": images, "selector": names(8_000)})).is_ok());
    assert!(list(&json!({"images": images[..10], "selector": names(20_000)})).is_ok());
    let long = "v".repeat(70_000);
    for selector in [json!({"selector": names(10_000)}), json!({"selector": {"names": [long]}})] {
        let refused = list(&with(json!({"images": images}), &selector)).unwrap_err();
        assert!(refused.starts_with("the spec without its images takes "), "{refused}");
        assert!(
            refused.contains("each of the 255 ImagePullJobs repeats: give it at most 65793, "),
            "{refused}"
        );
    }
}
