//! The roles of `manifests/kubectl-prepull/rbac.yaml`.
#![allow(clippy::unwrap_used)]

use serde_json::Value;

/// The roles of a file, by kind and name, with their rules.
fn roles(file: &str) -> Vec<(String, Value)> {
    let path = format!("{}/../../manifests/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let objects = text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    let roles = objects.filter(|object| object["kind"].as_str().is_some_and(|kind| kind.ends_with("Role")));
    roles
        .map(|role| {
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            (format!("{} {}", word(&role["kind"]), word(&role["metadata"]["name"])), role["rules"].clone())
        })
        .collect()
}

#[test]
fn one_file_has_the_role_of_each_person() {
    let ours = roles("kubectl-prepull/rbac.yaml");
    let names: Vec<_> = ours.iter().map(|(name, _)| name.as_str()).collect();
    let expected = [
        "ClusterRole prepull-viewer",
        "ClusterRole prepull-operator",
        "ClusterRole prepull-settings-admin",
        "Role prepull-token-admin",
        "Role prepull-node-admin",
    ];
    assert_eq!(names, expected);
    // Applied in either order, the two files are the same role.
    for (file, role) in [("token-admin.yaml", 3), ("node-admin.yaml", 4)] {
        let theirs = roles(&format!("cloudcore-prepull/optional/{file}"));
        assert!(theirs.contains(&ours[role]), "{file}: {theirs:?}");
    }
}

#[test]
fn no_role_reads_a_secret() {
    for (name, rules) in roles("kubectl-prepull/rbac.yaml") {
        for rule in rules.as_array().unwrap() {
            let of = |field: &str| {
                rule[field].as_array().unwrap().iter().filter_map(Value::as_str).collect::<Vec<_>>()
            };
            let is_of_secrets = of("resources").iter().any(|resource| ["secrets", "*"].contains(resource));
            assert!(!is_of_secrets || of("verbs") == ["create"], "{name}: {rule}");
        }
    }
}
