//! Tests of credential providers beside the key of a task.

use super::*;
use crate::images::providers::tests::Does::{self, Fails, Gives, Nothing};
use crate::images::providers::tests::FakeProviders;

const KEEP: u64 = 3600;

/// Runs a task with images in `r.example`, on a node with these providers.
async fn run_with(fake: &Arc<Fake>, providers: &FakeProviders, execution: Execution) -> TaskEnd {
    let executor = Arc::into_inner(executor(fake)).unwrap();
    let executor = executor.with_credential_providers(providers.providers.clone());
    start(&Arc::new(executor), execution).end.await.unwrap()
}

fn provider(acts: &[Does]) -> FakeProviders {
    FakeProviders::new([("vault", "r.example", acts)])
}

fn passwords(fake: &Fake) -> Vec<Option<String>> {
    fake.state.lock().unwrap().passwords.clone()
}

fn some(passwords: &[&str]) -> Vec<Option<String>> {
    passwords.iter().map(|password| Some((*password).to_owned())).collect()
}

/// A task of one image that accepts only this password.
fn locked(password: &'static str) -> (Arc<Fake>, Execution) {
    let fake = Fake::new();
    fake.script("r.example/a:1", vec![Act::Password(password); 9]);
    (fake, execution(vec![always("r.example/a:1")]))
}

fn with_key(mut execution: Execution, key: Arc<PullKey>) -> Execution {
    execution.terms.keys = vec![key];
    execution
}

#[tokio::test(start_paused = true)]
async fn providers_serve_without_a_secret() {
    let (fake, execution) = locked("right");
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let end = run_with(&fake, &providers, execution).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert_eq!(passwords(&fake), some(&["right"]), "no anonymous pull");
    assert_eq!(providers.runs(), ["vault r.example/a"]);
}

