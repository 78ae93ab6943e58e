#![allow(clippy::unwrap_used, clippy::expect_used)]

use proptest::prelude::*;
use serde_json::{Value, json};

use prepull_api::overriders::{ImageRule, SecretRule};
use prepull_api::task::Upgrade;

use super::*;

/// A job with these fields merged into a small valid template.
fn job(template: &Value, overriders: &Value) -> ImagePrePullJob {
    let mut whole = json!({"images": ["nginx:1.25"], "nodeNames": ["edge-1"]});
    for (key, value) in template.as_object().unwrap() {
        whole[key] = value.clone();
    }
    serde_json::from_value(json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2",
        "kind": "ImagePrePullJob",
        "metadata": {"name": "job", "uid": "u-1", "generation": 3},
        "spec": {"imagePrePullTemplate": whole, "imagePrePullOverriders": overriders},
    }))
    .unwrap()
}

fn valid(template: &Value) -> ValidatedJob {
    validate(&job(template, &json!([]))).unwrap_or_else(|refusal| panic!("{refusal}"))
}

fn refusal(template: &Value) -> String {
    validate(&job(template, &json!([]))).unwrap_err().to_string()
}

fn reference(text: &str) -> Reference {
    Reference::parse(text).unwrap()
}

#[test]
fn a_bare_job_gets_the_documented_defaults() {
    assert_eq!(
        valid(&json!({})),
        ValidatedJob {
            upgrade: None,
            removal: None,
            uid: JobUid("u-1".to_owned()),
            name: "job".to_owned(),
            generation: 3,
            images: vec![JobImage {
                image: "nginx:1.25".to_owned(),
                name: None,
                reference: reference("nginx:1.25"),
                secret: None,
                policy: None,
            }],
            nodes: NodeSelection::Names(NodeNames::new(vec!["edge-1".into()])),
            overriders: vec![],
            registry_secrets: vec![],
            fallback_secret: None,
            checks: vec![CheckItem::Disk],
            tolerance: Ratio::DEFAULT,
            concurrency: NonZeroU32::MIN,
            timeout: Duration::from_secs(300),
            retries: 0,
            policy: RunPolicy::default(),
            download: DownloadPolicy::default(),
        }
    );
}

#[test]
fn every_field_is_taken_over() {
    let template = json!({
        "images": ["nginx"],
        "imageSources": [
            {"name": "image1", "registry": "harbor.docker.hub", "repository": "jili/example", "tag": "v1.0.0",
             "imageSecret": "default/secret", "imagePullPolicy": "Always"},
            {"name": "", "registry": "", "repository": "app", "tag": "", "digest": "", "imageSecret": "",
             "imagePullPolicy": ""},
        ],
        "registrySecrets": [{"registry": "*.r.io/team", "imageSecret": "a/b"}],
        "imageSecrets": "default/fallback",
        "nodeNames": [],
        "labelSelector": {"matchLabels": {"region": "x"}},
        "checkItems": ["mem", "disk", "mem", "cpu"],
        "failureTolerate": ".25",
        "concurrency": 7,
        "timeoutSeconds": 60,
        "retryTimes": 3,
        "imagePullPolicy": "Never",
    });
    let overriders = json!([{"imagePrePullOverrider": {
        "nodeLabel": "region=hangzhou",
        "overriders": {
            "imageOverriders": [{"component": "Registry", "operator": "replace", "value": "hangzhou.registry.io"}],
            "secretOverriders": [{"component": "SecretName", "operator": "replace", "value": "hangzhou-secret"}],
        },
    }}]);
    let secret = |text: &str| SecretRef::parse(text).unwrap();
    let image = |text: &str, name: Option<&str>, own: Option<&str>, policy| JobImage {
        image: text.to_owned(),
        name: name.map(str::to_owned),
        reference: reference(text),
        secret: own.map(secret),
        policy: Some(policy),
    };
    assert_eq!(
        validate(&job(&template, &overriders)).unwrap(),
        ValidatedJob {
            upgrade: None,
            removal: None,
            uid: JobUid("u-1".to_owned()),
            name: "job".to_owned(),
            generation: 3,
            images: vec![
                image("nginx", None, None, PullPolicy::Never),
                image(
                    "harbor.docker.hub/jili/example:v1.0.0",
                    Some("image1"),
                    Some("default/secret"),
                    PullPolicy::Always
                ),
                image("app", None, None, PullPolicy::Never),
            ],
            nodes: NodeSelection::Labels(Selector::parse("region=x").unwrap()),
            overriders: vec![OverriderGroup {
                selector: Selector::parse("region=hangzhou").unwrap(),
                label_text: "region=hangzhou".to_owned(),
                image_rules: vec![
                    ImageRule::parse("Registry", "replace", Some("hangzhou.registry.io")).unwrap()
                ],
                secret_rules: vec![
                    SecretRule::parse("SecretName", "replace", Some("hangzhou-secret")).unwrap()
                ],
            }],
            registry_secrets: vec![(RegistryPattern::parse("*.r.io/team").unwrap(), secret("a/b"))],
            fallback_secret: Some(secret("default/fallback")),
            checks: vec![CheckItem::Mem, CheckItem::Disk, CheckItem::Cpu],
            tolerance: Ratio::parse("0.25").unwrap(),
            concurrency: NonZeroU32::new(7).unwrap(),
            timeout: Duration::from_secs(60),
            retries: 3,
            policy: RunPolicy::default(),
            download: DownloadPolicy::default(),
        }
    );
}

