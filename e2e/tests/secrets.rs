//! Registry secrets: which one an image uses, all forms of a secret, and the reasons for unusable ones.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use prepull_api::crd::job::ImageSource;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Users that were authenticated for a repository.
fn users(registry: &Registry, repository: &str) -> BTreeSet<String> {
    registry.requests().for_repository(repository).users().into_iter().map(str::to_owned).collect()
}

fn only(user: &str) -> BTreeSet<String> {
    BTreeSet::from([user.to_owned()])
}

/// Starts a registry with these users, each with a password of its own.
async fn registry(users: &[&str]) -> Result<Registry> {
    users.iter().fold(Registry::start(), |start, user| start.user(user, &password(user))).await
}

#[tokio::test]
async fn the_best_matching_secret_wins() -> Result<()> {
    let users_of_one = ["own", "host", "team", "fallback"];
    let (one, two) = (registry(&users_of_one).await?, registry(&["fallback", "host"]).await?);
    let stage = Stage::with_edges(&["edge-1"]).await?;
    for user in users_of_one {
        stage.cluster.registry_secret("default", user, &[one.login(user)?]).await?;
    }
    let of_both = [one.login("fallback")?, two.login("fallback")?];
    stage.cluster.registry_secret("default", "fallback", &of_both).await?;
    let image = Image::small("secrets")?;
    let own = one.seed(&image, "team/own:v1")?;
    let by_host = one.seed(&image, "other/app:v1")?;
    let by_path = one.seed(&image, "team/app:v1")?;
    let by_none = two.seed(&image, "team/app:v1")?;

    let source = ImageSource {
        registry: Some(one.host().to_owned()),
        repository: "team/own".to_owned(),
        tag: Some("v1".to_owned()),
        image_secret: Some("default/own".to_owned()),
        ..ImageSource::default()
    };
    let status = stage
        .cluster
        .job("choice")
        .on(["edge-1"])
        .images([&by_host, &by_path, &by_none])
        .source(source)
        .registry_secret(one.host(), "default/host")
        .registry_secret(&one.image("team"), "default/team")
        .secret("default/fallback")
        .completes()
        .await?;

    for reference in [&own, &by_host, &by_path, &by_none] {
        let digest = status.image("edge-1", reference).and_then(|image| image.digest.as_deref());
        assert_eq!(digest, Some(image.digest()), "{reference}");
    }
    let chosen = ["team/own", "other/app", "team/app"].map(|repository| users(&one, repository));
    assert_eq!(chosen, ["own", "host", "team"].map(only));
    assert_eq!(users(&two, "team/app"), only("fallback"));
    Ok(())
}

#[tokio::test]
async fn one_secret_serves_several_registries() -> Result<()> {
    let (one, two) = (registry(&["alice", "broad"]).await?, registry(&["bob"]).await?);
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let team = one.image("team");
    let entries = [
        one.login("broad")?,
        two.login("bob")?,
        // The more specific entry is tried first and refused; then the one for the whole host is tried.
        (&*team, "alice", &*password("changed-since")),
    ];
    stage.cluster.registry_secret("default", "several", &entries).await?;
    let image = Image::small("several")?;
    let references = [
        one.seed(&image, "team/app:v1")?,
        one.seed(&image, "other/app:v1")?,
        two.seed(&image, "team/app:v1")?,
    ];
    let status = stage
        .cluster
        .job("several")
        .on(["edge-1"])
        .images(&references)
        .secret("default/several")
        .completes()
        .await?;
    for reference in &references {
        let image = status.image("edge-1", reference).context("not in the status")?;
        assert_eq!((image.status, image.reason.as_str()), (Tristate::True, ""), "{image:?}");
    }
    assert_eq!(users(&one, "team/app"), only("broad"));
    assert_eq!(users(&one, "other/app"), only("broad"));
    assert_eq!(users(&two, "team/app"), only("bob"));
    Ok(())
}

