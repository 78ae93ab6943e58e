#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use prepull_api::image::Reference;
use prepull_engine::prepull::plan::{PlannedImage, Resolved};
use prepull_registry::digest::sha256;
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
    let resolved = Resolved { key: Key::anonymous(), details: Vec::new(), withheld: Vec::new() };
    Keyed { planned, resolved: Some(resolved) }
}

fn platform(architecture: &str) -> Platform {
    Platform { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: String::new() }
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
    let (amd64, arm64, unlabelled) = (platform("amd64"), platform("arm64"), platform(""));
    let args = SizeArgs { sizes: true, ..SizeArgs::default() };
    let platforms = [&amd64, &arm64, &unlabelled, &amd64];
    let asked = platforms.map(|platform| (images.as_slice(), platform.clone()));
    let sizes = Sizes::ask(&args, asked.into_iter()).await;

    // The shared layer as its last bytes tell it, the other one guessed.
    let size = |download_bytes, unpacked_bytes| Ok(ImageSize { download_bytes, unpacked_bytes });
    assert_eq!(sizes.of_image(&images[0], &amd64), size(1100, 7000 + 300));
    assert_eq!(sizes.of_image(&images[1], &arm64), size(1200, 7000 + 600));
    let error = sizes.of_image(&images[0], &unlabelled).unwrap_err();
    assert!(error.contains("kubernetes.io/arch"), "{error}");
    assert_eq!(sizes.of_image(&images[2], &amd64).unwrap_err(), "not found");
    assert_eq!(sizes.of_image(&images[3], &amd64), size(0, 0), "nobody fetches it");
    let of_node = NodeSize { download_bytes: 1100, disk_bytes: 1100 + 7300, unknown_images: 1 };
    assert_eq!(sizes.of_node(&images, &amd64), of_node);

    assert_eq!(server.count("HEAD /v2/team/app/manifests/v1"), 1);
    let manifests = server.count("GET /v2/team/app/manifests/");
    assert_eq!(manifests, 3, "the index and two manifests: {:?}", server.asked);
    assert_eq!(server.count(&format!("/blobs/{}", sha256(b"shared"))), 1);
    assert_eq!(server.count("/team/gone/"), 1);
}

#[test]
fn a_site_downloads_each_layer_once() {
    let (amd64, arm64) = (platform("amd64"), platform("arm64"));
    let plan = |images: &[&str]| NodePlan {
        upgrade: None,
        removal: None,
        images: images.iter().map(|image| planned(image, PullPolicy::IfNotPresent)).collect(),
    };
    let (both, one, unknown) = (plan(&["r.io/a:1", "r.io/b:1"]), plan(&["r.io/b:1"]), plan(&["r.io/c:1"]));
    let layer = |digest: &str, download| Layer { digest: digest.to_owned(), download, unpacked: 0 };
    let mut sizes = Sizes::default();
    for (image, platform, layers) in [
        (&both.images[0], &amd64, vec![layer("base", 1000), layer("a-amd64", 100)]),
        (&both.images[1], &amd64, vec![layer("base", 1000), layer("b-amd64", 20)]),
        (&both.images[0], &arm64, vec![layer("base", 1000), layer("a-arm64", 300)]),
        (&both.images[1], &arm64, vec![layer("base", 1000), layer("b-arm64", 40)]),
    ] {
        let question = Question { image: image.pull.clone(), credentials: Vec::new() };
        sizes.answers.insert((question, platform.clone()), Ok(layers.into()));
    }
    let of = |nodes: &[(&NodePlan, &Platform)]| {
        let keys: Vec<Vec<Keyed<'_>>> =
            nodes.iter().map(|(plan, _)| plan.images.iter().map(keyed).collect()).collect();
        let nodes =
            nodes.iter().zip(&keys).map(|((plan, platform), keys)| (*plan, keys.as_slice(), *platform));
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

#[test]
fn the_platform_of_a_node_is_by_its_labels() {
    for (labels, os, architecture) in [
        (&[("kubernetes.io/arch", "arm64"), ("kubernetes.io/os", "linux")][..], "linux", "arm64"),
        (&[("beta.kubernetes.io/arch", "arm"), ("other/arch", "x")], "linux", "arm"),
        (&[("kubernetes.io/os", "windows")], "windows", ""),
        (&[], "linux", ""),
    ] {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let expected = Platform { os: os.to_owned(), ..platform(architecture) };
        assert_eq!(platform_of(&labels), expected, "{labels:?}");
    }
}
