#![allow(clippy::unwrap_used)]

use super::*;

/// The endpoints of a registry in a configuration, as `scheme://authority/path capabilities`, or the error.
fn read(files: &[(&str, &str)], registry: &str) -> Result<Vec<String>, RegistryError> {
    read_as(false, files, registry)
}

/// The same, as a containerd before 2.0 reads it, or as later ones do.
fn read_as(
    ignores_server_alone: bool,
    files: &[(&str, &str)],
    registry: &str,
) -> Result<Vec<String>, RegistryError> {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let file = root.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    let dirs = vec![root.path().join("none"), root.path().to_owned()];
    let all = endpoints(&HostsFiles { dirs, ignores_server_alone }, registry)?;
    let show = |endpoint: &RegistryEndpoint| {
        let RegistryEndpoint { scheme, authority, path, capabilities: c, may_fall_back, .. } = endpoint;
        let able = [(c.pull, "p"), (c.resolve, "r"), (c.referrers, "f")];
        let able: String = able.iter().filter(|(able, _)| *able).map(|(_, letter)| *letter).collect();
        format!("{scheme}{}://{authority}{path} {able}", if *may_fall_back { "?" } else { "" })
    };
    Ok(all.iter().map(show).collect())
}

#[test]
fn a_registry_without_configuration_is_asked_directly() {
    for (registry, expected) in [
        ("r.example", "https://r.example/v2 prf"),
        ("r.example:5000", "https://r.example:5000/v2 prf"),
        ("docker.io", "https://registry-1.docker.io/v2 prf"),
        // On the node itself, by containerd's rule: TLS without verification first, where the port leaves it open.
        ("localhost", "https://localhost/v2 prf"),
        ("localhost:443", "https://localhost:443/v2 prf"),
        ("localhost:80", "http://localhost:80/v2 prf"),
        ("localhost:5000", "https?://localhost:5000/v2 prf"),
        ("127.0.0.2:5000", "https?://127.0.0.2:5000/v2 prf"),
        ("[::1]:5000", "https?://[::1]:5000/v2 prf"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000/v2 prf"),
    ] {
        assert_eq!(read(&[], registry).unwrap(), [expected], "{registry}");
    }
    assert_eq!(endpoints(&HostsFiles::default(), "r.example").unwrap().len(), 1);
}

#[test]
fn the_directory_is_found_in_the_order_of_containerd() {
    let server = |name: &str| format!("server = \"{name}.example\"");
    let (spelt, plain, default) = (server("spelt"), server("plain"), server("default"));
    for (files, expected) in [
        (
            &[
                ("r.example_5000_/hosts.toml", spelt.as_str()),
                ("r.example:5000/hosts.toml", &plain),
                ("_default/hosts.toml", &default),
            ][..],
            "spelt",
        ),
        (&[("r.example:5000/hosts.toml", &plain), ("_default/hosts.toml", &default)], "plain"),
        (&[("_default/hosts.toml", &default)], "default"),
        (&[("other/hosts.toml", &plain)], "r.example:5000"),
    ] {
        let found = read(files, "r.example:5000").unwrap();
        assert!(found[0].starts_with(&format!("https://{expected}")), "{found:?} {expected}");
    }
}

#[test]
fn mirrors_keep_their_order_before_the_server() {
    let text = r#"
server = "https://upstream.example"
[host."http://z-mirror.example:5000"]
  capabilities = ["pull"]
[host."a-mirror.example"]
  capabilities = ["pull", "Resolve", "push"]
[host."https://b.example/proxy/v2/"]
[host."https://c.example/whole/path"]
  override_path = true
[host."https://d.example/some/../path"]
"#;
    assert_eq!(
        read(&[("r.example/hosts.toml", text)], "r.example").unwrap(),
        [
            "http://z-mirror.example:5000/v2 p",
            "https://a-mirror.example/v2 pr",
            "https://b.example/proxy/v2 prf",
            "https://c.example/whole/path prf",
            "https://d.example/path/v2 prf",
            "https://upstream.example/v2 prf",
        ]
    );
    let without_server = "[host.\"http://m.example\"]\n";
    assert_eq!(
        read(&[("docker.io/hosts.toml", without_server)], "docker.io").unwrap(),
        ["http://m.example/v2 prf", "https://registry-1.docker.io/v2 prf"]
    );
}

#[test]
fn a_server_alone_counts_from_containerd_2_on() {
    let (own, other) = ("https://r.example/v2 prf", "https://m.example/v2 prf");
    for (text, before, after) in [
        ("server = \"https://m.example\"", own, other),
        ("server = \"https://m.example\"\n[host]", other, other),
        ("skip_verify = 5\n[host]", "", ""),
        ("capabilities = [\"fly\"]", own, ""),
        ("server = ", "", ""),
    ] {
        let files = [("r.example/hosts.toml", text)];
        for (ignores, expected) in [(true, before), (false, after)] {
            let found =
                read_as(ignores, &files, "r.example").map_or_else(|_| String::new(), |all| all.concat());
            assert_eq!(found, expected, "{text:?} {ignores}");
        }
    }
}

#[test]
fn links_that_lead_nowhere_are_no_configuration_to_pass_over() {
    for (link, registry) in
        [("r.example", "r.example"), ("r.example_5000_", "r.example:5000"), ("_default", "r.example")]
    {
        let root = tempfile::tempdir().unwrap();
        let files = HostsFiles { dirs: vec![root.path().to_owned()], ..HostsFiles::default() };
        assert!(endpoints(&files, registry).is_ok());
        std::os::unix::fs::symlink("/nowhere/at/all", root.path().join(link)).unwrap();
        let error = endpoints(&files, registry).err().unwrap();
        assert!(error.kind == ErrorKind::Unsupported && error.message.contains(link), "{error}");
        std::fs::remove_file(root.path().join(link)).unwrap();
        std::fs::create_dir(root.path().join(link)).unwrap();
        assert!(endpoints(&files, registry).is_ok());
        std::os::unix::fs::symlink("/nowhere.toml", root.path().join(link).join("hosts.toml")).unwrap();
        let error = endpoints(&files, registry).err().unwrap();
        assert!(error.kind == ErrorKind::Unsupported && error.message.contains("hosts.toml"), "{error}");
    }
}

#[test]
fn tls_for_a_plain_server_means_tls_first() {
    for (text, expected) in [
        ("server = \"http://r.example:5000\"\nskip_verify = true", "https?://r.example:5000/v2 prf"),
        ("server = \"http://r.example:80\"\nskip_verify = true", "http://r.example:80/v2 prf"),
        ("server = \"http://r.example:5000\"", "http://r.example:5000/v2 prf"),
        ("skip_verify = true", "https://r.example/v2 prf"),
    ] {
        assert_eq!(read(&[("r.example/hosts.toml", text)], "r.example").unwrap(), [expected], "{text}");
    }
}

#[test]
fn unsupported_settings_are_left_to_the_runtime() {
    for text in [
        "server = ",
        "server = 5",
        "server = \"https://user:hunter2@r.example\"",
        "server = \"https://r.example?x=1\"",
        "server = \"httpx://r.example\"",
        "capabilities = [\"fly\"]",
        "capabilities = 1",
        "ca = \"missing.pem\"",
        "ca = 5",
        "client = [[\"a\", \"b\", \"c\"]]",
        "client = \"missing.pem\"",
        "skip_verify = \"yes\"",
        "override_path = 1\nserver = \"r.example\"",
        "dial_timeout = \"soon\"",
        "host = 1",
        "[host]\nx = 1",
        "[header]\nAuthorization = 5",
        "[header]\nAuthorization = \"hunter2\\u0000\"",
        "[header]\n\"bad name\" = \"hunter2\"",
        "[header]\nAuthorization = \"hunter2\" hunter2",
    ] {
        let error = read(&[("r.example/hosts.toml", text)], "r.example").unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported, "{text}: {error}");
        assert!(error.message.contains("hosts.toml"), "{text}: {error}");
        assert!(!error.message.contains("hunter2"), "{text}: {error}");
    }
    let large = format!("server = \"{}\"", "x".repeat(2 << 20));
    assert!(read(&[("r.example/hosts.toml", &large)], "r.example").is_err());
}

