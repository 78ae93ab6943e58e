//! Shell commands and `kubectl edit`, as in the manual.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cluster::Cluster;
use crate::parts;

impl Cluster {
    /// Runs a line of shell, with a `kubectl` and its plugin that have all rights in the cluster, and returns its output.
    pub async fn shell(&self, line: &str) -> Result<String> {
        let mut command = self.shell_command()?;
        command.args(["-ec", line]);
        parts::run_command(command).await.with_context(|| line.to_owned())
    }

    /// Runs a line of shell like [`Self::shell`], in this directory. Returns its exit status, and its output with its errors.
    pub async fn shell_status(&self, dir: &Path, line: &str) -> Result<(i32, String)> {
        let mut command = self.shell_command()?;
        command.current_dir(dir).args(["-c", line]).env("COLUMNS", "160").env("NO_COLOR", "1");
        let output =
            tokio::process::Command::from(command).output().await.with_context(|| line.to_owned())?;
        let all = [output.stdout, output.stderr].concat();
        let status = output.status.code().context("a signal has ended it")?;
        Ok((status, String::from_utf8_lossy(&all).into_owned()))
    }

    /// Runs `kubectl apply`, which removes fields that the YAML no longer has.
    pub async fn kubectl_apply(&self, yaml: &str) -> Result<String> {
        let file = self.place().new_dir("apply")?.join("objects.yaml");
        std::fs::write(&file, yaml)?;
        self.kubectl(&["apply", "-f", file.to_str().context("not UTF-8")?]).await
    }

    /// Runs a `kubectl edit` command with an editor that replaces the line `line` by `text`.
    pub async fn kubectl_edit(&self, kubectl: &str, line: &str, text: &str) -> Result<String> {
        let dir = self.place().new_dir("editor")?;
        let (insert, editor) = (dir.join("text"), dir.join("editor.sh"));
        std::fs::write(&insert, text)?;
        let script = format!(
            "grep -qx -- {line:?} \"$1\" || {{ cat \"$1\" >&2; exit 1; }}\n\
             sed -i -e '/^{line}$/{{r {}\n d}}' \"$1\"\n",
            insert.display()
        );
        std::fs::write(&editor, script)?;
        let mut command = self.shell_command()?;
        command.env("KUBE_EDITOR", format!("bash -e {}", editor.display()));
        command.args(["-ec", kubectl]);
        parts::run_command(command).await.with_context(|| kubectl.to_owned())
    }

    fn shell_command(&self) -> Result<Command> {
        let home = self.place().dir().join("home");
        let programs = home.join("bin");
        std::fs::create_dir_all(&programs)?;
        let plugin = parts::program_path("kubectl-prepull").ok().map(|plugin| ("kubectl-prepull", plugin));
        for (name, program) in [("kubectl", parts::kubectl())].into_iter().chain(plugin) {
            let link = programs.join(name);
            if program.is_absolute() && !link.exists() {
                symlink(program, link)?;
            }
        }
        let mut path = vec![programs];
        path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        let mut command = Command::new("bash");
        command.env("PATH", std::env::join_paths::<Vec<PathBuf>, PathBuf>(path)?);
        command.env("HOME", home).env("KUBECONFIG", self.kubeconfig());
        Ok(command)
    }
}
