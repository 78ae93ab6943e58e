#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;

const GOOD: &str = "\
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
- name: ecr
  matchImages: [\"*.dkr.ecr.*.amazonaws.com\", \"r.io:5000/team\"]
  defaultCacheDuration: 12h
  apiVersion: credentialprovider.kubelet.k8s.io/v1
  args: [get-credentials]
  env:
  - {name: AWS_PROFILE, value: s3cret}
- name: other.sh
  matchImages: [\"*\"]
  defaultCacheDuration: \"0s\"
  apiVersion: credentialprovider.kubelet.k8s.io/v1alpha1
";

fn read(text: &str) -> Result<Vec<ProviderConfig>, String> {
    parse(Path::new("/etc/cp.yaml"), Path::new("/opt/bin"), text, &mut BTreeSet::new())
        .map_err(|error| error.to_string())
}

#[test]
fn a_file_of_the_kubelet_is_read() {
    let providers = read(GOOD).unwrap();
    let [ecr, other] = &providers[..] else { panic!("{providers:?}") };
    assert_eq!((&*ecr.name, &*ecr.program), ("ecr", Path::new("/opt/bin/ecr")));
    assert_eq!(ecr.default_cache_duration, Duration::from_secs(12 * 3600));
    assert_eq!((ecr.version, other.version), (PluginApiVersion::V1, PluginApiVersion::V1Alpha1));
    assert_eq!(ecr.args, ["get-credentials"]);
    assert_eq!(ecr.env, [("AWS_PROFILE".to_owned(), "s3cret".to_owned())]);
    assert_eq!(ecr.matches.len(), 2);
    assert_eq!(other.default_cache_duration, Duration::ZERO);
    assert!(!format!("{providers:?}").contains("s3cret"));
    for version in ["v1beta1", "v1alpha1"] {
        assert_eq!(
            read(&GOOD.replace("k8s.io/v1\nkind", &format!("k8s.io/{version}\nkind"))).unwrap().len(),
            2
        );
    }
    let json = r#"{"apiVersion":"kubelet.config.k8s.io/v1","kind":"CredentialProviderConfig","providers":[{"name":"a",
        "matchImages":["r.io"],"defaultCacheDuration":"1m","apiVersion":"credentialprovider.kubelet.k8s.io/v1beta1",
        "args":null,"env":null,"tokenAttributes":null}]}"#;
    assert_eq!(read(json).unwrap()[0].version, PluginApiVersion::V1Beta1);
}

#[test]
fn errors_name_file_field_and_remedy() {
    let file = "--image-credential-provider-config /etc/cp.yaml: ";
    for (from, to, message) in [
        (
            "kind: CredentialProviderConfig",
            "kind: Pod",
            "kind is \"Pod\", and must be CredentialProviderConfig",
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1\n",
            "apiVersion: kubelet.config.k8s.io/v2\n",
            "apiVersion is \"kubelet.config.k8s.io/v2\", and must be one of kubelet.config.k8s.io/{v1,v1beta1,v1alpha1}",
        ),
        (
            "- name: ecr\n ",
            "-",
            "provider number 1: name: is missing: it is the name of the program in --image-credential-provider-bin-dir",
        ),
        ("name: ecr", "name: ../ecr", "provider ../ecr: name: must not contain a path separator"),
        ("name: ecr", "name: ..", "provider ..: name: must be the name of a program"),
        ("name: ecr", "name: .", "provider .: name: must be the name of a program"),
        ("name: ecr", "name: a b", "provider a b: name: must not contain spaces"),
        ("name: other.sh", "name: ecr", "provider ecr: name: is used twice: each provider needs its own"),
        (
            "k8s.io/v1alpha1",
            "k8s.io/v2",
            "provider other.sh: apiVersion: is \"credentialprovider.kubelet.k8s.io/v2\", and must be one of \
             credentialprovider.kubelet.k8s.io/{v1,v1beta1,v1alpha1}",
        ),
        (
            "[\"*\"]",
            "[]",
            "provider other.sh: matchImages: is missing: without a pattern the provider is never asked",
        ),
        (
            "[\"*\"]",
            "[\"https://r.io\"]",
            "provider other.sh: matchImages: \"https://r.io\" is not a registry: write host, host:port or host/path, \
             with * for any text in one label of the host",
        ),
        (
            "  defaultCacheDuration: 12h\n",
            "",
            "provider ecr: defaultCacheDuration: is missing: write 0s for no caching, or as long as the credentials live",
        ),
        (
            "12h",
            "12d",
            "provider ecr: defaultCacheDuration: is \"12d\", which is not a duration: write 12h, 30m or 0s",
        ),
        ("12h", "-1h", "provider ecr: defaultCacheDuration: is \"-1h\", and must not be negative"),
        (
            "name: AWS_PROFILE",
            "name: A=B",
            "provider ecr: env: a name must not be empty nor contain =, and nothing may contain NUL",
        ),
    ] {
        assert!(GOOD.contains(from), "{from}");
        assert_eq!(read(&GOOD.replace(from, to)).unwrap_err(), format!("{file}{message}"));
    }
    let empty = read("apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\n").unwrap_err();
    assert!(empty.contains("providers is empty"), "{empty}");
    let token = GOOD.replace("  args:", "  tokenAttributes: {serviceAccountTokenAudience: a}\n  args:");
    let error = read(&token).unwrap_err();
    assert!(
        error.contains("provider ecr: tokenAttributes: service account tokens belong to a pod"),
        "{error}"
    );
}

