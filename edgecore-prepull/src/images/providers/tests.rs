#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use prepull_api::credentials::{RegistryPattern, Sensitive};
use prepull_api::image::Reference;
use tokio::time::sleep;

use super::protocol::PluginApiVersion;
use super::*;

/// The behaviour of a fake plugin. The first number is its response time in seconds.
#[derive(Clone, Debug)]
pub(crate) enum Does {
    /// Answers for any registry with this user and the same text as the password; then the cache key type, and the
    /// seconds to keep the answer.
    Gives(u64, &'static str, &'static str, u64),
    /// Answers without credentials.
    Nothing,
    Fails(u64),
}

/// Providers without programs. Each has a name, a pattern, and the behaviour of each run; the last one repeats.
pub(crate) struct FakeProviders {
    pub(crate) providers: Arc<Providers>,
    runs: Arc<Mutex<Vec<String>>>,
}

impl FakeProviders {
    pub(crate) fn new<const N: usize>(all: [(&str, &str, &[Does]); N]) -> Self {
        let runs = Arc::<Mutex<Vec<String>>>::default();
        let provider = |(name, pattern, acts): (&str, &str, &[Does])| {
            let config = ProviderConfig {
                name: name.to_owned(),
                program: "/nonexistent".into(),
                matches: vec![RegistryPattern::parse_match_image(pattern).unwrap()],
                default_cache_duration: Duration::ZERO,
                version: PluginApiVersion::V1,
                args: Vec::new(),
                env: Vec::new(),
            };
            let acts = Mutex::new(VecDeque::from(acts.to_vec()));
            let runs = runs.clone();
            let run = move |provider: Arc<CredentialProvider>, image: ImageName| {
                runs.lock().unwrap().push(format!("{} {}", provider.config.name, image.name));
                let mut acts = acts.lock().unwrap();
                let act = if acts.len() > 1 { acts.pop_front() } else { acts.front().cloned() };
                async move { act.unwrap().done().await }.boxed()
            };
            CredentialProvider::new(config, Box::new(run), None)
        };
        let providers = Arc::new(Providers { providers: all.map(provider).into() });
        Self { providers, runs }
    }

    /// All runs so far, as `PROVIDER IMAGE`.
    pub(crate) fn runs(&self) -> Vec<String> {
        self.runs.lock().unwrap().clone()
    }

    async fn ask(&self, image: &str) -> ProvidersAnswer {
        self.providers.ask(&reference(image)).await
    }

    async fn users(&self, image: &str) -> Vec<String> {
        users(&self.ask(image).await)
    }
}

impl Does {
    async fn done(self) -> Result<Response, PluginFailure> {
        let login = |user: &str| {
            let logins = ["*", "*.*"].map(|key| (key.to_owned(), Sensitive::new(user), Sensitive::new(user)));
            RegistryConfig::from_logins(logins)
        };
        match self {
            Self::Gives(seconds, user, kind, keep) => {
                sleep(Duration::from_secs(seconds)).await;
                let key_type = match kind {
                    "Image" => CacheKeyType::Image,
                    "Registry" => CacheKeyType::Registry,
                    _ => CacheKeyType::Global,
                };
                Ok(Response { key_type, cache_for: Some(Duration::from_secs(keep)), logins: login(user) })
            }
            Self::Nothing => Ok(Response {
                key_type: CacheKeyType::Image,
                cache_for: None,
                logins: RegistryConfig::default(),
            }),
            Self::Fails(seconds) => {
                sleep(Duration::from_secs(seconds)).await;
                Err(PluginFailure::Malformed("it wrote nothing".to_owned()))
            }
        }
    }
}

fn reference(image: &str) -> NormalizedReference {
    Reference::parse(image).unwrap().normalized()
}

fn users(answer: &ProvidersAnswer) -> Vec<String> {
    answer.credentials.iter().map(|credential| credential.username.expose().to_owned()).collect()
}

const HOUR: u64 = 3600;

#[tokio::test(start_paused = true)]
async fn only_matching_providers_are_asked() {
    let fake = FakeProviders::new([
        ("first", "*.io", &[Does::Gives(5, "one", "Image", 0)]),
        ("other", "s.example", &[Does::Gives(0, "no", "Image", 0)]),
        ("broken", "r.io/team", &[Does::Fails(0)]),
        ("empty", "r.io", &[Does::Nothing]),
        ("last", "r.io", &[Does::Gives(1, "two", "Image", 0)]),
    ]);
    let begun = Instant::now();
    let answer = fake.ask("r.io/team/app:v1").await;
    assert_eq!(begun.elapsed().as_secs(), 5, "at the same time");
    assert_eq!(users(&answer), ["one", "two"]);
    assert_eq!(answer.given_by, ["first", "last"]);
    assert_eq!((answer.failed, answer.cached), (true, false));
    assert_eq!(
        answer.problems,
        [
            "credential provider broken wrote no valid CredentialProviderResponse: it wrote nothing",
            "credential provider empty has no credential for it",
        ]
    );
    let nobody = fake.ask("t.example/app").await;
    assert_eq!((nobody.problems.len(), nobody.credentials.len(), nobody.failed), (0, 0, false));
    assert!(fake.runs().contains(&"last r.io/team/app".to_owned()), "without the tag: {:?}", fake.runs());
}

