//! Writer of OCI image layouts: <https://github.com/opencontainers/image-spec/blob/main/image-layout.md>.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use ring::digest::{Context as Hash, SHA256, digest};
use serde_json::{Value, json};

use crate::chance::Chance;

/// Path of the static busybox on this machine.
const BUSYBOX: &str = "/bin/busybox";
/// Applets of busybox that get a link.
const APPLETS: [&str; 6] = ["sh", "ls", "cat", "echo", "sleep", "env"];
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layout being written.
pub(super) struct Layout<'a> {
    dir: &'a Path,
}

/// A layer that was written.
pub(super) struct Layer {
    digest: String,
    size: u64,
    /// Digest of the uncompressed tar.
    pub(super) diff_id: String,
}

/// A manifest or an index that was written, with everything that it refers to.
pub(super) struct Manifest {
    media_type: &'static str,
    pub(super) digest: String,
    length: usize,
    pub(super) manifests: Vec<String>,
    pub(super) blobs: Vec<String>,
    pub(super) size: u64,
}

/// A platform, with Go's name of the architecture.
pub(super) struct Platform {
    pub(super) architecture: &'static str,
}

impl Platform {
    /// The platform of this machine.
    pub(super) fn here() -> Self {
        let architecture = if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" };
        Self { architecture }
    }

    /// A platform that is not that of this machine.
    pub(super) fn other() -> Self {
        let architecture = if std::env::consts::ARCH == "aarch64" { "amd64" } else { "arm64" };
        Self { architecture }
    }
}

impl<'a> Layout<'a> {
    pub(super) fn new(dir: &'a Path) -> Result<Self> {
        std::fs::create_dir_all(dir.join("blobs/sha256"))?;
        std::fs::write(dir.join("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
        Ok(Self { dir })
    }

    /// Writes a layer with busybox and links to it.
    pub(super) fn busybox_layer(&self) -> Result<Layer> {
        self.layer(|root| {
            let bin = root.join("bin");
            std::fs::create_dir(&bin)?;
            std::fs::copy(BUSYBOX, bin.join("busybox"))
                .with_context(|| format!("no {BUSYBOX}: install busybox-static"))?;
            for applet in APPLETS {
                std::os::unix::fs::symlink("busybox", bin.join(applet))?;
            }
            Ok(())
        })
    }

    /// Writes a layer with one file.
    pub(super) fn file_layer(&self, path: &str, content: &[u8]) -> Result<Layer> {
        self.layer(|root| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap_or(root))?;
            Ok(std::fs::write(path, content)?)
        })
    }