#[test]
fn a_yaml_error_quotes_no_value() {
    let unknown = read(&GOOD.replace("matchImages: [\"*\"]", "matchImage: [\"*\"]")).unwrap_err();
    assert!(unknown.contains("matchImage"), "{unknown}");
    for text in [
        GOOD.replace("{name: AWS_PROFILE, value: s3cret}", "AWS_PROFILE=s3cret"),
        GOOD.replace("value: s3cret", "value: {a: s3cret}"),
        GOOD.replace("args: [get-credentials]", "args: s3cret"),
    ] {
        let error = read(&text).unwrap_err();
        assert!(error.contains("line") && !error.contains("s3cret"), "{error}");
    }
}

#[test]
fn only_root_and_we_may_write() {
    let us = (1000, 1000);
    for (owner, good) in [
        ((0, 0, 0o755), true),
        ((0, 0, 0o775), true),
        ((1000, 1000, 0o775), true),
        ((0, 50, 0o775), false),
        ((0, 50, 0o755), true),
        ((0, 0, 0o757), false),
        ((1001, 0, 0o755), false),
    ] {
        assert_eq!(judge_owner(owner, us).is_ok(), good, "{owner:?}");
    }
    let error = judge_owner((0, 0, 0o100_777), us).unwrap_err();
    assert_eq!(error, "is writable by others than root (mode 777): chown root:root, chmod go-w");
}

#[test]
fn programs_must_be_safe_from_other_users() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let bin = directory.path().join("bin");
    let load = || load(&path, &bin).map(|_| ()).map_err(|error| error.to_string());
    let mode =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    assert!(load().unwrap_err().starts_with("cannot read --image-credential-provider-config"));
    std::fs::write(&path, GOOD).unwrap();
    assert!(load().unwrap_err().contains("--image-credential-provider-bin-dir"));
    std::fs::create_dir(&bin).unwrap();
    mode(&bin, 0o755);
    let error = load().unwrap_err();
    assert!(error.contains("the program of provider ecr, ") && error.contains("No such file"), "{error}");
    for name in ["ecr", "other.sh"] {
        std::fs::write(bin.join(name), "#!/bin/sh\n").unwrap();
        mode(&bin.join(name), 0o644);
    }
    assert!(load().unwrap_err().contains("is not an executable file"));
    for name in ["ecr", "other.sh"] {
        mode(&bin.join(name), 0o755);
    }
    assert_eq!(load(), Ok(()));
    for path in [&path, &bin, &bin.join("other.sh")] {
        let before = std::fs::metadata(path).unwrap().permissions().mode();
        mode(path, 0o777);
        let error = load().unwrap_err();
        assert!(error.contains("writable by others than root (mode 777)"), "{error}");
        mode(path, before & 0o7777);
    }
    assert_eq!(load(), Ok(()));
    std::fs::write(&path, format!("{GOOD}{}", " ".repeat(1 << 20))).unwrap();
    assert!(load().unwrap_err().contains("is longer than 1024 KiB"));
}

#[test]
fn files_are_read_in_name_order() {
    let directory = tempfile::tempdir().unwrap();
    let (config, bin) = (directory.path().join("d"), directory.path().join("bin"));
    for dir in [&config, &bin, &config.join("no.yaml")] {
        std::fs::create_dir(dir).unwrap();
    }
    for name in ["ecr", "other.sh", "third"] {
        std::fs::write(bin.join(name), "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(bin.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let names = || {
        let providers = load(&config, &bin).map_err(|error| error.to_string())?;
        Ok::<_, String>(providers.into_iter().map(|provider| provider.name).collect::<Vec<_>>())
    };
    assert!(names().unwrap_err().contains("is a directory without a .yaml, .yml or .json file"));
    let third = GOOD.replace("name: ecr", "name: third").replace("name: other.sh", "name: fourth");
    let third = &third[..third.find("- name: fourth").unwrap()];
    std::fs::write(config.join("20.yml"), GOOD).unwrap();
    std::fs::write(config.join("10.yaml"), third).unwrap();
    std::fs::write(config.join("notes.txt"), "no").unwrap();
    assert_eq!(names().unwrap(), ["third", "ecr", "other.sh"]);
    std::fs::write(config.join("30.json"), third).unwrap();
    let error = names().unwrap_err();
    assert!(error.contains("30.json: provider third: name: is used twice"), "{error}");
}

proptest! {
    #[test]
    fn garbage_never_panics(text in "[-a-zA-Z0-9:{}\\[\\]\", \n]{0,80}", cut in 0usize..500) {
        let _ = read(&text);
        let _ = read(&GOOD[..cut.min(GOOD.len())]);
    }
}
