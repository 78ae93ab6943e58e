//! Credentials and tokens that a registry and its token server may see.

use std::time::Duration;

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_registry::manifest::{Descriptor, OCI_MANIFEST};
use prepull_registry::{ErrorKind, digest::sha256};

use crate::server::{Reply, Seen, Server, at_with, client, reply, repository, write_hosts};

const SECRET: &str = "hunter2-canary";

fn manifest() -> Reply {
    let digest = sha256(b"m");
    reply(
        200,
        &[("Docker-Content-Digest", &digest), ("Content-Type", OCI_MANIFEST), ("Content-Length", "1")],
        "",
    )
}

fn refuse(challenge: &str) -> Reply {
    reply(401, &[("WWW-Authenticate", challenge)], "")
}

fn password() -> RegistryCredential {
    RegistryCredential {
        server: "r.example".to_owned(),
        username: Sensitive::new("alice"),
        password: Sensitive::new(SECRET),
        ..RegistryCredential::default()
    }
}

fn identity_token() -> RegistryCredential {
    RegistryCredential { identity_token: Sensitive::new(SECRET), ..RegistryCredential::default() }
}

fn registry_token() -> RegistryCredential {
    RegistryCredential { registry_token: Sensitive::new(SECRET), ..RegistryCredential::default() }
}

/// A registry that is its own token server: each path after `/token` is another kind.
async fn with_tokens(kind: &'static str) -> Server {
    Server::start(move |seen| {
        if seen.target.starts_with("/token") {
            return give(kind, seen);
        }
        if seen.header("authorization") == "Bearer given" {
            return manifest();
        }
        let host = seen.header("host");
        refuse(&format!(
            r#"Bearer realm="http://{host}/token",service="the service",scope="repository:team/app:pull""#
        ))
    })
    .await
}