    /// Writes a layer with several files.
    pub(super) fn files_layer(&self, files: &[(&str, &[u8])]) -> Result<Layer> {
        self.layer(|root| {
            for (path, content) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap_or(root))?;
                std::fs::write(path, content)?;
            }
            Ok(())
        })
    }

    /// Writes a layer with one file of incompressible bytes, which depend only on the seed.
    pub(super) fn random_layer(&self, seed: &str, size: u64) -> Result<Layer> {
        // Stored: a search for what repeats would take a tenth of the time of the tests on a new machine.
        self.layer_at(Compression::none(), |root| {
            let mut file = std::io::BufWriter::new(File::create(root.join("data"))?);
            write_random(&mut file, seed, size)?;
            Ok(file.flush()?)
        })
    }

    fn layer(&self, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Layer> {
        self.layer_at(Compression::fast(), fill)
    }

    fn layer_at(&self, level: Compression, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Layer> {
        let scratch = tempfile::tempdir_in(self.dir)?;
        let (root, tar) = (scratch.path().join("root"), scratch.path().join("layer.tar"));
        std::fs::create_dir(&root)?;
        fill(&root)?;
        // Without owners and times, so that the bytes are the same everywhere.
        let options =
            ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--mode=a=rX,u+w"];
        run(Command::new("tar").args(options).arg("-C").arg(&root).arg("-cf").arg(&tar).arg("."))?;
        let diff_id = sha256_file(&tar)?;
        let compressed = scratch.path().join("layer.tar.gz");
        let mut gzip = GzEncoder::new(File::create(&compressed)?, level);
        std::io::copy(&mut File::open(&tar)?, &mut gzip)?;
        gzip.finish()?;
        let (digest, size) = (sha256_file(&compressed)?, compressed.metadata()?.len());
        std::fs::rename(&compressed, blob_file(self.dir, &digest))?;
        Ok(Layer { digest, size, diff_id })
    }

    /// Writes a layer with a program of this machine, stripped of debug information, and its libraries.
    pub(super) fn program_layer(&self, program: &Path, to: &str) -> Result<Layer> {
        self.layer(|root| {
            let target = root.join(to);
            std::fs::create_dir_all(target.parent().unwrap_or(root))?;
            run(Command::new("strip").arg("-o").arg(&target).arg(program))?;
            for library in libraries(program)? {
                let copy = root.join(library.strip_prefix("/").unwrap_or(&library));
                std::fs::create_dir_all(copy.parent().unwrap_or(root))?;
                std::fs::copy(&library, copy).with_context(|| library.display().to_string())?;
            }
            Ok(())
        })
    }

    /// Writes configuration and manifest of an image with a shell as its command.
    pub(super) fn image(&self, platform: &Platform, layers: &[Layer]) -> Result<Manifest> {
        self.image_with(platform, layers, &json!({"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]}))
    }

    /// Writes configuration and manifest of an image with this command.
    pub(super) fn image_with(
        &self,
        platform: &Platform,
        layers: &[Layer],
        start: &Value,
    ) -> Result<Manifest> {
        let config = json!({
            "architecture": platform.architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": start,
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| &layer.diff_id).collect::<Vec<_>>()},
        });
        let (config_digest, config_length) = self.write(&config)?;
        let layer = |layer: &Layer| json!({"mediaType": LAYER, "digest": layer.digest, "size": layer.size});
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": config_digest, "size": config_length},
            "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        });
        let (digest, length) = self.write(&manifest)?;
        let mut blobs = vec![config_digest];
        blobs.extend(layers.iter().map(|layer| layer.digest.clone()));
        let size = layers.iter().map(|layer| layer.size).sum();
        Ok(Manifest { media_type: MANIFEST, manifests: vec![digest.clone()], digest, length, blobs, size })
    }

    /// Writes an index. Its size is that of the first image.
    pub(super) fn index(&self, images: &[(Manifest, Platform)]) -> Result<Manifest> {
        let entry = |(image, platform): &(Manifest, Platform)| {
            let mut entry = image.descriptor();
            entry["platform"] = json!({"architecture": platform.architecture, "os": "linux"});
            entry
        };
        let entries: Vec<_> = images.iter().map(entry).collect();
        let (digest, length) =
            self.write(&json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}))?;
        let mut manifests = vec![digest.clone()];
        manifests.extend(images.iter().flat_map(|(image, _)| image.manifests.clone()));
        let mut blobs: Vec<_> = images.iter().flat_map(|(image, _)| image.blobs.clone()).collect();
        blobs.sort();
        blobs.dedup();
        let size = images.first().map_or(0, |(image, _)| image.size);
        Ok(Manifest { media_type: INDEX, digest, length, manifests, blobs, size })
    }

    /// Completes the layout, with `top` as its only entry.
    pub(super) fn finish(&self, top: &Manifest) -> Result<()> {
        let index = json!({"schemaVersion": 2, "manifests": [top.descriptor()]});
        Ok(std::fs::write(self.dir.join("index.json"), index.to_string())?)
    }

    fn write(&self, document: &Value) -> Result<(String, usize)> {
        let text = document.to_string();
        let digest = sha256(text.as_bytes());
        std::fs::write(blob_file(self.dir, &digest), &text)?;
        Ok((digest, text.len()))
    }
}

impl Manifest {
    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest, "size": self.length})
    }
}

/// Writes incompressible bytes, which depend only on the seed.
pub(super) fn write_random(to: &mut impl Write, seed: &str, size: u64) -> Result<()> {
    let hash = digest(&SHA256, seed.as_bytes());
    let (start, _) = hash.as_ref().split_first_chunk().context("no SHA-256")?;
    let mut chance = Chance::new(u64::from_le_bytes(*start), 0);
    for _ in 0..size.div_ceil(8) {
        to.write_all(&chance.next().to_le_bytes())?;
    }
    Ok(())
}

/// File of a blob in a layout.
pub(super) fn blob_file(dir: &Path, digest: &str) -> PathBuf {
    dir.join("blobs").join(digest.replace(':', "/"))
}

/// Digest of bytes, `sha256:…`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    named(digest(&SHA256, bytes).as_ref())
}

fn sha256_file(path: &Path) -> Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Hash::new(&SHA256);
    let mut buffer = vec![0; 256 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(named(hash.finish().as_ref())),
            length => hash.update(&buffer[..length]),
        }
    }
}

fn named(hash: &[u8]) -> String {
    hash.iter().fold("sha256:".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

/// Files that the loader loads for a program, and the loader itself; none for a static program.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, and `/lib64/ld-linux-x86-64.so.2 (0x…)`.
    let paths = said.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}