#[tokio::test(start_paused = true)]
async fn a_cached_answer_serves_until_it_expires() {
    for (kind, runs) in [("Image", 3), ("Registry", 2), ("Global", 1)] {
        let fake = FakeProviders::new([("p", "*.*", &[Does::Gives(0, "u", kind, HOUR)])]);
        for image in ["r.io/a:1", "r.io/a:2", "r.io/b", "s.io/a"] {
            assert_eq!(fake.users(image).await, ["u"]);
        }
        assert_eq!(fake.runs().len(), runs, "{kind}");
        sleep(Duration::from_secs(HOUR)).await;
        fake.users("r.io/a:1").await;
        assert_eq!(fake.runs().len(), runs + 1, "{kind}: it has expired");
    }
    let fake = FakeProviders::new([("p", "*.*", &[Does::Gives(0, "u", "Global", 0)])]);
    fake.users("r.io/a").await;
    fake.users("r.io/a").await;
    assert_eq!(fake.runs().len(), 2, "not to be kept");
}

#[tokio::test(start_paused = true)]
async fn the_default_duration_applies() {
    for (default, runs) in [(0, 2), (60, 1)] {
        let fake = FakeProviders::new([("p", "*.*", &[Does::Nothing])]);
        let mut providers = Arc::into_inner(fake.providers).unwrap();
        let mut provider = Arc::into_inner(providers.providers.remove(0)).unwrap();
        provider.config.default_cache_duration = Duration::from_secs(default);
        let providers = Providers { providers: vec![Arc::new(provider)] };
        for _ in 0..2 {
            providers.ask(&reference("r.io/a")).await;
        }
        assert_eq!(fake.runs.lock().unwrap().len(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn images_that_share_a_key_share_one_run() {
    // Nothing is cached: only waiters for the same run share an answer.
    for (kind, images, runs) in [
        ("Registry", ["r.io/a", "r.io/a", "r.io/b"], 1),
        ("Image", ["r.io/a", "r.io/a", "r.io/a"], 1),
        ("Image", ["r.io/a", "r.io/b", "r.io/b"], 2),
        ("Global", ["r.io/a", "s.io/a", "r.io/b"], 1),
        ("Registry", ["r.io/a", "s.io/a", "r.io/b"], 2),
    ] {
        let fake = FakeProviders::new([("p", "*.*", &[Does::Gives(1, "u", kind, 0)])]);
        let answers = join_all(images.map(|image| fake.users(image))).await;
        assert!(answers.iter().all(|users| users == &["u"]), "{answers:?}");
        assert_eq!(fake.runs().len(), runs, "{kind} {images:?}");
        // Now the cache key type of the plugin is known.
        let begun = Instant::now();
        join_all(images.map(|image| fake.users(image))).await;
        assert_eq!(fake.runs().len(), 2 * runs, "{kind} {images:?}");
        assert_eq!(begun.elapsed().as_secs(), 1, "side by side");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_run_is_shared_and_repeated() {
    let fake = FakeProviders::new([("p", "*.*", &[Does::Fails(10), Does::Gives(0, "u", "Image", 0)])]);
    let begun = Instant::now();
    let [first, same, other] = ["r.io/a", "r.io/a", "r.io/b"].map(|image| fake.ask(image));
    let (first, same, other) = futures::join!(first, same, other);
    assert_eq!((first.failed, same.failed, other.failed), (true, true, false));
    assert_eq!((users(&other), fake.runs().len()), (vec!["u".to_owned()], 2));
    assert_eq!(begun.elapsed().as_secs(), 10);
    assert_eq!(fake.users("r.io/a").await, ["u"], "a failure is not kept");
}

#[tokio::test(start_paused = true)]
async fn a_run_stops_without_waiters() {
    let fake = Arc::new(FakeProviders::new([("p", "*.*", &[Does::Gives(10, "u", "Image", HOUR)])]));
    let spawn = || {
        let fake = fake.clone();
        tokio::spawn(async move { fake.users("r.io/a").await })
    };
    let (first, second) = (spawn(), spawn());
    sleep(Duration::from_secs(5)).await;
    first.abort();
    assert_eq!(second.await.unwrap(), ["u"]);
    assert_eq!(fake.runs().len(), 1);
    // A run without waiters is stopped and forgotten.
    let fake = FakeProviders::new([("p", "*.*", &[Does::Gives(10, "u", "Image", HOUR)])]);
    assert!(tokio::time::timeout(Duration::from_secs(5), fake.ask("r.io/a")).await.is_err());
    assert_eq!(fake.users("r.io/a").await, ["u"]);
    assert_eq!(fake.runs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_answer_is_requested_again() {
    let fake = FakeProviders::new([(
        "p",
        "*.*",
        &[Does::Gives(0, "old", "Global", HOUR), Does::Gives(0, "new", "Global", HOUR)],
    )]);
    assert!(!fake.ask("r.io/a").await.cached);
    assert!(fake.ask("r.io/a").await.cached);
    fake.providers.forget(&reference("r.io/a"));
    assert_eq!(fake.users("r.io/a").await, ["new"]);
}

#[test]
fn the_flags_are_set_both_or_neither() {
    let load = |config: Option<&str>, bin_dir: Option<&str>| {
        let settings = ProviderSettings {
            config: config.map(Into::into),
            bin_dir: bin_dir.map(Into::into),
            timeout: None,
        };
        Providers::load(&settings, Stderr::Dropped, None)
            .map(|providers| providers.names().len())
            .map_err(|e| e.to_string())
    };
    assert_eq!(load(None, None), Ok(0));
    assert_eq!(
        load(Some("/a"), None).unwrap_err(),
        "--image-credential-provider-config is set and --image-credential-provider-bin-dir is not: set both, or neither"
    );
    assert_eq!(
        load(None, Some("/a")).unwrap_err(),
        "--image-credential-provider-bin-dir is set and --image-credential-provider-config is not: set both, or neither"
    );
    assert!(load(Some("/nonexistent"), Some("/a")).unwrap_err().contains("/nonexistent"));
}
