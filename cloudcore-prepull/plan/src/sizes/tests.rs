#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use prepull_api::image::Reference;
use prepull_delta::manifest::{
    ARTIFACT_TYPE, CONTENT, IMAGE_LAYER, IMAGE_MANIFEST, SOURCE_CONFIG, TAR_DIFF, TARGET, TO,
};
use prepull_engine::prepull::plan::{PlannedImage, ResolvedKey};
use prepull_registry::digest::sha256;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn planned(image: &str, policy: PullPolicy) -> PlannedImage {
    let pull = Reference::parse(image).unwrap().normalized();
    PlannedImage { image: image.to_owned(), name: None, pull, policy, secrets: Vec::new() }
}

fn keyed(planned: &PlannedImage) -> Keyed<'_> {
    let resolved = ResolvedKey { key: PullKey::anonymous(), details: Vec::new(), withheld: Vec::new() };
    Keyed { planned, resolved: Some(resolved) }
}

fn receiver(architecture: &str) -> Receiver {
    let (os, architecture) = ("linux".to_owned(), architecture.to_owned());
    Receiver { platform: Platform { os, architecture, variant: String::new() }, held: BTreeSet::new() }
}

/// A node with this image of `team/big`.
fn with(image: &str) -> Receiver {
    let held = Held { repository: "team/big".to_owned(), digest: sha256(image.as_bytes()) };
    Receiver { held: BTreeSet::from([held]), ..receiver("amd64") }
}

/// A registry on loopback with one index for two platforms. Their images share the first layer. It logs its requests.
struct Server {
    at: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = Arc::clone(&asked);
        tokio::spawn(async move {
            loop {
                let (mut io, _) = listener.accept().await.unwrap();
                let log = Arc::clone(&log);
                tokio::spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        if io.read_buf(&mut head).await.unwrap_or(0) == 0 {
                            return;
                        }
                        if !head[0].is_ascii_uppercase() {
                            // The beginning of TLS: so answer those who do not expect it.
                            let _ =
                                io.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
                            return;
                        }
                    }
                    let head = String::from_utf8(head).unwrap();
                    log.lock().unwrap().push(head.lines().next().unwrap().to_owned());
                    let _ = io.write_all(&answer(&head)).await;
                });
            }
        });
        Self { at, asked }
    }

    fn count(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|line| line.contains(part)).count()
    }
}

fn layer(name: &str, size: u64) -> String {
    let digest = sha256(name.as_bytes());
    format!(
        r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"{digest}","size":{size}}}"#
    )
}

fn manifest(own: &str, size: u64) -> String {
    let config = format!(r#"{{"mediaType":"c","digest":"{}","size":1}}"#, sha256(b"c"));
    let layers = [layer("shared", 1000), layer(own, size), layer(own, size)].join(",");
    format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layers}]}}"#)
}

const MIB: u64 = 1 << 20;

/// The manifest of an image of two large layers.
fn big() -> String {
    let config = format!(r#"{{"mediaType":"c","digest":"{}","size":1}}"#, sha256(b"c"));
    let layers = [layer("first", 8 * MIB), layer("second", 4 * MIB)].join(",");
    format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layers}]}}"#)
}

/// An earlier version.
fn before() -> String {
    big().replace(&sha256(b"c"), &sha256(b"old"))
}

/// A delta to it: what stands for each of these layers, and its size.
fn delta(layers: &[(&str, u64)]) -> String {
    let target = sha256(big().as_bytes());
    let layer = |(to, size): &(&str, u64)| {
        let (digest, to) = (sha256(format!("delta to {to}").as_bytes()), sha256(to.as_bytes()));
        json!({ "mediaType": TAR_DIFF, "digest": digest, "size": size,
            "annotations": { CONTENT: IMAGE_LAYER, TO: to } })
    };
    let manifest = json!({ "mediaType": "m", "digest": target, "size": big().len(),
        "annotations": { CONTENT: IMAGE_MANIFEST } });
    let mut layers: Vec<_> = std::iter::once(manifest).chain(layers.iter().map(layer)).collect();
    // A producer takes the layer itself where a diff would be larger. An agent gets that from the registry.
    let itself = json!({ "mediaType": MANIFEST, "digest": sha256(b"itself"), "size": 7,
        "annotations": { CONTENT: IMAGE_LAYER, TO: sha256(b"second") } });
    if layers.len() == 2 {
        layers.push(itself);
    }
    let annotations = json!({ TARGET: target, SOURCE_CONFIG: sha256(b"old") });
    json!({ "artifactType": ARTIFACT_TYPE, "layers": layers, "annotations": annotations }).to_string()
}

