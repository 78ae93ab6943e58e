//! The program in a released image, and the keys that it's signed with.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use tokio::process::Command;
use tokio::time::timeout;

/// A program prints its version within milliseconds.
const PRINT: Duration = Duration::from_secs(10);

/// Reads public keys.
///
/// # Errors
/// A file can't be read.
pub(crate) fn read_keys(files: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file).with_context(|| {
            format!("cannot read {}: put the public key there by which releases are signed", file.display())
        })
    };
    files.iter().map(read).collect()
}

/// Runs `PROGRAM --version`: another architecture, or a damaged file, shows here.
///
/// # Errors
/// It doesn't run, or prints something else.
pub(crate) async fn print_version(program: &Path) -> anyhow::Result<String> {
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