fn give(kind: &str, seen: &Seen) -> Reply {
    let token = || reply(200, &[], r#"{"token":"given","expires_in":300}"#);
    match (kind, seen.method.as_str()) {
        ("get", "POST") => reply(405, &[], ""),
        ("get", _) if seen.header("authorization") == "Basic YWxpY2U6aHVudGVyMi1jYW5hcnk=" => token(),
        ("post", "POST") if seen.body.contains("=hunter2-canary") => {
            reply(200, &[], r#"{"access_token":"given","expires_in":300}"#)
        }
        ("anonymous", "GET") if seen.header("authorization").is_empty() => token(),
        ("empty", _) => reply(200, &[], "{}"),
        ("huge", _) => reply(200, &[], format!(r#"{{"token":"{}"}}"#, "x".repeat(1 << 20))),
        ("redirecting", _) => reply(307, &[("Location", "http://elsewhere.example/token")], ""),
        ("busy", _) => reply(429, &[("Retry-After", "7")], ""),
        ("restarting", _) => reply(503, &[("Retry-After", "7")], ""),
        _ => reply(403, &[], ""),
    }
}

#[tokio::test]
async fn readers_with_different_limits_share_tokens() {
    let server = with_tokens("post").await;
    let repository = at_with(&server, Some(&password()));
    for ahead in [Some(16 << 10), None, Some(32 << 10), Some(16 << 10)] {
        repository.clone().receiving_ahead(ahead).resolve().await.unwrap();
    }
    let asked = server.seen().into_iter().filter(|seen| seen.target.starts_with("/token")).count();
    assert_eq!(asked, 1);
}

#[tokio::test]
async fn each_kind_of_credential_gets_its_token_once() {
    for (kind, credential, asked) in [
        ("get", Some(password()), vec!["POST", "GET"]),
        ("post", Some(password()), vec!["POST"]),
        ("post", Some(identity_token()), vec!["POST"]),
        ("anonymous", None, vec!["GET"]),
    ] {
        let server = with_tokens(kind).await;
        let repository = at_with(&server, credential.as_ref());
        for _ in 0..3 {
            repository.resolve().await.unwrap();
        }
        let tokens: Vec<Seen> =
            server.seen().into_iter().filter(|seen| seen.target.starts_with("/token")).collect();
        let methods: Vec<_> = tokens.iter().map(|seen| seen.method.as_str()).collect();
        assert_eq!(methods, asked, "{kind}");
        if let Some(form) = tokens.iter().find(|seen| seen.method == "POST") {
            assert!(
                form.body.contains("scope=repository%3Ateam%2Fapp%3Apull&service=the%20service"),
                "{}",
                form.body
            );
        }
        if kind == "post" && credential == Some(identity_token()) {
            assert!(tokens[0].body.contains("grant_type=refresh_token&refresh_token="), "{}", tokens[0].body);
        }
        if kind == "anonymous" {
            let query = "/token?service=the%20service&scope=repository%3Ateam%2Fapp%3Apull";
            assert_eq!(tokens[0].target, query);
        }
    }
}

#[tokio::test]
async fn a_password_is_shown_only_after_it_was_asked_for() {
    let server = Server::start(|seen| match seen.header("authorization") {
        "Basic YWxpY2U6aHVudGVyMi1jYW5hcnk=" => manifest(),
        "" => refuse(r#"Basic realm="r""#),
        _ => reply(403, &[], ""),
    })
    .await;
    let repository = at_with(&server, Some(&password()));
    repository.resolve().await.unwrap();
    repository.resolve().await.unwrap();
    let shown: Vec<_> = server.seen().iter().map(|seen| seen.header("authorization").is_empty()).collect();
    assert_eq!(shown, [true, false, false]);
    assert_eq!(at_with(&server, None).resolve().await.unwrap_err().kind, ErrorKind::Unauthorized);
}

#[tokio::test]
async fn a_registry_token_is_shown_as_it_is() {
    let server = Server::start(|seen| match seen.header("authorization") {
        "Bearer hunter2-canary" => manifest(),
        _ => refuse(r#"Bearer realm="http://127.0.0.1:1/token""#),
    })
    .await;
    at_with(&server, Some(&registry_token())).resolve().await.unwrap();
    assert_eq!(server.seen().len(), 1);
    let wrong =
        RegistryCredential { registry_token: Sensitive::new("wrong"), ..RegistryCredential::default() };
    assert_eq!(at_with(&server, Some(&wrong)).resolve().await.unwrap_err().kind, ErrorKind::Unauthorized);
}

#[tokio::test]
async fn a_token_that_has_ended_is_replaced_in_the_middle() {
    let server = Server::start(|seen| {
        if seen.target.starts_with("/token") {
            // Ends within the margin: it is not used again.
            return reply(200, &[], r#"{"token":"given","expires_in":5}"#);
        }
        match seen.header("authorization") {
            "Bearer given" => manifest(),
            _ => refuse(&format!(r#"Bearer realm="http://{}/token""#, seen.header("host"))),
        }
    })
    .await;
    let repository = at_with(&server, None);
    repository.resolve().await.unwrap();
    repository.resolve().await.unwrap();
    let tokens = server.seen().iter().filter(|seen| seen.target.starts_with("/token")).count();
    assert_eq!(tokens, 2);
}

#[tokio::test]
async fn a_refused_token_is_retried_once() {
    let server = Server::start(|seen| {
        if seen.target.starts_with("/token") {
            return reply(200, &[], r#"{"token":"given"}"#);
        }
        refuse(&format!(r#"Bearer realm="http://{}/token",error="insufficient_scope""#, seen.header("host")))
    })
    .await;
    let error = at_with(&server, Some(&password())).resolve().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unauthorized);
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn token_servers_are_bounded_and_cannot_redirect() {
    for (kind, expected) in [
        ("empty", ErrorKind::Protocol),
        ("huge", ErrorKind::Protocol),
        ("redirecting", ErrorKind::Unsupported),
        ("none", ErrorKind::Unauthorized),
        ("busy", ErrorKind::RateLimited { retry_after: Some(Duration::from_secs(7)) }),
        ("restarting", ErrorKind::Server { retry_after: Some(Duration::from_secs(7)) }),
    ] {
        let server = with_tokens(kind).await;
        let error = at_with(&server, Some(&password())).resolve().await.unwrap_err();
        assert_eq!(error.kind, expected, "{kind}: {error}");
        assert!(!error.message.contains(SECRET), "{error}");
    }
}

/// A registry that lets everyone pull, with a token server that refuses every credential.
async fn refuses_credentials(status: u16) -> Server {
    Server::start(move |seen| match (seen.target.starts_with("/token"), seen.header("authorization")) {
        (true, "") if seen.method == "GET" => reply(200, &[], r#"{"token":"given"}"#),
        (true, _) => reply(status, &[], r#"{"error":"invalid_grant"}"#),
        (false, "Bearer given") => manifest(),
        (false, _) => refuse(&format!(r#"Bearer realm="http://{}/token""#, seen.header("host"))),
    })
    .await
}

#[tokio::test]
async fn refused_identity_tokens_end_the_pull() {
    for (status, kind) in [
        (400, ErrorKind::Unauthorized),
        (401, ErrorKind::Unauthorized),
        (404, ErrorKind::Server { retry_after: None }),
        (405, ErrorKind::Server { retry_after: None }),
    ] {
        let server = refuses_credentials(status).await;
        let error = at_with(&server, Some(&identity_token())).resolve().await.unwrap_err();
        assert_eq!(error.kind, kind, "{status}: {error}");
        assert!(error.message.contains(&format!("it answers {status}")), "{error}");
        let methods: Vec<_> = server.seen().into_iter().map(|seen| seen.method).collect();
        assert_eq!(methods, ["HEAD", "POST"], "{status}");
        // Without any credential it's open.
        at_with(&server, None).resolve().await.unwrap();
    }
}

#[tokio::test]
async fn an_empty_credential_is_never_anonymous() {
    let server = refuses_credentials(401).await;
    let user = RegistryCredential { username: Sensitive::new("alice"), ..RegistryCredential::default() };
    let secret = RegistryCredential { password: Sensitive::new(SECRET), ..RegistryCredential::default() };
    for credential in [user, secret] {
        let error = at_with(&server, Some(&credential)).resolve().await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unauthorized, "{error}");
        assert!(error.message.contains("no identity token"), "{error}");
    }
    assert!(server.seen().iter().all(|seen| seen.method == "HEAD"), "{:?}", server.seen());
}

#[tokio::test]
async fn realms_that_lead_astray_are_not_asked() {
    for realm in [
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/token",
        "http://100.100.100.200/token",
        "http://0.0.0.0/token",
        "http://[::ffff:169.254.169.254]/token",
        "file:///etc/passwd",
        "http://user:pass@127.0.0.1/token",
        "",
    ] {
        let server = Server::start(move |_| refuse(&format!(r#"Bearer realm="{realm}""#))).await;
        let error = at_with(&server, Some(&password())).resolve().await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{realm}: {error}");
        assert!(!error.message.contains("pass@"), "{error}");
    }
    let server =
        Server::start(|_| refuse(&format!(r#"Bearer realm="http://a",scope="{}""#, "x".repeat(9000)))).await;
    assert_eq!(at_with(&server, None).resolve().await.unwrap_err().kind, ErrorKind::Protocol);
}

#[tokio::test]
async fn headers_stay_at_their_origin() {
    let other = Server::start(|_| reply(200, &[], r#"{"token":"given"}"#)).await;
    let elsewhere = format!("http://{}/token", other.at);
    // With TLS settings the registry is asked by TLS first, and has its plain scheme only after that.
    for (own, realm, tls) in
        [(true, None, ""), (true, None, "skip_verify = true"), (false, Some(elsewhere), "")]
    {
        let registry = Server::start(move |seen| {
            let here = format!("http://{}/token", seen.header("host"));
            match seen.header("authorization") {
                _ if seen.target.starts_with("/token") => reply(200, &[], r#"{"token":"given"}"#),
                "Bearer given" => manifest(),
                _ => refuse(&format!(r#"Bearer realm="{}""#, realm.as_ref().unwrap_or(&here))),
            }
        })
        .await;
        let hosts = tempfile::tempdir().unwrap();
        let text = format!("server = \"http://{}\"\n{tls}\n[header]\nx-own = \"canary\"\n", registry.at);
        write_hosts(hosts.path(), "r.example", &text);
        repository(&client(hosts.path()), "r.example/team/app:v1", None).resolve().await.unwrap();
        let asked = if own { registry.seen() } else { other.seen() };
        let token = asked.iter().find(|seen| seen.target.starts_with("/token")).unwrap();
        assert_eq!(token.header("x-own"), if own { "canary" } else { "" }, "{tls}");
    }
}

#[tokio::test]
async fn a_token_goes_only_to_its_endpoint() {
    let mirror = Server::start(|seen| {
        if seen.target.starts_with("/token") {
            reply(200, &[], r#"{"token":"given"}"#)
        } else if seen.header("authorization").is_empty() {
            refuse(&format!(r#"Bearer realm="http://{}/token""#, seen.header("host")))
        } else {
            reply(404, &[], "")
        }
    })
    .await;
    let registry = Server::start(|_| manifest()).await;
    let hosts = tempfile::tempdir().unwrap();
    let text = format!("server = \"http://{}\"\n[host.\"http://{}\"]\n", registry.at, mirror.at);
    write_hosts(hosts.path(), "r.example", &text);
    let client = client(hosts.path());
    repository(&client, "r.example/team/app:v1", Some(&password())).resolve().await.unwrap();
    assert_eq!(mirror.seen().len(), 3);
    assert_eq!(registry.seen().len(), 1);
    assert_eq!(registry.seen()[0].header("authorization"), "");
}

#[tokio::test]
async fn another_credential_and_another_repository_get_tokens_of_their_own() {
    let server = with_tokens("anonymous").await;
    let hosts = tempfile::tempdir().unwrap();
    write_hosts(hosts.path(), "r.example", &format!("server = \"http://{}\"\n", server.at));
    let client = client(hosts.path());
    for image in ["r.example/team/app:v1", "r.example/team/app:v2", "r.example/team/other:v1"] {
        repository(&client, image, None).resolve().await.unwrap();
    }
    let tokens = server.seen().iter().filter(|seen| seen.target.starts_with("/token")).count();
    assert_eq!(tokens, 2);
    // With a credential nothing of the anonymous one is used.
    let error = repository(&client, "r.example/team/app:v1", Some(&password())).resolve().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unauthorized);
}

#[tokio::test]
async fn no_error_and_no_debug_print_shows_a_credential() {
    for status in [400, 401, 403, 500] {
        let server = Server::start(move |seen| {
            if seen.target.starts_with("/token") {
                return reply(status, &[], format!("{} {}", seen.body, seen.header("authorization")));
            }
            refuse(&format!(r#"Bearer realm="http://{}/token?sig={SECRET}""#, seen.header("host")))
        })
        .await;
        let blob = Descriptor { digest: sha256(b"x"), size: 1, ..Descriptor::default() };
        let error = at_with(&server, Some(&password())).fetch_blob(&blob, 0, &[]).await.unwrap_err();
        assert!(!format!("{error:?}").contains(SECRET), "{error:?}");
        assert!(!format!("{error:?}").contains("YWxpY2U6"), "{error:?}");
    }
}