/// What a registry answers about that image. One of its deltas is a lie about another image.
fn answer_about_big(head: &str, reply: impl Fn(&str, &str, &[u8]) -> Vec<u8>) -> Vec<u8> {
    let deltas = [
        delta(&[("first", 3 * MIB)]),
        delta(&[("first", MIB), ("second", 7 * MIB)]),
        delta(&[]).replace("old", "older").replace(&sha256(big().as_bytes()), &sha256(b"another")),
    ];
    for content in deltas.iter().chain([&big(), &before()]) {
        let digest = sha256(content.as_bytes());
        let is_image = *content == big();
        if head.contains(&format!("/manifests/{digest}")) || (is_image && head.contains("/manifests/v2")) {
            let headers = format!("Content-Type: {MANIFEST}\r\nDocker-Content-Digest: {digest}\r\n");
            return reply("200 OK", &headers, content.as_bytes());
        }
    }
    if head.contains("/referrers/") {
        let entry = |content: &String| {
            let annotations = json!({ TARGET: sha256(big().as_bytes()), SOURCE_CONFIG: sha256(b"old") });
            json!({ "mediaType": MANIFEST, "digest": sha256(content.as_bytes()), "size": content.len(),
                "artifactType": ARTIFACT_TYPE, "annotations": annotations })
        };
        let entries: Vec<_> = deltas.iter().map(entry).collect();
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries }).to_string();
        return reply("200 OK", &format!("Content-Type: {INDEX}\r\n"), index.as_bytes());
    }
    reply("404 Not Found", "", b"")
}