#[test]
fn gos_zero_values_mean_the_default() {
    let job = valid(&json!({
        "checkItems": [], "failureTolerate": "", "concurrency": 0, "timeoutSeconds": 0, "imageSecrets": "",
        "imagePullPolicy": "",
    }));
    assert_eq!(job, valid(&json!({})));
}

#[test]
fn an_empty_label_selector_matches_all_nodes() {
    let job = valid(&json!({"nodeNames": [], "labelSelector": {}}));
    assert_eq!(job.nodes, NodeSelection::Labels(Selector::default()));
}

#[test]
fn number_ranges_match_kubeedges_fields() {
    let job = valid(&json!({
        "concurrency": i64::MAX, "timeoutSeconds": u32::MAX, "retryTimes": i32::MAX,
    }));
    assert_eq!(
        (job.concurrency.get(), job.timeout, job.retries),
        (u32::MAX, Duration::from_secs(4_294_967_295), 2_147_483_647)
    );
}

#[test]
fn equal_references_merge_into_one_pull() {
    let job = valid(&json!({
        "images": ["nginx", "docker.io/library/nginx:latest", "app:1"],
        "imageSources": [
            {"repository": "nginx", "tag": "latest", "name": "web", "imageSecret": "a/b", "imagePullPolicy": "Never"},
            {"repository": "nginx", "tag": "latest", "name": "late", "imageSecret": "c/d"},
        ],
        "imagePullPolicy": "Always",
    }));
    let seen: Vec<_> = job
        .images
        .iter()
        .map(|i| (i.image.as_str(), i.name.as_deref(), i.secret.as_ref().map(SecretRef::to_string), i.policy))
        .collect();
    assert_eq!(
        seen,
        [
            ("nginx", Some("web"), Some("a/b".to_owned()), Some(PullPolicy::Never)),
            ("app:1", None, None, Some(PullPolicy::Always)),
        ]
    );
}

#[test]
fn duplicate_images_do_not_count() {
    let mut images: Vec<_> = (0..MAX_IMAGES).map(|i| format!("app:{i}")).collect();
    images.push("app:0".to_owned());
    assert_eq!(valid(&json!({"images": images})).images.len(), MAX_IMAGES);
    images.push("one-more".to_owned());
    assert_eq!(
        refusal(&json!({"images": images})),
        "spec.imagePrePullTemplate.images: 257 different images; at most 256 are allowed: split the job"
    );
}