#[tokio::test(start_paused = true)]
async fn unneeded_providers_are_not_run() {
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let (fake, execution) = locked("own");
    let end = run_with(&fake, &providers, with_key(execution, credentials(&["old", "own"]))).await;
    assert_eq!(outcomes(&end), [New]);
    let (fake, mut present) = locked("own");
    fake.state.lock().unwrap().present.push("r.example/a:1".to_owned());
    present.task.images[0].policy = PullPolicy::IfNotPresent;
    assert_eq!(outcomes(&run_with(&fake, &providers, present).await), [Already]);
    let (fake, unavailable) = locked("right");
    let unavailable =
        with_key(unavailable, Arc::new(PullKey::Unavailable { reason: "no secret".to_owned() }));
    assert_eq!(outcomes(&run_with(&fake, &providers, unavailable).await), [Failed]);
    // An unreachable registry has refused nothing.
    let (fake, broken) = locked("right");
    fake.script("r.example/a:1", [Act::Fail(ErrorClass::Transient, "connection refused")]);
    let end = run_with(&fake, &providers, with_key(broken, credentials(&["own"]))).await;
    assert_eq!(end.images[0].reason, "connection refused");
    assert_eq!(providers.runs(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn providers_follow_a_refused_secret() {
    let (fake, execution) = locked("right");
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let end = run_with(&fake, &providers, with_key(execution, credentials(&["old", "older"]))).await;
    assert_eq!(outcomes(&end), [New]);
    assert_eq!(passwords(&fake), some(&["old", "older", "right"]));

    let (fake, execution) = locked("right");
    let hidden = Act::Fail(ErrorClass::NotFound, "not found");
    fake.script("r.example/a:1", [hidden, Act::Password("right")]);
    let end = run_with(&fake, &providers, with_key(execution, credentials(&["other"]))).await;
    assert_eq!(outcomes(&end), [New]);
}

#[tokio::test(start_paused = true)]
async fn what_a_provider_opens_is_not_shared() {
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    for (key, expected) in [(credentials(&["old"]), &[true, false][..]), (credentials(&["right"]), &[true])] {
        let (fake, mut execution) = locked("right");
        execution.terms.download = Arc::new(DownloadTerms { share: true, ..DownloadTerms::default() });
        assert_eq!(outcomes(&run_with(&fake, &providers, with_key(execution, key)).await), [New]);
        assert_eq!(fake.state.lock().unwrap().shared, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn refused_credentials_never_become_anonymous() {
    let (fake, execution) = locked("other");
    let providers = provider(&[Gives(1, "stale", "Image", 0)]);
    let end = run_with(&fake, &providers, with_key(execution, credentials(&["old"]))).await;
    assert_eq!(passwords(&fake), some(&["old", "stale"]));
    assert_eq!(providers.runs().len(), 1, "a fresh credential is not asked for again");
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (credentials tried: 1 of the secret and 1 of credential provider vault)"
    );
    let (fake, execution) = locked("other");
    let note = "secret default/a has no entry for r.example".to_owned();
    let end = run_with(&fake, &providers, with_key(execution, Arc::new(PullKey::Anonymous { note }))).await;
    assert_eq!(passwords(&fake), some(&["stale"]));
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (credentials tried: 1 of credential provider vault; secret default/a has no entry for \
         r.example)"
    );
    // With a secret, a provider that has nothing changes nothing.
    let (fake, execution) = locked("other");
    run_with(&fake, &provider(&[Nothing]), with_key(execution, credentials(&["old"]))).await;
    assert_eq!(passwords(&fake), some(&["old"]));
}

#[tokio::test(start_paused = true)]
async fn without_credentials_the_pull_is_anonymous() {
    let fake = Fake::new();
    let public = || execution(vec![always("r.example/a:1")]);
    for acts in [Nothing, Fails(1)] {
        let end = run_with(&fake, &provider(&[acts]), public()).await;
        assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    }
    assert_eq!(passwords(&fake), [None, None]);
    let (fake, execution) = locked("right");
    let end = run_with(&fake, &provider(&[Nothing]), execution).await;
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (pulled anonymously: no secret is named for this image; credential provider vault has no \
         credential for it)"
    );
}

#[tokio::test(start_paused = true)]
async fn a_failed_provider_is_retried_later() {
    let (fake, mut task) = locked("right");
    task.task.images[0].retries = 2;
    let providers = provider(&[Fails(60), Gives(1, "right", "Image", 0)]);
    let end = run_with(&fake, &providers, task).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 2));
    assert_eq!(passwords(&fake), [None, Some("right".to_owned())]);

    let (fake, mut task) = locked("right");
    task.task.images[0].retries = 1;
    let end = run_with(&fake, &provider(&[Fails(0)]), task).await;
    assert_eq!(end.images[0].attempts, 2);
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (pulled anonymously: no secret is named for this image; credential provider vault wrote no \
         valid CredentialProviderResponse: it wrote nothing)"
    );
    // A wrong password stays wrong.
    let (fake, mut task) = locked("right");
    task.task.images[0].retries = 5;
    let end = run_with(&fake, &provider(&[Gives(0, "wrong", "Image", 0)]), task).await;
    assert_eq!(end.images[0].attempts, 1);
}

#[tokio::test(start_paused = true)]
async fn a_refused_cached_credential_is_renewed_once() {
    let providers = provider(&[Gives(0, "old", "Registry", KEEP), Gives(0, "new", "Registry", KEEP)]);
    let (fake, task) = locked("old");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [New]);
    let (fake, task) = locked("new");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [New]);
    assert_eq!(passwords(&fake), some(&["old", "new"]));
    // A fresh credential that is refused is not asked for again, and none is tried twice.
    let (fake, task) = locked("newest");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [Failed]);
    assert_eq!((passwords(&fake), providers.runs().len()), (some(&["new"]), 3));
}

#[tokio::test(start_paused = true)]
async fn the_timeout_includes_providers() {
    let (fake, mut task) = locked("right");
    task.task.images[0].timeout = Some(Duration::from_secs(30));
    let begun = Instant::now();
    let end = run_with(&fake, &provider(&[Gives(50, "right", "Image", 0)]), task).await;
    assert_eq!(begun.elapsed().as_secs(), 30);
    assert_eq!(
        end.images[0].reason,
        "not pulled within timeoutSeconds (30s): the node's credential providers had not answered yet"
    );
}