fn answer(head: &str) -> Vec<u8> {
    let (amd64, arm64) = (manifest("amd64", 100), manifest("arm64", 200));
    let entry = |architecture: &str, manifest: &str| {
        let (digest, size) = (sha256(manifest.as_bytes()), manifest.len());
        let platform = format!(r#"{{"os":"linux","architecture":"{architecture}"}}"#);
        format!(r#"{{"mediaType":"{MANIFEST}","digest":"{digest}","size":{size},"platform":{platform}}}"#)
    };
    let index = format!(r#"{{"manifests":[{},{}]}}"#, entry("amd64", &amd64), entry("arm64", &arm64));
    let reply = |status: &str, headers: &str, body: &[u8]| {
        let length = body.len();
        let mut bytes =
            format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n")
                .into_bytes();
        if !head.starts_with("HEAD") {
            bytes.extend_from_slice(body);
        }
        bytes
    };
    if head.contains("/team/big/") {
        return answer_about_big(head, reply);
    }
    for (content, media_type) in [(&amd64, MANIFEST), (&arm64, MANIFEST), (&index, INDEX)] {
        let digest = sha256(content.as_bytes());
        let is_tag = media_type == INDEX && head.contains("/manifests/v1");
        if is_tag || head.contains(&digest) {
            let headers = format!("Content-Type: {media_type}\r\nDocker-Content-Digest: {digest}\r\n");
            return reply("200 OK", &headers, content.as_bytes());
        }
    }
    // The last four bytes of the shared layer are its size; the sizes of the others are unknown.
    if head.contains(&sha256(b"shared")) {
        let range = "Content-Range: bytes 996-999/1000\r\n";
        return reply("206 Partial Content", range, &7000_u32.to_le_bytes());
    }
    reply("404 Not Found", "", b"")
}

#[tokio::test]
async fn shared_questions_and_layers_count_once() {
    let server = Server::start().await;
    let image = |path: &str, policy| planned(&format!("{}/{path}", server.at), policy);
    let [one, twin, gone, never] = [
        image("team/app:v1", PullPolicy::Always),
        image("team/app:v1", PullPolicy::IfNotPresent),
        image("team/gone:v2", PullPolicy::Always),
        image("team/gone:v2", PullPolicy::Never),
    ];
    let images = [keyed(&one), keyed(&twin), keyed(&gone), keyed(&never)];
    let (amd64, arm64, unlabelled) = (receiver("amd64"), receiver("arm64"), receiver(""));
    let args = SizeArgs { sizes: true, ..SizeArgs::default() };
    let asked = [&amd64, &arm64, &unlabelled, &amd64].map(|receiver| (images.as_slice(), receiver));
    let sizes = Sizes::ask_registries(&args, Deltas::Auto, asked.into_iter()).await;

    // The shared layer as its last bytes tell it, the other one guessed.
    let size =
        |download_bytes, unpacked_bytes| Ok(ImageSize { download_bytes, unpacked_bytes, delta_bytes: None });
    assert_eq!(sizes.of_image(&images[0], &amd64), size(1100, 7000 + 300));
    assert_eq!(sizes.of_image(&images[1], &arm64), size(1200, 7000 + 600));
    let error = sizes.of_image(&images[0], &unlabelled).unwrap_err();
    assert!(error.contains("kubernetes.io/arch"), "{error}");
    assert_eq!(sizes.of_image(&images[2], &amd64).unwrap_err(), "not found");
    assert_eq!(sizes.of_image(&images[3], &amd64), size(0, 0), "nobody fetches it");
    let of_node =
        NodeSize { download_bytes: 1100, disk_bytes: 1100 + 7300, delta_bytes: None, unknown_images: 1 };
    assert_eq!(sizes.of_node(&images, &amd64), of_node);

    assert_eq!(server.count("HEAD /v2/team/app/manifests/v1"), 1);
    let manifests = server.count("GET /v2/team/app/manifests/");
    assert_eq!(manifests, 3, "the index and two manifests: {:?}", server.asked);
    assert_eq!(server.count(&format!("/blobs/{}", sha256(b"shared"))), 1);
    assert_eq!(server.count("/team/gone/"), 1);
}

#[tokio::test]
async fn the_smallest_delta_from_an_image_of_the_node_counts() {
    let server = Server::start().await;
    let image = planned(&format!("{}/team/big:v2", server.at), PullPolicy::Always);
    let images = [keyed(&image)];
    let (older, other) = (with(&before()), with("not in this registry"));
    let args = SizeArgs { sizes: true, ..SizeArgs::default() };
    for (rule, node, left, asks) in [
        (Deltas::Never, &older, None, false),
        (Deltas::Auto, &receiver("amd64"), None, false),
        (Deltas::Auto, &other, None, true),
        // A layer that's smaller than its delta is taken as it is.
        (Deltas::Auto, &older, Some(5 * MIB), true),
    ] {
        let asked = [(images.as_slice(), node)];
        let sizes = Sizes::ask_registries(&args, rule, asked.into_iter()).await;
        let size = sizes.of_image(&images[0], node).unwrap();
        assert_eq!((size.download_bytes, size.delta_bytes), (12 * MIB, left), "{rule:?} {node:?}");
        assert_eq!(sizes.of_node(&images, node).delta_bytes, left);
        assert_eq!(sizes.of_node(&images, &other).delta_bytes, None);
        assert_eq!(server.count("/referrers/") > 0, asks, "{rule:?} {node:?}");
    }
}

#[test]
fn a_site_downloads_each_layer_once() {
    let (amd64, arm64) = (receiver("amd64"), receiver("arm64"));
    let plan = |images: &[&str]| NodePlan {
        upgrade: None,
        removal: None,
        images: images.iter().map(|image| planned(image, PullPolicy::IfNotPresent)).collect(),
    };
    let (both, one, unknown) = (plan(&["r.io/a:1", "r.io/b:1"]), plan(&["r.io/b:1"]), plan(&["r.io/c:1"]));
    let layer = |digest: &str, download| LayerSizes { digest: digest.to_owned(), download, unpacked: 0 };
    let mut sizes = Sizes::default();
    for (image, receiver, layers) in [
        (&both.images[0], &amd64, vec![layer("base", 1000), layer("a-amd64", 100)]),
        (&both.images[1], &amd64, vec![layer("base", 1000), layer("b-amd64", 20)]),
        (&both.images[0], &arm64, vec![layer("base", 1000), layer("a-arm64", 300)]),
        (&both.images[1], &arm64, vec![layer("base", 1000), layer("b-arm64", 40)]),
    ] {
        let question = Question { image: image.pull.clone(), credentials: Vec::new() };
        let found = SizedImage { layers, ..SizedImage::default() };
        sizes.answers.insert((question, receiver.platform.clone()), Ok(found.into()));
    }
    let of = |nodes: &[(&NodePlan, &Receiver)]| {
        let keys: Vec<Vec<Keyed<'_>>> =
            nodes.iter().map(|(plan, _)| plan.images.iter().map(keyed).collect()).collect();
        let nodes =
            nodes.iter().zip(&keys).map(|((plan, receiver), keys)| (*plan, keys.as_slice(), *receiver));
        let SiteSize { shared_bytes, unshared_bytes, unknown_images } = sizes.of_site(nodes);
        (shared_bytes, unshared_bytes, unknown_images)
    };
    assert_eq!(of(&[]), (0, 0, 0));
    assert_eq!(of(&[(&both, &amd64); 3]), (1120, 3 * 1120, 0));
    assert_eq!(of(&[(&both, &amd64), (&both, &arm64)]), (1120 + 340, 1120 + 1340, 0), "the base is the same");
    // Who pulls other images does not get theirs.
    assert_eq!(of(&[(&both, &amd64), (&one, &amd64)]), (1120 + 1020, 1120 + 1020, 0));
    assert_eq!(of(&[(&one, &amd64), (&unknown, &amd64)]), (1020, 1020, 1));
}