#[test]
fn a_wrong_template_is_refused_with_remedy() {
    for (template, message) in [
        (json!({"images": []}), "images: images and imageSources are both empty: name at least one image"),
        (
            json!({"images": ["nginx", "Nginx"]}),
            "images[1]: repository \"Nginx\" in image \"Nginx\" must be lowercase",
        ),
        (json!({"images": [""]}), "images[0]: the image reference is empty"),
        (
            json!({"imageSources": [{"registry": "harbor", "repository": "app"}]}),
            "imageSources[0]: registry \"harbor\" is not recognised as a host: it needs a dot, a port, or to be \
             localhost; a path belongs in the repository",
        ),
        (
            json!({"imageSources": [{"repository": "app", "imageSecret": "secret"}]}),
            "imageSources[0].imageSecret: \"secret\" is not a secret: write {namespace}/{name}",
        ),
        (
            json!({"imageSources": [{"repository": "app", "imagePullPolicy": "always"}]}),
            "imageSources[0].imagePullPolicy: unknown pull policy \"always\": use Always, IfNotPresent or Never",
        ),
        (
            json!({"imagePullPolicy": "Sometimes"}),
            "imagePullPolicy: unknown pull policy \"Sometimes\": use Always, IfNotPresent or Never",
        ),
        (
            json!({"registrySecrets": [{"registry": "r.io", "imageSecret": "a/b"}, {"registry": "", "imageSecret": "a/b"}]}),
            "registrySecrets[1].registry: \"\" is not a registry: write host, host:port or host/path, with * for any \
             text in one label of the host",
        ),
        (
            json!({"registrySecrets": [{"registry": "r.io", "imageSecret": ""}]}),
            "registrySecrets[0].imageSecret: \"\" is not a secret: write {namespace}/{name}",
        ),
        (
            json!({"imageSecrets": "a/b/c"}),
            "imageSecrets: \"b/c\" is not the name of a secret: it takes at most 253 lowercase letters, digits, dashes \
             and dots, a letter or digit at both ends of each part",
        ),
        (json!({"nodeNames": ["edge-1", ""]}), "nodeNames[1]: the node name is empty"),
        (
            json!({"nodeNames": ["a".repeat(254)]}),
            "nodeNames[0]: 254 bytes; the name of a Node has at most 253",
        ),
        (
            json!({"nodeNames": [], "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Gt"}]}}),
            "labelSelector: label a: unknown operator \"Gt\": use In, NotIn, Exists or DoesNotExist",
        ),
        (
            json!({"checkItems": ["disk", "Disk"]}),
            "checkItems[1]: unknown check item \"Disk\": use disk, cpu or mem",
        ),
        (
            json!({"failureTolerate": "10%"}),
            "failureTolerate: \"10%\" is not a decimal number: write a ratio such as 0.1 for one node in ten",
        ),
        (
            json!({"failureTolerate": "1.5"}),
            "failureTolerate: 1.5 is not between 0 and 1: write a ratio such as 0.1 for one node in ten",
        ),
        (
            json!({"concurrency": -1}),
            "concurrency: -1 is negative: write how many nodes pull at the same time",
        ),
        (json!({"timeoutSeconds": -1}), "timeoutSeconds: -1 is not allowed: write 0 to 4294967295"),
        (
            json!({"timeoutSeconds": 4_294_967_296_i64}),
            "timeoutSeconds: 4294967296 is not allowed: write 0 to 4294967295",
        ),
        (json!({"retryTimes": -1}), "retryTimes: -1 is not allowed: write 0 to 2147483647"),
        (
            json!({"retryTimes": 2_147_483_648_i64}),
            "retryTimes: 2147483648 is not allowed: write 0 to 2147483647",
        ),
    ] {
        assert_eq!(refusal(&template), format!("spec.imagePrePullTemplate.{message}"), "{template}");
    }
    for (template, message) in [
        (json!({"nodeNames": []}), "neither nodeNames nor labelSelector is set: set exactly one of them"),
        (json!({"labelSelector": {}}), "nodeNames and labelSelector are both set: keep exactly one of them"),
    ] {
        assert_eq!(refusal(&template), format!("spec.imagePrePullTemplate: {message}"), "{template}");
    }
}