#[test]
fn headers_and_limits_of_a_host_are_its_own() {
    let root = tempfile::tempdir().unwrap();
    let text = r#"
[host."http://m.example"]
  dial_timeout = "1m30s"
[host."http://m.example".header]
  x-one = "1"
  x-two = ["2", "3"]
"#;
    std::fs::create_dir(root.path().join("r.example")).unwrap();
    std::fs::write(root.path().join("r.example/hosts.toml"), text).unwrap();
    let files = HostsFiles { dirs: vec![root.path().to_owned()], ..HostsFiles::default() };
    let all = endpoints(&files, "r.example").unwrap();
    let values: Vec<_> = all[0].headers.get_all("x-two").iter().collect();
    assert_eq!(values, ["2", "3"]);
    assert!(all[0].headers["x-one"].is_sensitive());
    assert_eq!((all[0].dial, all[1].dial), (Duration::from_secs(90), DIAL));
    assert!(all[1].headers.is_empty());
}

#[test]
fn a_fallback_names_both_ports() {
    for (server, tls, ports) in [
        ("https://r.example", false, &[443][..]),
        ("http://r.example", false, &[80]),
        // TLS first, because it's configured, and then plain HTTP.
        ("http://r.example", true, &[443, 80]),
        ("http://r.example:5000", true, &[5000, 5000]),
    ] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("r.example");
        std::fs::create_dir(&dir).unwrap();
        let skip = if tls { "skip_verify = true\n" } else { "" };
        std::fs::write(dir.join("hosts.toml"), format!("server = \"{server}\"\n{skip}")).unwrap();
        let files = HostsFiles { dirs: vec![root.path().to_owned()], ..HostsFiles::default() };
        let endpoint = endpoints(&files, "r.example").unwrap().remove(0);
        let named: Vec<HostPort> = endpoint.places().collect();
        let expected = ports.iter().map(|port| format!("http://R.example:{port}").parse().unwrap());
        let expected: Vec<HostPort> = expected.filter_map(|uri| HostPort::of(&uri)).collect();
        assert_eq!(named, expected, "{server}");
    }
}
