//! Redirects that we follow, and those that we refuse.

use std::collections::BTreeMap;

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_registry::manifest::Descriptor;
use prepull_registry::{ErrorKind, Proxies, digest::sha256};

use crate::server::{Server, at, at_with, client, client_with, drain, reply, repository, write_hosts};

const CONTENT: &[u8] = b"0123456789";

fn blob() -> Descriptor {
    Descriptor { digest: sha256(CONTENT), size: CONTENT.len() as u64, ..Descriptor::default() }
}

#[tokio::test]
async fn redirects_keep_the_range_and_drop_credentials() {
    let storage = Server::start(|_| reply(206, &[("Content-Range", "bytes 4-9/10")], "456789")).await;
    let to = format!("http://{}/blob?X-Amz-Signature=hunter2", storage.at);
    let registry = Server::start(move |seen| match seen.header("authorization") {
        "" => reply(401, &[("WWW-Authenticate", "Basic")], ""),
        _ => reply(307, &[("Location", &to)], ""),
    })
    .await;
    let hosts = tempfile::tempdir().unwrap();
    let text = format!("server = \"http://{}\"\n[header]\nx-own = \"canary\"\n", registry.at);
    write_hosts(hosts.path(), "r.example", &text);
    let credential = RegistryCredential {
        username: Sensitive::new("alice"),
        password: Sensitive::new("p"),
        ..RegistryCredential::default()
    };
    let repository = repository(&client(hosts.path()), "r.example/team/app:v1", Some(&credential));
    let stream = repository.fetch_blob(&blob(), 4, &[]).await.unwrap();
    assert_eq!((stream.offset(), stream.host().to_string()), (4, registry.at.to_string()));
    assert_eq!(drain(stream).await, (b"456789".to_vec(), None));
    assert_eq!(registry.seen()[1].header("x-own"), "canary");
    let seen = &storage.seen()[0];
    assert_eq!(
        (seen.header("range"), seen.header("authorization"), seen.header("x-own")),
        ("bytes=4-", "", "")
    );
}

#[tokio::test]
async fn an_expired_redirect_keeps_the_credential() {
    for status in [401, 403, 404] {
        let storage = Server::start(move |_| reply(status, &[("WWW-Authenticate", "Basic")], "")).await;
        let to = format!("http://{}/blob", storage.at);
        let registry = Server::start(move |_| reply(307, &[("Location", &to)], "")).await;
        let credential = RegistryCredential {
            username: Sensitive::new("alice"),
            password: Sensitive::new("p"),
            ..RegistryCredential::default()
        };
        let error = at_with(&registry, Some(&credential)).fetch_blob(&blob(), 0, &[]).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Server { retry_after: None }, "{status}: {error}");
        assert_eq!(storage.seen().len(), 1, "shown nothing");
    }
}

#[tokio::test]
async fn redirects_in_a_loop_come_to_an_end() {
    let registry = Server::start(|seen| reply(302, &[("Location", &seen.target)], "")).await;
    let error = at(&registry).fetch_blob(&blob(), 0, &[]).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert!(error.message.contains("more than 10 times"), "{error}");
    assert_eq!(registry.seen().len(), 11);
}

#[tokio::test]
async fn no_redirect_leads_to_metadata_services_or_out_of_http() {
    for to in [
        "http://169.254.169.254/latest/meta-data/iam",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1]/",
        "http://[::ffff:a9fe:a9fe]/",
        "http://100.100.100.200/",
        "http://[fd00:ec2::254]/",
        "http://0.0.0.0:80/",
        "http://0/",
        "file:///etc/passwd",
        "unix:///run/containerd.sock",
        "http://user:pass@127.0.0.1/",
        "//169.254.169.254/x",
        "",
    ] {
        let registry = Server::start(move |_| match to {
            "" => reply(302, &[], ""),
            to => reply(302, &[("Location", to)], ""),
        })
        .await;
        let error = at(&registry).fetch_blob(&blob(), 0, &[]).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{to}: {error}");
        assert!(!error.message.contains("meta-data") && !error.message.contains("pass@"), "{error}");
    }
}

/// Behind a proxy a registry is not on loopback, wherever the proxy is: what it names must not be there.
#[tokio::test]
async fn a_registry_elsewhere_does_not_lead_to_the_node_itself() {
    let secret = Server::start(|_| reply(200, &[], CONTENT)).await;
    for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "127.1"] {
        let to = format!("http://{host}:{}/blob", secret.at.port());
        let proxy = Server::start(move |_| reply(302, &[("Location", &to)], "")).await;
        let through = format!("http://{}", proxy.at);
        // Of the last one no program of this test would know that it is an address; the resolver does.
        let variables = BTreeMap::from([("HTTP_PROXY", through), ("NO_PROXY", "127.1".to_owned())]);
        let proxies = Proxies::from_variables(|name| variables.get(name).cloned());
        let hosts = tempfile::tempdir().unwrap();
        write_hosts(hosts.path(), "r.example", "server = \"http://r.example\"\n");
        let repository = repository(&client_with(hosts.path(), proxies), "r.example/team/app:v1", None);
        let error = repository.fetch_blob(&blob(), 0, &[]).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{host}: {error}");
        assert!(error.message.contains("loopback"), "{host}: {error}");
        assert!(proxy.seen()[0].target.starts_with("http://r.example/v2/"), "{:?}", proxy.seen());
    }
    assert_eq!(secret.seen().len(), 0);
}