#[test]
fn a_wrong_overrider_is_refused_with_remedy() {
    let group = |label: &str, images: Value, secrets: Value| {
        let rules = json!({"imageOverriders": images, "secretOverriders": secrets});
        json!({"imagePrePullOverrider": {"nodeLabel": label, "overriders": rules}})
    };
    let fine = json!({"component": "Registry", "operator": "remove"});
    for (overrider, message) in [
        (
            group("a=b=c", json!([]), json!([])),
            "nodeLabel: label selector \"a=b=c\": found = where a comma or the end is expected",
        ),
        (
            group("a", json!([fine, {"component": "Host", "operator": "add", "value": "x"}]), json!([])),
            "overriders.imageOverriders[1].component: unknown component \"Host\": use Registry, Repository or Tag",
        ),
        (
            group("a", json!([{"component": "Tag", "operator": "Add", "value": "x"}]), json!([])),
            "overriders.imageOverriders[0].operator: unknown operator \"Add\": use add, replace or remove",
        ),
        (
            group("a", json!([{"component": "Tag", "operator": "add"}]), json!([])),
            "overriders.imageOverriders[0].value: the operator add needs a value",
        ),
        (
            group("a", json!([{"component": "Tag", "operator": "replace", "value": "a b"}]), json!([])),
            "overriders.imageOverriders[0].value: \"a b\" is neither a tag nor a digest: write 1.25, sha256:… or @sha256:…",
        ),
        (
            group("a", json!([{"component": "Repository", "operator": "remove"}]), json!([])),
            "overriders.imageOverriders[0].operator: an image has one repository, which cannot be removed: use replace",
        ),
        (
            group(
                "a",
                json!([{"component": "Registry", "operator": "replace", "value": "mirror"}]),
                json!([]),
            ),
            "overriders.imageOverriders[0].value: registry \"mirror\" is not recognised as a host: it needs a dot, a \
             port, or to be localhost; a path belongs in the repository",
        ),
        (
            group("a", json!([]), json!([{"component": "Registry", "operator": "remove"}])),
            "overriders.secretOverriders[0].component: unknown component \"Registry\": use SecretName or Namespace",
        ),
        (
            group("a", json!([]), json!([{"component": "Namespace", "operator": "replace", "value": "A"}])),
            "overriders.secretOverriders[0].value: \"A\" is not a namespace: it takes at most 63 lowercase letters, \
             digits and dashes, a letter or digit at both ends",
        ),
    ] {
        let fine = group("", json!([fine]), json!([]));
        let refusal = validate(&job(&json!({}), &json!([fine, overrider]))).unwrap_err().to_string();
        assert_eq!(refusal, format!("spec.imagePrePullOverriders[1].imagePrePullOverrider.{message}"));
    }
}

#[test]
fn a_ratio_is_parsed_exactly() {
    for (text, shown) in [
        ("", "0.1"),
        ("0", "0"),
        ("0.0", "0"),
        ("-0", "0"),
        ("1", "1"),
        ("1.0", "1"),
        ("+01.", "1"),
        (".5", "0.5"),
        ("0.50", "0.5"),
        ("00.050", "0.05"),
        ("0.000000000000000001", "0.000000000000000001"),
        ("0.999999999999999999", "0.999999999999999999"),
    ] {
        assert_eq!(Ratio::parse(text).unwrap().to_string(), shown, "{text:?}");
    }
    for text in [".", "-", "+", "a", "0,1", "1e-1", "0.1.1", " 0.1", "0x1", "NaN", "inf", "--0", "½"] {
        assert_eq!(Ratio::parse(text), Err(RatioError::NotDecimal(text.to_owned())), "{text:?}");
    }
    for text in ["-0.1", "1.0000001", "2", "10", "100000000000000000000000000000000000000000"] {
        assert!(matches!(Ratio::parse(text), Err(RatioError::OutOfRange(_))), "{text:?}");
    }
    assert!(matches!(Ratio::parse("0.0000000000000000001"), Err(RatioError::TooFine(_))));
}

#[test]
fn the_ratio_bounds_tolerated_failures() {
    for (ratio, failed, desired, exceeded) in [
        ("0.1", 1, 10, false),
        ("0.1", 2, 10, true),
        ("0.1", 1, 9, true),
        ("0.3", 3, 10, false), // 0.1 + 0.2 is not 0.3 in floating point
        ("0.29", 29, 100, false),
        ("0.29", 30, 100, true),
        ("0", 0, 201, false),
        ("0", 1, 201, true),
        ("1", 201, 201, false),
        ("0.1", 0, 0, false),
        ("0.999999999999999999", u32::MAX, u32::MAX, true),
        ("1", u32::MAX, u32::MAX, false),
    ] {
        assert_eq!(
            Ratio::parse(ratio).unwrap().exceeded_by(failed, desired),
            exceeded,
            "{failed}/{desired} > {ratio}"
        );
    }
}

