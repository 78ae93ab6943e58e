#![allow(clippy::unwrap_used)]

use std::time::{SystemTime, UNIX_EPOCH};

use prepull_api::failure::FailureCode;
use prepull_api::image::NormalizedReference;
use prepull_api::task::NoDelta;
use prepull_delta::manifest::{DeltaLayer, DeltaManifest, MAX_LAYERS, TAR_DIFF};
use prepull_registry::manifest::{Descriptor, MAX_MANIFEST, OCI_MANIFEST};
use prepull_registry::{ClientSettings, HostsFiles, Proxies, RegistryClient, ResolvedReference};
use tonic::Status;

use super::delta::{LayerDeltas, Missing, UnusedDelta};
use super::deltas::no_given_delta;
use super::*;
use crate::images::puller::fake::{Act, Fake};
use crate::images::runtime::fake::{FakeAnswers, serve};

/// A content store that has all blobs, or none.
#[derive(Clone)]
struct FakeStore {
    has_all: bool,
}

impl FakeAnswers for FakeStore {
    const SERVICE: &'static str = "containerd.services.content.v1.Content";

    fn answer(&self, _: &str) -> Result<Vec<u8>, Status> {
        if self.has_all { Ok(Vec::new()) } else { Err(Status::not_found("content")) }
    }
}

fn fetching(socket: &std::path::Path) -> Fetching<Fake> {
    let endpoint = format!("unix://{}", socket.display()).parse().unwrap();
    let containerd = CriPuller::new(endpoint).containerd();
    Fetching::new(Fake::default(), containerd, FetchSettings::default())
}

fn digest(number: usize) -> String {
    format!("sha256:{number:064x}")
}

fn reference() -> NormalizedReference {
    Reference::parse(&format!("r.example/app@{}", digest(0))).unwrap().normalized()
}

/// Reads an image with this many layers and bytes of its configuration, from a manifest that was fetched before.
async fn read_image(store: &ContentStore, layers: usize, config: u64) -> Result<ImageParts, FetchStop> {
    let descriptor = |digest| Descriptor { digest, size: 1, ..Descriptor::default() };
    let layers: Vec<_> = (2..layers + 2).map(|number| descriptor(digest(number))).collect();
    let config = Descriptor { size: config, ..descriptor(digest(1)) };
    let manifest = serde_json::json!({ "config": config, "layers": layers });
    let manifest = Some(manifest.to_string().into_bytes());
    let descriptor = Descriptor { media_type: OCI_MANIFEST.to_owned(), ..descriptor(digest(0)) };
    let hosts = HostsFiles { dirs: Vec::new(), ignores_server_alone: false };
    let (user_agent, proxies) = (String::new(), Proxies::from_env());
    let client = RegistryClient::new(ClientSettings { hosts, user_agent, proxies, time: None });
    let repository = client.repository(&reference(), None).unwrap();
    ImageParts::read(store, &repository, ResolvedReference { descriptor, manifest }).await
}

#[tokio::test]
async fn the_runtime_downloads_no_blob_that_is_gone() {
    for has_all in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let _server = serve(&socket, FakeStore { has_all });
        let (fetching, reference) = (fetching(&socket), reference());
        let name = reference.to_string();
        fetching.inner.script(&name, [Act::Take(0)]);
        let image = read_image(&fetching.fetcher.store, 2, 1).await.unwrap();
        let request = PullRequest::new(&name);
        let finished = fetching.finish_by_runtime(request, &reference, &image, "overlayfs").await;
        let expected = if has_all { vec![name.clone()] } else { Vec::new() };
        assert_eq!(fetching.inner.pulls(), expected, "{finished:?}");
        match finished {
            Ok(_) => assert!(has_all),
            Err(FetchStop::Failed(error)) => {
                assert!(!has_all && error.class == ErrorClass::Transient, "{error}");
                assert!(error.message.starts_with(&format!("a part of {name} is gone")), "{error}");
            }
            Err(stop) => panic!("{stop:?}"),
        }
    }
}

#[tokio::test]
async fn images_out_of_bounds_are_refused() {
    let fetching = fetching(std::path::Path::new("/nonexistent/containerd.sock"));
    let store = &fetching.fetcher.store;
    let most = read_image(store, MAX_LAYERS, MAX_MANIFEST).await.unwrap();
    assert_eq!(most.stacked_layers().count(), 1024);
    for (layers, config, what) in [
        (MAX_LAYERS + 1, 1, "1025 layers, of at most 1024"),
        (1, MAX_MANIFEST + 1, "a configuration of 4194305 bytes, of at most 4194304"),
    ] {
        let Err(FetchStop::Failed(error)) = read_image(store, layers, config).await else {
            panic!("it isn't refused: {what}");
        };
        assert_eq!((error.class, error.code), (ErrorClass::Permanent, FailureCode::InvalidImage));
        assert_eq!(error.message, format!("{} has {what}", reference()));
    }
}

