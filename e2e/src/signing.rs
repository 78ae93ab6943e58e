//! cosign: key pairs, and signatures of images in a registry.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::parts;
use crate::place::Place;
use crate::registry::Registry;

/// The place of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureForm {
    /// At the tag `sha256-….sig`, like cosign 2.
    Tag,
    /// In a sigstore bundle that refers to the image, like cosign 3.
    Bundle,
}

/// A key pair, and the cosigns that sign with it. Nothing is sent to a transparency log.
pub struct Signer {
    dir: PathBuf,
    /// Keeps the files.
    _place: Arc<Place>,
}

impl Signer {
    /// A key pair of cosign's own making: ECDSA on P-256.
    pub async fn ecdsa() -> Result<Self> {
        let signer = Self::new()?;
        signer.run(SignatureForm::Tag, &["generate-key-pair"]).await?;
        Ok(signer)
    }

    /// A key pair of Ed25519, which OpenSSL makes and cosign imports.
    pub async fn ed25519() -> Result<Self> {
        let signer = Self::new()?;
        let mut command = Command::new("openssl");
        command.current_dir(&signer.dir).args(["genpkey", "-algorithm", "ed25519", "-out", "ed25519.pem"]);
        parts::run_command(command).await?;
        let import = ["import-key-pair", "--key", "ed25519.pem", "--output-key-prefix", "cosign"];
        signer.run(SignatureForm::Tag, &import).await?;
        Ok(signer)
    }

    fn new() -> Result<Self> {
        let place = Place::here()?;
        Ok(Self { dir: place.new_dir("cosign")?, _place: place })
    }

    /// The public key in PEM.
    pub fn public_key(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.dir.join("cosign.pub"))?)
    }

    /// Fingerprint of the public key as the docs compute it: by OpenSSL, in the form of `signedBy`.
    pub async fn fingerprint(&self) -> Result<String> {
        let mut command = Command::new("sh");
        let pipe = "openssl pkey -pubin -in cosign.pub -outform DER | sha256sum";
        command.current_dir(&self.dir).args(["-c", pipe]);
        let sum = parts::run_command(command).await?;
        Ok(format!("sha256:{}", sum.get(..12).context("no sum")?))
    }

    /// Signs an image of a registry without users: a repository, and a digest.
    pub async fn sign(
        &self,
        registry: &Registry,
        repository: &str,
        digest: &str,
        form: SignatureForm,
    ) -> Result<()> {
        let image = registry.image(&format!("{repository}@{digest}"));
        self.run_with(form, &["sign", &image]).await
    }

    /// Attests something else about an image: a statement by the same key that isn't a signature.
    pub async fn attest(&self, registry: &Registry, repository: &str, digest: &str) -> Result<()> {
        let image = registry.image(&format!("{repository}@{digest}"));
        std::fs::write(self.dir.join("predicate.json"), "{\"found\": \"many flaws\"}")?;
        self.run_with(SignatureForm::Bundle, &["attest", "--predicate", "predicate.json", &image]).await
    }

    async fn run_with(&self, form: SignatureForm, args: &[&str]) -> Result<()> {
        let mut all =
            vec![args[0], "--key", "cosign.key", "--yes", "--allow-http-registry", "--tlog-upload=false"];
        if form == SignatureForm::Bundle {
            all.push("--use-signing-config=false");
        }
        all.extend(&args[1..]);
        self.run(form, &all).await
    }

    async fn run(&self, form: SignatureForm, args: &[&str]) -> Result<()> {
        let release = if form == SignatureForm::Tag { "2.5" } else { "3.1" };
        let mut script = Command::new(parts::setup_dir().join("cosign.sh"));
        script.arg(release);
        let program = parts::run_command(script).await?;
        let mut command = Command::new(program.trim());
        // It keeps a cache in its home, and asks for a password if there's none.
        command.current_dir(&self.dir).env("HOME", &self.dir).env("COSIGN_PASSWORD", "").args(args);
        parts::run_command(command).await.with_context(|| format!("cosign {release} {}", args[0])).map(drop)
    }
}