/// `text` times `factor`, as decimal digits, least significant first, with as many after the point as `text` has:
/// schoolbook arithmetic that shares nothing with the code under test.
fn times(fraction: &str, factor: u32) -> Vec<u8> {
    let mut product = Vec::new();
    let mut carry = 0_u64;
    for digit in fraction.bytes().rev() {
        let sum = u64::from(digit - b'0') * u64::from(factor) + carry;
        product.push(u8::try_from(sum % 10).unwrap());
        carry = sum / 10;
    }
    while carry > 0 {
        product.push(u8::try_from(carry % 10).unwrap());
        carry /= 10;
    }
    product
}

proptest! {
    #[test]
    fn a_ratio_is_exact(fraction in "[0-9]{1,18}", failed: u32, desired: u32, near in 0_u32..3, close: bool) {
        let ratio = Ratio::parse(&format!("0.{fraction}")).unwrap();
        let product = times(&fraction, desired);
        let whole: u64 = product.iter().skip(fraction.len()).rev().fold(0, |n, d| n * 10 + u64::from(*d));
        // Half of the cases sit at the boundary, where a rounding error would show.
        let failed = if close { u32::try_from(whole).unwrap().saturating_add(near).saturating_sub(1) } else { failed };
        let exceeded = u64::from(failed) > whole;
        prop_assert_eq!(ratio.exceeded_by(failed, desired), exceeded);
    }

    #[test]
    fn a_ratio_displays_as_it_parses(fraction in "[0-9]{1,18}") {
        let ratio = Ratio::parse(&format!("0.{fraction}")).unwrap();
        prop_assert_eq!(Ratio::parse(&ratio.to_string()).unwrap(), ratio);
    }

    #[test]
    fn garbage_never_panics(text in "[-+0-9.eé %]{0,40}") {
        let _ = Ratio::parse(&text);
    }
}

#[test]
fn a_mistake_in_the_course_is_named() {
    let course = |spec: Value| {
        let mut object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
            "metadata": {"name": "job"}, "spec": spec,
        });
        object["spec"]["imagePrePullTemplate"] = json!({"images": ["nginx:1.25"], "nodeNames": ["edge-1"]});
        validate(&serde_json::from_value(object).unwrap())
            .map(|job| job.policy)
            .map_err(|refusal| refusal.field)
    };
    let all = json!({
        "suspend": true, "pause": true, "cancel": true, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0, "retry": 2, "recheck": 3,
        "followNodes": true, "allowMissingNodes": true,
        "rollout": {"steps": ["5%", "25%", "100%"], "pauseSeconds": 10},
    });
    let expected = RunPolicy {
        suspend: true,
        paused: true,
        cancel: true,
        active_deadline: Some(Duration::from_secs(60)),
        ttl: Some(Duration::ZERO),
        steps: vec![WaveStep::Percent(5), WaveStep::Percent(25), WaveStep::Percent(100)],
        pause: Duration::from_secs(10),
        retry: 2,
        recheck: 3,
        follow_nodes: true,
        allow_missing_nodes: true,
    };
    assert_eq!(course(all), Ok(expected));
    assert_eq!(course(json!({})), Ok(RunPolicy::default()));
    let steps: Vec<_> = (1..=MAX_STEPS).map(|step| step.to_string()).collect();
    assert_eq!(course(json!({"rollout": {"steps": steps}})).unwrap().steps.len(), MAX_STEPS);
    for (spec, field) in [
        (json!({"activeDeadlineSeconds": 0}), "spec.activeDeadlineSeconds"),
        (json!({"activeDeadlineSeconds": -1}), "spec.activeDeadlineSeconds"),
        (json!({"ttlSecondsAfterFinished": -1}), "spec.ttlSecondsAfterFinished"),
        (json!({"retry": -1}), "spec.retry"),
        (json!({"recheck": 1001}), "spec.recheck"),
        (json!({"rollout": {"pauseSeconds": -1}}), "spec.rollout.pauseSeconds"),
        (json!({"rollout": {"steps": ["5%", "half"]}}), "spec.rollout.steps[1]"),
        (json!({"rollout": {"steps": ["25%", "5%"]}}), "spec.rollout.steps[1]"),
        (json!({"rollout": {"steps": vec!["1"; MAX_STEPS + 1]}}), "spec.rollout.steps"),
    ] {
        assert_eq!(course(spec.clone()), Err(field.to_owned()), "{spec}");
    }
}

