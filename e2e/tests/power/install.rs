//! Power cuts during an installation: each file is the old one or the new one, and repeating the command finishes it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use prepull_api::wire::TUNNEL_PATH;
use prepull_e2e::disk::Disk;
use prepull_e2e::parts;
use prepull_e2e::prelude::*;

use super::cuts;

/// Paths of an agent's files.
const WRITTEN: [&str; 3] = ["etc", "usr/local", "var/lib"];
/// The written files: the program, the settings, and the identity. A unit would be written like the settings; without
/// systemd there's no unit.
const FILES: [&str; 5] = [
    "usr/local/up/bin/edgecore-prepull",
    "etc/up/edgecore-prepull/config.yaml",
    "var/lib/up/edgecore-prepull/connection.json",
    "var/lib/up/edgecore-prepull/pki/ca.crt",
    "var/lib/up/edgecore-prepull/pki/client.crt",
];
/// The key of a request to join, before and after its certificate arrives.
const KEYS: [&str; 2] = ["client.key.new", "client.key"];
/// The exit status of an installation without systemd.
const NO_SYSTEMD: i32 = 3;

/// A box with its files on a disk.
struct Box {
    root: PathBuf,
    download: PathBuf,
    addresses: [String; 4],
}

impl Box {
    /// Installs the agent, with its files on the disk, layered above this machine's files.
    fn install(&self, token: &str) -> Result<Output> {
        let script = r#"root=$1; shift
            for dir in etc usr/local var/lib; do
                mkdir -p "$root/$dir/up" "$root/$dir/work"
                mount -t overlay -o "lowerdir=/$dir,upperdir=$root/$dir/up,workdir=$root/$dir/work" box "/$dir"
            done
            exec "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", script, "sh"]).args([&self.root, &self.download]);
        command.args(["install", "--node-name", "edge-1"]).args(&self.addresses).env("PREPULL_TOKEN", token);
        Ok(command.output()?)
    }

    fn files(&self) -> BTreeMap<&'static str, Vec<u8>> {
        let read = |file: &'static str| Some((file, std::fs::read(self.root.join(file)).ok()?));
        FILES.into_iter().filter_map(read).collect()
    }

    fn has_key(&self) -> bool {
        let pki = self.root.join("var/lib/up/edgecore-prepull/pki");
        KEYS.into_iter().any(|key| pki.join(key).exists())
    }

    fn leftovers(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for directory in WRITTEN.iter().map(|dir| self.root.join(dir).join("up")) {
            found.extend(temporaries(&directory)?);
        }
        Ok(found)
    }
}

fn temporaries(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(temporaries(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "tmp" || extension == "new") {
            found.push(path);
        }
    }
    Ok(found)
}

fn check(output: &Output) -> Result<()> {
    let said = [&output.stdout[..], &output.stderr].concat();
    ensure!(
        output.status.code() == Some(NO_SYSTEMD),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&said)
    );
    Ok(())
}

#[tokio::test]
async fn an_install_survives_a_cut_at_any_write() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let dir = Place::here()?.new_dir("box")?;
    let root = dir.join("root");
    std::fs::create_dir(&root)?;
    // Stripped of debug information, so that it's written quickly.
    let download = dir.join("download");
    parts::strip_program("edgecore-prepull", &download).await?;
    let enroll = format!("https://{}", cloud.enroll_addr());
    let tunnel = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
    let addresses = ["--enroll-url".to_owned(), enroll, "--tunnel-url".to_owned(), tunnel];
    let of_box = Box { root, download, addresses };

    let mut disk = Disk::record(Format::Ext4, &dir, &of_box.root).await?;
    let token = cloud.token("edge-1").await?;
    check(&of_box.install(&token)?)?;
    let whole = of_box.files();
    ensure!(whole.len() == FILES.len(), "{:?}", whole.keys());
    let ended = disk.recorded();
    let recording = disk.end_recording()?;
    let mut chance = Chance::new(32, 0);
    // One at the very end as well: all files must be there.
    for cut in recording.cuts(0, cuts() * 2, &mut chance).into_iter().chain([ended]) {
        let at = || format!("cut before event {cut} of {}, ended at {ended}", recording.len());
        disk.insert(&recording, cut, &mut chance).await.with_context(at)?;
        let found = of_box.files();
        println!("{}: {} files", at(), found.len());
        ensure!(cut < ended || found == whole, "{}: {:?}", at(), found.keys());
        for (file, content) in &found {
            ensure!(whole.get(file) == Some(content), "{}: {file} is neither the old nor the new one", at());
        }
        // Before there's a key, the cloud wasn't asked; here it was, in the lost part of the recording.
        let token = if of_box.has_key() { token.clone() } else { cloud.token("edge-1").await? };
        check(&of_box.install(&token)?).with_context(at)?;
        let again = of_box.files();
        ensure!(again.len() == FILES.len(), "{}: {:?}", at(), again.keys());
        for file in &FILES[..2] {
            ensure!(again.get(file) == whole.get(file), "{}: {file} differs", at());
        }
        assert_eq!(of_box.leftovers()?, [""; 0].map(PathBuf::from), "{}", at());
    }
    Ok(())
}