#[tokio::test]
async fn every_form_of_an_entry_authenticates() -> Result<()> {
    let registry = registry(&["dockercfg", "unpadded", "fields", "wildcard", "url"]).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let host = registry.host();
    let auth = |user: &str| STANDARD_NO_PAD.encode(format!("{user}:{}", password(user)));
    ensure!(auth("unpadded").len() % 4 != 0, "this one needs no padding");
    let port = host.rsplit_once(':').context("no port")?.1;
    let cluster = &stage.cluster;
    cluster.dockercfg_secret("default", "dockercfg", &json!({host: {"auth": auth("dockercfg")}})).await?;
    for (name, server, entry) in [
        ("unpadded", host.to_owned(), json!({"auth": auth("unpadded")})),
        ("fields", host.to_owned(), json!({"username": "fields", "password": password("fields")})),
        ("wildcard", format!("127.*.0.1:{port}"), json!({"auth": auth("wildcard")})),
        ("url", format!("https://{host}/v2/"), json!({"auth": auth("url")})),
    ] {
        cluster.docker_config_secret("default", name, &json!({"auths": {server: entry}})).await?;
    }
    let forms = ["dockercfg", "unpadded", "fields", "wildcard", "url"];
    let mut job = cluster.job("forms").on(["edge-1"]);
    for form in forms {
        registry.seed(&Image::small("forms")?, &format!("{form}:v1"))?;
        job = job.source(ImageSource {
            registry: Some(host.to_owned()),
            repository: form.to_owned(),
            tag: Some("v1".to_owned()),
            image_secret: Some(format!("default/{form}")),
            ..ImageSource::default()
        });
    }
    let status = job.tolerate("0").completes().await?;
    for form in forms {
        let reference = registry.image(&format!("{form}:v1"));
        ensure!(
            stage.edge("edge-1")?.has_image(&reference).await?,
            "{:?}",
            status.image("edge-1", &reference)
        );
        assert_eq!(users(&registry, form), only(form));
    }
    Ok(())
}

#[tokio::test]
async fn a_short_name_uses_docker_hubs_legacy_secret() -> Result<()> {
    // The registry has the name docker.io; only the containerds of this test find it on loopback.
    let hub = Registry::start().with_host("docker.io").user("me", &password("me")).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let login = ("https://index.docker.io/v1/", "me", &*password("me"));
    stage.cluster.registry_secret("default", "hub", &[login]).await?;
    let image = Image::small("hub")?;
    hub.seed(&image, "library/nginx:1.25")?;
    hub.seed(&image, "me/private:latest")?;

    let job = stage.cluster.job("hub").images(["nginx:1.25", "me/private"]).secret("default/hub");
    let status = job.on(["edge-1"]).completes().await?;
    for (name, pulled) in
        [("nginx:1.25", "docker.io/library/nginx:1.25"), ("me/private", "docker.io/me/private:latest")]
    {
        let of_image = status.image("edge-1", name).context("the status has the job's own name")?;
        assert_eq!(of_image.pulled_image, pulled);
        assert_eq!(of_image.digest.as_deref(), Some(image.digest()));
        // Under the name that's looked up for a pod with the short name.
        ensure!(stage.edge("edge-1")?.has_image(pulled).await?, "{pulled}");
    }
    assert_eq!((users(&hub, "library/nginx"), users(&hub, "me/private")), (only("me"), only("me")));
    Ok(())
}

#[tokio::test]
async fn an_identity_token_is_exchanged() -> Result<()> {
    let refresh = password("refresh-token");
    let tokens = TokenServer::start("oauth-user", &refresh).await?;
    let registry = Registry::start().tokens_of(&tokens).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    // In the form of `docker login`: the user in `auth`, without a password.
    let entry = json!({"auth": STANDARD_NO_PAD.encode("oauth-user:"), "identitytoken": refresh});
    let config = json!({"auths": {registry.host(): entry}});
    stage.cluster.docker_config_secret("default", "identity", &config).await?;
    let config = json!({"auths": {registry.host(): {"auth": STANDARD_NO_PAD.encode(format!("oauth-user:{refresh}"))}}});
    stage.cluster.docker_config_secret("default", "as-password", &config).await?;
    let image = Image::small("identity")?;
    let (good, bad) = (registry.seed(&image, "team/good:v1")?, registry.seed(&image, "team/bad:v1")?);

    let job = stage.cluster.job("identity").images([&good]).secret("default/identity").on(["edge-1"]);
    let status = job.completes().await?;
    let digest = status.image("edge-1", &good).and_then(|image| image.digest.as_deref());
    assert_eq!(digest, Some(image.digest()));
    assert_eq!(users(&registry, "team/good"), only("oauth-user"));
    let grants = tokens.grants();
    ensure!(
        grants.iter().all(|grant| grant.given && grant.grant_type == "refresh_token"),
        "it was asked otherwise: {grants:?}"
    );
    assert_eq!(grants[0].scope, "repository:team/good:pull");

    // The server doesn't accept the token as a password, so the first job must have sent it as a token.
    let job = stage.cluster.job("as-password").images([&bad]).secret("default/as-password").on(["edge-1"]);
    let status = job.fails().await?;
    let reason = &status.image("edge-1", &bad).context("not in the status")?.reason;
    ensure!(reason.contains("401") && !reason.contains(CANARY), "{reason}");
    Ok(())
}

