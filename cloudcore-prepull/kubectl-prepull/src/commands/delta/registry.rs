//! The registry of one image: its platforms, its layers, and what is pushed beside it.

use std::fs::File;
use std::io::{BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use prepull_api::image::NormalizedReference;
use prepull_delta::make::{TarFile, unpack};
use prepull_registry::digest::Hasher;
use prepull_registry::manifest::{Descriptor, Index, Manifest};
use prepull_registry::{
    ClientSettings, ErrorKind, HostsFiles, Open, Proxies, RegistryClient, Repository, ResolvedReference,
};
use serde::Deserialize;

use super::credentials::DockerConfig;
use super::pair::{ImageLayer, PlatformImage};

/// Largest configuration of an image, as for the agent.
const MAX_CONFIG: u64 = 8 << 20;
/// Interruptions of one download.
const TRIES: u32 = 5;
/// Bytes that are unpacked at once.
const PIECE: usize = 64 << 10;

pub(super) fn client(registry_config_path: Option<PathBuf>) -> RegistryClient {
    RegistryClient::new(ClientSettings {
        hosts: HostsFiles { dirs: registry_config_path.into_iter().collect(), ..HostsFiles::default() },
        user_agent: concat!("kubectl-prepull/", env!("CARGO_PKG_VERSION")).to_owned(),
        proxies: Proxies::from_env(),
        time: None,
    })
}

pub(super) struct ImageRegistry {
    repository: Repository,
    resolved: ResolvedReference,
}

impl ImageRegistry {
    /// Asks what a reference points to, with each credential until one is accepted.
    pub(super) async fn open(
        client: &RegistryClient,
        config: &DockerConfig,
        image: &NormalizedReference,
    ) -> anyhow::Result<Self> {
        let credentials = config.credentials_for(image).await?;
        let anonymous = credentials.is_empty().then_some(None);
        let mut refusal = None;
        for credential in credentials.iter().map(Some).chain(anonymous) {
            let repository = client.repository(image, credential)?;
            match repository.resolve().await {
                Ok(resolved) => return Ok(Self { repository, resolved }),
                Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Unauthorized) => {
                    refusal = Some(error);
                }
                Err(error) => return Err(anyhow!(error).context(describe_image(image))),
            }
        }
        Err(refusal
            .map_or_else(|| anyhow!("no credentials"), |error| anyhow!(error))
            .context(describe_image(image)))
    }

    /// The repository, without tag.
    pub(super) fn name(&self) -> String {
        self.repository.reference().name()
    }

    /// The images of all platforms. Attestations and other artifacts of the index are left out.
    pub(super) async fn platform_images(&self) -> anyhow::Result<Vec<PlatformImage>> {
        let name = describe_image(self.repository.reference());
        let ResolvedReference { descriptor, manifest } = &self.resolved;
        if !descriptor.is_index() {
            return Ok(self
                .platform_image(descriptor, manifest.as_deref())
                .await
                .with_context(|| name)?
                .into_iter()
                .collect());
        }
        let content = match manifest {
            Some(content) => content.clone(),
            None => self.repository.fetch_manifest(descriptor).await.with_context(|| name.clone())?,
        };
        let mut images: Vec<PlatformImage> = Vec::new();
        for entry in Index::parse(&content).with_context(|| name.clone())?.manifests {
            let unknown = entry.platform.as_ref().is_some_and(|platform| platform.architecture == "unknown");
            if unknown || !entry.is_manifest() {
                continue;
            }
            images.extend(self.platform_image(&entry, None).await.with_context(|| name.clone())?);
        }
        Ok(images)
    }

    async fn platform_image(
        &self,
        descriptor: &Descriptor,
        content: Option<&[u8]>,
    ) -> anyhow::Result<Option<PlatformImage>> {
        #[derive(Deserialize)]
        struct ImageConfig {
            #[serde(default)]
            os: String,
            #[serde(default)]
            architecture: String,
            #[serde(default)]
            variant: String,
            rootfs: Option<RootFs>,
        }
        #[derive(Deserialize)]
        struct RootFs {
            diff_ids: Vec<String>,
        }
        let content = match content {
            Some(content) => content.to_vec(),
            None => self.repository.fetch_manifest(descriptor).await?,
        };
        let Manifest { config, layers, .. } = Manifest::parse(&content)?;
        let raw = self.repository.small_blob(&config, MAX_CONFIG).await?;
        let parsed: ImageConfig = serde_json::from_slice(&raw).context("its configuration is malformed")?;
        let Some(RootFs { diff_ids }) = parsed.rootfs else { return Ok(None) };
        if diff_ids.len() != layers.len() {
            bail!("its configuration has {} layers, and its manifest {}", diff_ids.len(), layers.len());
        }
        let layers =
            layers.into_iter().zip(diff_ids).map(|(blob, diff_id)| ImageLayer { blob, diff_id }).collect();
        let parts = [parsed.os, parsed.architecture, parsed.variant];
        let platform = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        Ok(Some(PlatformImage { platform, manifest: descriptor.clone(), content, config, layers }))
    }

    /// Downloads a layer, and unpacks it into a file without a name. `progress` receives bytes that have arrived.
    pub(super) async fn download_layer(
        &self,
        layer: &ImageLayer,
        scratch: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<TarFile> {
        let blob = self.download_blob(&layer.blob, scratch, progress).await?;
        let no_room = || format!("cannot write to {}: --scratch names another directory", scratch.display());
        let mut tar = tempfile::tempfile_in(scratch).with_context(no_room)?;
        let mut hasher =
            Hasher::expecting(&layer.diff_id).context("the configuration has an unknown digest")?;
        let mut content = unpack(BufReader::new(blob))?;
        let mut piece = vec![0; PIECE];
        loop {
            let read =
                content.read(&mut piece).with_context(|| format!("cannot unpack {}", layer.blob.digest))?;
            if read == 0 {
                break;
            }
            hasher.update(&piece[..read]);
            tar.write_all(&piece[..read]).with_context(no_room)?;
        }
        if !hasher.matches() {
            bail!("layer {} is not the one of the configuration", layer.blob.digest);
        }
        Ok(TarFile::new(tar)?)
    }

    async fn download_blob(
        &self,
        blob: &Descriptor,
        scratch: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<File> {
        let no_room = || format!("cannot write to {}: --scratch names another directory", scratch.display());
        let hasher = || Hasher::expecting(&blob.digest).context("the manifest has an unknown digest");
        let mut file = tempfile::tempfile_in(scratch).with_context(no_room)?;
        let (mut digest, mut done, mut tries) = (hasher()?, 0, 0);
        'tries: loop {
            let mut stream = self.repository.fetch_blob(blob, done, &[]).await?;
            if stream.offset() != done {
                file.set_len(0)?;
                file.rewind()?;
                (digest, done) = (hasher()?, 0);
            }
            while let Some(bytes) = stream.next().await {
                match bytes {
                    Ok(bytes) => {
                        file.write_all(&bytes).with_context(no_room)?;
                        digest.update(&bytes);
                        done += bytes.len() as u64;
                        progress(bytes.len() as u64);
                    }
                    Err(_) if tries < TRIES => {
                        tries += 1;
                        continue 'tries;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            break;
        }
        if !digest.matches() {
            bail!("the content of {} does not match its digest", blob.digest);
        }
        file.rewind()?;
        Ok(file)
    }

    pub(super) async fn push_blob(&self, blob: &Descriptor, open: Open<'_>) -> anyhow::Result<()> {
        self.repository.push_blob(blob, open).await?;
        Ok(())
    }

    /// Pushes the manifest of an artifact, and sees to it that it is found by its subject.
    pub(super) async fn push_referrer(
        &self,
        subject: &str,
        referrer: &Descriptor,
        content: &[u8],
    ) -> anyhow::Result<()> {
        let listed = self.repository.push_manifest(&referrer.digest, &referrer.media_type, content).await?;
        if !listed {
            self.repository.attach_by_tag(subject, referrer).await?;
        }
        Ok(())
    }
}

fn describe_image(image: &NormalizedReference) -> String {
    let (tag, digest) = (image.tag(), image.digest());
    let tag = tag.map(|tag| format!(":{tag}")).unwrap_or_default();
    let digest = digest.map(|digest| format!("@{digest}")).unwrap_or_default();
    format!("{}{tag}{digest}", image.name())
}