#[tokio::test]
async fn a_deltas_claims_leave_shared_downloads_alone() {
    let fetching = fetching(std::path::Path::new("/nonexistent/containerd.sock"));
    let fetcher = &fetching.fetcher;
    let layer = Descriptor { digest: digest(2), size: 10 << 20, ..Descriptor::default() };
    let diff = DeltaLayer {
        to: layer.digest.clone(),
        digest: digest(3),
        size: 1,
        media_type: TAR_DIFF.to_owned(),
        uncompressed: Some(1 << 40),
    };
    let (target, source_config) = (digest(0), digest(1));
    let manifest = DeltaManifest { target, source: None, source_config, layers: vec![diff] };
    let missing = [Missing { layer: &layer, bytes: layer.size }];
    let deltas = LayerDeltas::new(&manifest, "chain".to_owned(), &missing, |_| true).unwrap();
    // Another pull has the digest of the delta as that of a layer.
    let theirs = fetcher.flights.shared_value(&digest(3));
    theirs.set_written(5 << 20);
    let mut layers = [Layer::new(layer.clone(), fetcher.flights.shared_value(&digest(2)), 0)];
    fetcher.put_deltas(&mut layers, &deltas, false).await;
    assert!(Arc::ptr_eq(&layers[0].flight, &theirs), "the delta is downloaded");
    assert_eq!((theirs.written_bytes(), theirs.unpacked_size()), (5 << 20, None));
}

#[tokio::test]
async fn a_required_delta_is_refused_for_its_own_faults() {
    let fetching = fetching(std::path::Path::new("/nonexistent/containerd.sock"));
    let fetcher = &fetching.fetcher;
    let cases = [
        (NoDelta::NoRoom, false, ErrorClass::NoSpace, FailureCode::NoSpace),
        (NoDelta::NotUnpacked, false, ErrorClass::Transient, FailureCode::NoDelta),
        (NoDelta::WrongLayer, true, ErrorClass::Permanent, FailureCode::NoDelta),
    ];
    for (code, is_remembered, class, failure) in cases {
        let unused = UnusedDelta::new(code, "the reason");
        let (image, delta) = (digest(0), digest(3));
        let error = fetcher.refuse_delta(&image, &delta, &unused, true).unwrap_err();
        assert_eq!((error.class, error.code), (class, failure), "{error}");
        assert!(error.message.ends_with("the reason"), "{error}");
        assert_eq!(fetcher.refused.refusal_reason(&image, &delta).is_some(), is_remembered, "{code:?}");
        fetcher.refused.forget(&image);
        // Otherwise the layer comes, and a further attempt doesn't try the delta again.
        fetcher.refuse_delta(&image, &delta, &unused, false).unwrap();
        assert_eq!(fetcher.refused.refusal_reason(&image, &delta), Some(unused));
        fetcher.refused.forget(&image);
    }
    let busy = PullError::new(ErrorClass::Transient, "500").with_code(FailureCode::RegistryError);
    let error = no_given_delta(&busy);
    assert_eq!((error.class, error.code), (ErrorClass::Transient, FailureCode::RegistryError));
    let error = no_given_delta(&PullError::new(ErrorClass::NotFound, "404"));
    assert_eq!((error.class, error.code), (ErrorClass::Transient, FailureCode::NoDelta));
}

#[tokio::test]
async fn leases_end_by_the_later_clock() {
    let hour = Duration::from_secs(3600);
    let cloud = UNIX_EPOCH + hour * 24 * 365 * 60;
    let clock = Arc::new(CloudClock::default());
    let fetching = fetching(std::path::Path::new("/nonexistent/containerd.sock")).with_clock(clock.clone());
    let end = |machine: SystemTime| fetching.fetcher.leases.end_after(hour, machine);
    clock.set(cloud.duration_since(UNIX_EPOCH).unwrap());
    assert!(end(UNIX_EPOCH) >= cloud + hour, "a clock that isn't set");
    assert!(end(UNIX_EPOCH) < cloud + hour * 2);
    assert_eq!(end(cloud + hour * 3), cloud + hour * 4);
}

#[tokio::test(start_paused = true)]
async fn a_new_limit_ends_a_pull_by_the_runtime() {
    let mut fetching = fetching(std::path::Path::new("/nonexistent/containerd.sock"));
    fetching.fetcher.settings.mode = FetchMode::Runtime;
    fetching.inner.script("a", [Act::Take(600), Act::Unpack(5, 600)]);
    let limit = async |fetching: &Fetching<Fake>| {
        tokio::time::sleep(Duration::from_secs(10)).await;
        fetching.bucket().set_rate(NonZeroU64::new(4096));
        std::future::pending::<()>().await;
    };
    let pull = async |fetching: &Fetching<Fake>| {
        fetching.bucket().set_rate(None);
        tokio::select! {
            pulled = fetching.pull(PullRequest::new("a"), &|_| {}) => pulled,
            () = limit(fetching) => unreachable!(),
        }
    };
    let begun = tokio::time::Instant::now();
    let error = pull(&fetching).await.unwrap_err();
    assert!(
        error.message.ends_with("a pull by the container runtime keeps no limit of bytes a second"),
        "{error}"
    );
    assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
    pull(&fetching).await.unwrap();
    assert_eq!(fetching.inner.pulls(), ["a", "a"], "all has arrived, so no limit applies");
}
