//! The program in a released image: the keys that it's signed with, and its way onto trial.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use prepull_api::download::{Verification, VerificationMode};
use tokio::process::Command;
use tokio::time::timeout;

use super::{Program, UpgradeFiles};
use crate::images::verify::check_keys;

/// A program prints its version within milliseconds.
const PRINT: Duration = Duration::from_secs(10);

/// Reads the public keys of a release, for [`super::KEY`].
///
/// # Errors
/// The file can't be read, or has something else than public keys.
pub(crate) fn read_key(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read --upgrade-key {}", file.display()))?;
    check_keys(std::slice::from_ref(&text))
        .map_err(|flaw| anyhow!("--upgrade-key {}: {flaw}", file.display()))?;
    Ok(text)
}

/// The signature that an image needs: by one of the public keys in these files.
///
/// # Errors
/// A file can't be read.
pub(crate) fn signature_by(files: &[PathBuf]) -> anyhow::Result<Verification> {
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file).with_context(|| {
            format!("cannot read {}: put the public key there by which releases are signed, by `install --upgrade-key FILE`", file.display())
        })
    };
    let keys = files.iter().map(read).collect::<anyhow::Result<_>>()?;
    Ok(Verification { mode: VerificationMode::Enforce, keys, unavailable: None })
}

/// Stores a program, and has it tried at the next start of the installed one, which has the version `base`. It has `within` to
/// prove itself.
///
/// # Errors
/// It doesn't run on this machine, or the disk refuses it. Then nothing has changed.
pub(crate) async fn put_on_trial(
    files: &UpgradeFiles,
    base: &str,
    image: &str,
    content: &[u8],
    within: Duration,
) -> anyhow::Result<Program> {
    let mut record = files.read_record()?;
    // A power cut may have left a program without a record.
    files.remove_unnamed(&record);
    let tried = async {
        let (digest, path) = files.store_program(content)?;
        let version = print_version(&path).await;
        let version =
            version.with_context(|| format!("the program of {image} does not run on this machine"))?;
        let program = Program { digest, version, image: image.to_owned() };
        record.try_program(base, program.clone(), within.as_secs());
        files.write_record(&record)?;
        Ok(program)
    };
    let tried = tried.await;
    if tried.is_err()
        && let Ok(record) = files.read_record()
    {
        files.remove_unnamed(&record);
    }
    tried
}

/// Runs `PROGRAM --version`: another architecture, or a damaged file, shows here.
async fn print_version(program: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command.arg("--version").env_clear().stdin(Stdio::null()).kill_on_drop(true);
    let output =
        timeout(PRINT, command.output()).await.map_err(|_| anyhow!("`--version` does not end"))??;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim().strip_prefix("edgecore-prepull ") {
        Some(version) if output.status.success() && version.len() <= 64 => Ok(version.to_owned()),
        _ => bail!("`--version` prints no version of edgecore-prepull ({})", output.status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_without_a_record_leaves_no_file() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let files = UpgradeFiles::in_state_dir(dir.path());
        let (_, left) = files.store_program(b"of a power cut")?;
        // The record can't be written: its temporary file is a directory.
        std::fs::create_dir(dir.path().join("upgrade/record.tmp"))?;
        let program = b"#!/bin/sh\necho edgecore-prepull 2.0.0\n";
        let refused = put_on_trial(&files, "1.0.0", "agent:2", program, PRINT).await;
        assert!(refused.is_err_and(|error| error.to_string().starts_with("cannot write")));
        assert!(!left.exists());
        assert_eq!(std::fs::read_dir(dir.path().join("upgrade/programs"))?.count(), 0);
        Ok(())
    }
}