#[tokio::test]
async fn a_bad_secret_fails_only_its_image() -> Result<()> {
    // A registry without users, from which an anonymous pull would succeed.
    let open = Registry::start().await?;
    let locked = registry(&["alice"]).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let cluster = &stage.cluster;
    cluster.registry_secret("default", "good", &[locked.login("alice")?]).await?;
    let elsewhere = [("b.example:5000", "u", &*password("u")), ("a.example/team", "u", &*password("u"))];
    cluster.registry_secret("default", "elsewhere", &elsewhere).await?;
    let host = open.host();
    let broken = json!({"auths": {host: {"auth": "%%%"}}});
    cluster.docker_config_secret("default", "broken-entry", &broken).await?;
    cluster.docker_config_secret("default", "no-auths", &json!({"auths": [password("u")]})).await?;
    cluster.docker_config_secret("default", "no-entries", &json!({"auths": {}})).await?;
    let truncated: [(&str, &[u8]); 1] = [(".dockerconfigjson", b"{\"auths\": {")];
    cluster.secret("default", "opaque", "Opaque", &truncated).await?;

    let cases = [
        ("missing", "secret default/missing does not exist".to_owned()),
        // Without the registries that it has instead: those are only in the log of cloudcore.
        ("elsewhere", format!("secret default/elsewhere has no entry for {host}/elsewhere")),
        ("no-entries", format!("secret default/no-entries has no entry for {host}/no-entries")),
        (
            "broken-entry",
            format!("secret default/broken-entry: the entry for {host} has an auth that is not base64"),
        ),
        (
            "no-auths",
            "secret default/no-auths: .dockerconfigjson must be a JSON object with an object named auths in it"
                .to_owned(),
        ),
        ("opaque", "secret default/opaque: type \"Opaque\" holds no registry credentials".to_owned()),
    ];
    let good = locked.seed(&Image::small("good")?, "good:v1")?;
    let mut job = cluster.job("bad-secrets").on(["edge-1"]).retries(3).tolerate("0");
    for (secret, _) in &cases {
        open.seed(&Image::small("bad-secrets")?, &format!("{secret}:v1"))?;
        job = job.source(ImageSource {
            registry: Some(host.to_owned()),
            repository: (*secret).to_owned(),
            tag: Some("v1".to_owned()),
            image_secret: Some(format!("default/{secret}")),
            ..ImageSource::default()
        });
    }
    let status = job.images([&good]).secret("default/good").fails().await?;

    for (secret, message) in &cases {
        let image =
            status.image("edge-1", &open.image(&format!("{secret}:v1"))).context("not in the status")?;
        assert_eq!((image.status, image.attempts), (Tristate::False, 0), "nothing was tried: {image:?}");
        ensure!(image.reason.contains(message), "{message:?} is not in {:?}", image.reason);
        ensure!(!image.reason.contains(CANARY) && !image.reason.contains("a.example"), "{image:?}");
    }
    assert_eq!(open.requests().0, [], "an anonymous request");
    // The other images were pulled.
    let image = status.image("edge-1", &good).context("not in the status")?;
    assert_eq!(image.status, Tristate::True, "{image:?}");
    assert_eq!(users(&locked, "good"), only("alice"));

    // Without any secret the image is pulled anonymously.
    let anonymous = cluster.job("anonymous").on(["edge-1"]).images([open.image("missing:v1")]);
    anonymous.completes().await?;
    ensure!(!open.requests().for_repository("missing").blob_fetches().is_empty());
    Ok(())
}

#[tokio::test]
async fn a_secret_never_stays_on_the_edge() -> Result<()> {
    let registry = registry(&["alice"]).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let reference = registry.seed(&Image::small("kept")?, "team/kept:v1")?;
    let job = |name: &str| {
        stage.cluster.job(name).on(["edge-1"]).images([&reference]).secret("default/later").policy("Always")
    };
    let status = job("before").fails().await?;
    let reason = &status.image("edge-1", &reference).context("not in the status")?.reason;
    assert_eq!(reason, "secret default/later does not exist");

    stage.cluster.registry_secret("default", "later", &[registry.login("alice")?]).await?;
    // cloudcore keeps a secret for a few seconds at most.
    tokio::time::sleep(std::time::Duration::from_secs(6)).await;
    job("after").completes().await?;
    assert_eq!(users(&registry, "team/kept"), only("alice"));

    let dir = stage.edge("edge-1")?.state_dir();
    ensure!(dir.join("pki/client.key").exists(), "the agent keeps its state elsewhere");
    let found = std::process::Command::new("grep").args(["-rlaF", CANARY]).arg(dir).output()?;
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "a credential in the state directory");
    Ok(())
}