#[test]
fn a_removal_is_read_or_refused_by_field() {
    let with = |remove: Value, more: Value| {
        let mut template = json!({"images": [], "remove": remove});
        template.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        template
    };
    let job = valid(&with(
        json!({"images": ["app:1"], "repositories": ["r.io/team/app"], "olderThan": "720h", "keepLast": 3}),
        json!({"checkItems": ["disk", "mem"]}),
    ));
    let removal = job.removal.unwrap();
    assert_eq!(removal.images, ["docker.io/library/app:1"]);
    assert_eq!((removal.repositories.as_slice(), removal.keep_last), (&["r.io/team/app".to_owned()][..], 3));
    assert_eq!(removal.older_than, Some(Duration::from_secs(720 * 3600)));
    assert_eq!((job.images.len(), job.checks.as_slice()), (0, &[CheckItem::Mem][..]));
    for (remove, more, field) in [
        (json!({}), json!({}), "remove.images: "),
        (json!({"images": ["a b"]}), json!({}), "remove.images[0]: "),
        (json!({"repositories": ["app"]}), json!({}), "remove.repositories: "),
        (json!({"repositories": ["app:1"], "keepLast": 1}), json!({}), "remove.repositories[0]: "),
        (json!({"images": ["app:1"], "keepLast": 1}), json!({}), "remove.keepLast: "),
        (json!({"repositories": ["app"], "keepLast": -1}), json!({}), "remove.keepLast: "),
        (json!({"repositories": ["app"], "olderThan": "long"}), json!({}), "remove.olderThan: "),
        (json!({"images": ["app:1"]}), json!({"images": ["app:2"]}), "images: is about pulling"),
        (
            json!({"images": ["app:1"]}),
            json!({"imagePullPolicy": "Always"}),
            "imagePullPolicy: is about pulling",
        ),
        (json!({"images": ["app:1"]}), json!({"retryTimes": 2}), "retryTimes: is about pulling"),
    ] {
        let refusal = refusal(&with(remove, more));
        assert!(refusal.starts_with(&format!("spec.imagePrePullTemplate.{field}")), "{refusal}");
    }
}

#[test]
fn an_upgrade_is_read_or_refused_by_field() {
    let with = |upgrade: Value| json!({"images": ["agent:2"], "upgrade": upgrade});
    let upgrade = |upgrade| valid(&with(upgrade)).upgrade.unwrap();
    assert_eq!(upgrade(json!({})), Upgrade { within: Duration::from_secs(120), packaged: false });
    let all = upgrade(json!({"within": "1m30s", "packages": true}));
    assert_eq!(all, Upgrade { within: Duration::from_secs(90), packaged: true });
    for (template, field) in [
        (json!({"images": ["a:1", "b:1"], "upgrade": {}}), "images: an upgrade takes exactly one"),
        (
            json!({"images": ["a:1", "b:1"], "imageSources": [{"repository": "c"}], "upgrade": {}}),
            "images: an upgrade takes exactly one",
        ),
        (json!({"images": [], "upgrade": {}, "remove": {"images": ["a:1"]}}), "images: an upgrade takes"),
        (with(json!({"within": "soon"})), "upgrade.within: "),
        (with(json!({"within": "9s"})), "upgrade.within: must be from 10s"),
        // The default of timeoutSeconds.
        (with(json!({"within": "5m"})), "upgrade.within: must be shorter than timeoutSeconds (300)"),
    ] {
        let refusal = refusal(&template);
        assert!(refusal.starts_with(&format!("spec.imagePrePullTemplate.{field}")), "{refusal}");
    }
}