#[tokio::test]
async fn no_name_leads_a_proxy_to_the_node_itself() {
    for (host, class) in
        [("127.1", Some("loopback")), ("2852039166", Some("link-local")), ("storage.invalid", None)]
    {
        let to = format!("http://{host}/blob");
        let proxy = Server::start(move |seen| match seen.target.as_str() {
            target if target == to => reply(200, &[], CONTENT),
            _ => reply(302, &[("Location", &to)], ""),
        })
        .await;
        let through = format!("http://{}", proxy.at);
        let proxies = Proxies::from_variables(|name| (name == "HTTP_PROXY").then(|| through.clone()));
        let hosts = tempfile::tempdir().unwrap();
        write_hosts(hosts.path(), "r.example", "server = \"http://r.example\"\n");
        let repository = repository(&client_with(hosts.path(), proxies), "r.example/team/app:v1", None);
        match (repository.fetch_blob(&blob(), 0, &[]).await, class) {
            (Ok(stream), None) => assert_eq!(drain(stream).await, (CONTENT.to_vec(), None)),
            (Err(error), Some(class)) => {
                assert_eq!(error.kind, ErrorKind::Protocol, "{host}: {error}");
                assert!(error.message.contains(class), "{host}: {error}");
                assert_eq!(proxy.seen().len(), 1, "{host}");
            }
            (fetched, _) => panic!("{host}: {:?}", fetched.err()),
        }
    }
}

#[tokio::test]
async fn a_local_registry_may_redirect_locally() {
    let storage = Server::start(|_| reply(200, &[], CONTENT)).await;
    let to = format!("http://localhost:{}/blob", storage.at.port());
    let registry = Server::start(move |_| reply(302, &[("Location", &to)], "")).await;
    let stream = at(&registry).fetch_blob(&blob(), 0, &[]).await.unwrap();
    assert_eq!(drain(stream).await, (CONTENT.to_vec(), None));
}

/// A mirror in hosts.toml says nothing about what else listens where it is.
#[tokio::test]
async fn mirrors_open_only_their_own_port() {
    let mirror = Server::start(|seen| match seen.target.as_str() {
        "/blob" => reply(200, &[], CONTENT),
        _ => reply(404, &[], ""),
    })
    .await;
    let secret = Server::start(|_| reply(200, &[], CONTENT)).await;
    let (to_mirror, to_secret) = (format!("http://{}/blob", mirror.at), format!("http://{}/blob", secret.at));
    let registry = Server::start(move |seen| {
        let realm = format!("Bearer realm=\"{to_secret}\"");
        match (seen.method.as_str(), seen.target.split('/').nth(4).unwrap()) {
            (_, "mirror") => reply(302, &[("Location", &to_mirror)], ""),
            (_, "realm") => reply(401, &[("WWW-Authenticate", &realm)], ""),
            ("HEAD", "upload") => reply(404, &[], ""),
            ("POST", "upload") => reply(202, &[("Location", &to_secret)], ""),
            _ => reply(302, &[("Location", &to_secret)], ""),
        }
    })
    .await;
    // Behind a proxy, the registry itself isn't on loopback.
    let through = format!("http://{}", registry.at);
    let proxies = Proxies::from_variables(|name| (name == "HTTP_PROXY").then(|| through.clone()));
    let hosts = tempfile::tempdir().unwrap();
    let text = format!("server = \"http://r.example\"\n[host.\"http://{}\"]\n", mirror.at);
    write_hosts(hosts.path(), "r.example", &text);
    let client = client_with(hosts.path(), proxies);
    for image in ["redirect", "realm"] {
        let repository = repository(&client, &format!("r.example/{image}/app:v1"), None);
        let error = repository.fetch_blob(&blob(), 0, &[]).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{image}: {error}");
        assert!(error.message.contains("loopback"), "{image}: {error}");
    }
    let open = || Ok(Box::new(CONTENT) as Box<dyn std::io::Read + Send>);
    let error = repository(&client, "r.example/upload/app:v1", None).push_blob(&blob(), &open).await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::Protocol);
    assert_eq!(secret.seen().len(), 0);
    // The mirror's own port is named.
    let stream = repository(&client, "r.example/mirror/app:v1", None).fetch_blob(&blob(), 0, &[]).await;
    assert_eq!(drain(stream.unwrap()).await, (CONTENT.to_vec(), None));
}
