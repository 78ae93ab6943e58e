//! Credential providers beside the key of a task.

use super::*;
use crate::images::providers::tests::Does::{self, Fails, Gives, Nothing};
use crate::images::providers::tests::FakeProviders;

const KEEP: u64 = 3600;

/// Runs a task whose images are in `r.example`, on a node with one provider.
async fn run_with(fake: &Arc<Fake>, providers: &FakeProviders, work: Work) -> TaskEnd {
    let executor = Arc::into_inner(executor(fake)).unwrap();
    let executor = executor.with_credential_providers(providers.providers.clone());
    start(&Arc::new(executor), work).end.await.unwrap()
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

/// One image that takes this password, so many times over.
fn locked(password: &'static str) -> (Arc<Fake>, Work) {
    let fake = Fake::new();
    fake.script("r.example/a:1", vec![Act::Password(password); 9]);
    (fake, work(vec![always("r.example/a:1")]))
}

fn with_key(mut work: Work, key: Arc<Key>) -> Work {
    work.terms.keys = vec![key];
    work
}

#[tokio::test(start_paused = true)]
async fn a_provider_serves_where_there_is_no_secret() {
    let (fake, work) = locked("right");
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let end = run_with(&fake, &providers, work).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert_eq!(passwords(&fake), some(&["right"]), "nobody asked anonymously");
    assert_eq!(providers.runs(), ["vault r.example/a"]);
}

#[tokio::test(start_paused = true)]
async fn a_provider_is_not_run_where_a_secret_serves_or_the_image_is_there() {
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let (fake, work) = locked("own");
    let end = run_with(&fake, &providers, with_key(work, credentials(&["old", "own"]))).await;
    assert_eq!(outcomes(&end), [New]);
    let (fake, mut present) = locked("own");
    fake.state.lock().unwrap().present.push("r.example/a:1".to_owned());
    present.task.images[0].policy = PullPolicy::IfNotPresent;
    assert_eq!(outcomes(&run_with(&fake, &providers, present).await), [Already]);
    let (fake, unavailable) = locked("right");
    let unavailable = with_key(unavailable, Arc::new(Key::Unavailable { reason: "no secret".to_owned() }));
    assert_eq!(outcomes(&run_with(&fake, &providers, unavailable).await), [Failed]);
    // A registry that is not reached has refused nothing.
    let (fake, broken) = locked("right");
    fake.script("r.example/a:1", [Act::Fail(ErrorClass::Transient, "connection refused")]);
    let end = run_with(&fake, &providers, with_key(broken, credentials(&["own"]))).await;
    assert_eq!(end.images[0].reason, "connection refused");
    assert_eq!(providers.runs(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_provider_serves_where_the_secret_is_refused_or_sees_no_image() {
    let (fake, work) = locked("right");
    let providers = provider(&[Gives(1, "right", "Image", 0)]);
    let end = run_with(&fake, &providers, with_key(work, credentials(&["old", "older"]))).await;
    assert_eq!(outcomes(&end), [New]);
    assert_eq!(passwords(&fake), some(&["old", "older", "right"]));

    let (fake, work) = locked("right");
    let hidden = Act::Fail(ErrorClass::NotFound, "not found");
    fake.script("r.example/a:1", [hidden, Act::Password("right")]);
    let end = run_with(&fake, &providers, with_key(work, credentials(&["other"]))).await;
    assert_eq!(outcomes(&end), [New]);
}

#[tokio::test(start_paused = true)]
async fn credentials_that_were_refused_are_not_followed_by_an_anonymous_try() {
    let (fake, work) = locked("other");
    let providers = provider(&[Gives(1, "stale", "Image", 0)]);
    let end = run_with(&fake, &providers, with_key(work, credentials(&["old"]))).await;
    assert_eq!(passwords(&fake), some(&["old", "stale"]));
    assert_eq!(providers.runs().len(), 1, "what is new is not asked for anew");
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (credentials tried: 1 of the secret and 1 of credential provider vault)"
    );
    let (fake, work) = locked("other");
    let note = "secret default/a has no entry for r.example".to_owned();
    let end = run_with(&fake, &providers, with_key(work, Arc::new(Key::Anonymous { note }))).await;
    assert_eq!(passwords(&fake), some(&["stale"]));
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (credentials tried: 1 of credential provider vault; secret default/a has no entry for \
         r.example)"
    );
    // With a secret, a provider that has nothing changes nothing.
    let (fake, work) = locked("other");
    run_with(&fake, &provider(&[Nothing]), with_key(work, credentials(&["old"]))).await;
    assert_eq!(passwords(&fake), some(&["old"]));
}

#[tokio::test(start_paused = true)]
async fn without_any_credential_the_pull_is_anonymous() {
    let fake = Fake::new();
    let public = || work(vec![always("r.example/a:1")]);
    for acts in [Nothing, Fails(1)] {
        let end = run_with(&fake, &provider(&[acts]), public()).await;
        assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    }
    assert_eq!(passwords(&fake), [None, None]);
    let (fake, work) = locked("right");
    let end = run_with(&fake, &provider(&[Nothing]), work).await;
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (pulled anonymously: no secret is named for this image; credential provider vault has no \
         credential for it)"
    );
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_failed_may_do_better_the_next_time() {
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
    // A password that is wrong stays so.
    let (fake, mut task) = locked("right");
    task.task.images[0].retries = 5;
    let end = run_with(&fake, &provider(&[Gives(0, "wrong", "Image", 0)]), task).await;
    assert_eq!(end.images[0].attempts, 1);
}

#[tokio::test(start_paused = true)]
async fn what_was_known_from_before_and_is_refused_is_asked_for_anew() {
    let providers = provider(&[Gives(0, "old", "Registry", KEEP), Gives(0, "new", "Registry", KEEP)]);
    let (fake, task) = locked("old");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [New]);
    let (fake, task) = locked("new");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [New]);
    assert_eq!(passwords(&fake), some(&["old", "new"]));
    // What is refused though it is new is not asked for again, and the same is not tried twice.
    let (fake, task) = locked("newest");
    assert_eq!(outcomes(&run_with(&fake, &providers, task).await), [Failed]);
    assert_eq!((passwords(&fake), providers.runs().len()), (some(&["new"]), 3));
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_try_holds_for_providers_too() {
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
