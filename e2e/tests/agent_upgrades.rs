//! An agent in its unit, with a real systemd: upgrades and a delta. The other versions are scripts that run the installed
//! program, or don't.

use std::path::{Path, PathBuf};

use prepull_api::crd::upgrade::UpgradeSpec;
use prepull_api::failure::FailureCode;
use prepull_api::wire::TUNNEL_PATH;
use prepull_e2e::disk::{self, Disk, Format};
use prepull_e2e::images::delta::Delta;
use prepull_e2e::jobs::JobBuilder;
use prepull_e2e::machine::Machine;
use prepull_e2e::parts;
use prepull_e2e::ports::Port;
use prepull_e2e::prelude::*;
use prepull_e2e::signing::{SignatureForm, Signer};
use serde_json::json;

use crate::settings::Settings;

/// The downloaded program of the machine.
const DOWNLOAD: &str = "/root/download";
const KEY: &str = "/etc/edgecore-prepull/upgrade.pub";
const RECORD: &str = "/var/lib/edgecore-prepull/upgrade/record.json";
const HOSTS: &str = "/etc/containerd/certs.d";
const REPOSITORY: &str = "team/edgecore-prepull";
/// Size of the disk of the runtime: an agent with its defaults refuses images when the disk of the host is nearly full.
const DISK: u64 = 256 * MIB;

/// A joined machine, and the registry with the versions.
struct EdgeBox {
    machine: Machine,
    registry: Registry,
    signer: Signer,
    containerd: Containerd,
    /// The line that installs the agent, without the token.
    line: Vec<String>,
    _metrics: Port,
}

impl EdgeBox {
    /// `state`: where the state of the agent is, if it's to outlive the machine.
    async fn install(cloud: &Cloud, state: Option<&Path>) -> Result<Self> {
        let (registry, containerd) =
            tokio::try_join!(Registry::start().into_future(), Containerd::start_on("edge-1", Some(DISK)))?;
        let metrics = Port::reserve()?;
        let tunnel = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
        let mut line = [DOWNLOAD, "install", "--disk-min-free", "64MiB"].map(str::to_owned).to_vec();
        line.extend(["--enroll-url".to_owned(), format!("https://{}", cloud.enroll_addr())]);
        line.extend(["--tunnel-url".to_owned(), tunnel]);
        line.extend(["--metrics-listen".to_owned(), metrics.addr().to_string()]);
        line.extend(["--registry-config-path", HOSTS].map(str::to_owned));
        let machine = boot(&containerd, state).await?;
        let signer = Signer::ecdsa().await?;
        let new = Self { machine, registry, signer, containerd, line, _metrics: metrics };
        let mut command = new.machine.command(&new.line())?;
        command.env("PREPULL_TOKEN", cloud.token("edge-1").await?);
        parts::run_command(command).await?;
        let pid = new.pid().await?;
        new.install_key().await?;
        assert_eq!(new.pid().await?, pid, "a key needs no restart");
        Ok(new)
    }

    fn line(&self) -> Vec<&str> {
        self.line.iter().map(String::as_str).collect()
    }

    async fn install_key(&self) -> Result<()> {
        let (key, file) = (self.signer.public_key()?, "/root/release.pub");
        self.shell(&format!("printf '%s' '{key}' >{file}")).await?;
        let said = self.machine.run(&["edgecore-prepull", "install", "--upgrade-key", file]).await?;
        ensure!(said.contains(&format!("wrote {KEY}")), "{said}");
        Ok(())
    }

    /// The machine comes back after a power cut with what its disk has. Its other files are installed again.
    async fn power_on(mut self, disk: &mut Disk) -> Result<Self> {
        self.machine.end_processes();
        disk.power_on().await?;
        self.boot_again(disk.root()).await
    }

    async fn boot_again(mut self, state: &Path) -> Result<Self> {
        self.machine = boot(&self.containerd, Some(state)).await?;
        self.machine.run(&self.line()).await?;
        self.install_key().await?;
        Ok(self)
    }

    /// A version that does this when it's the agent.
    fn version(&self, version: &str, does: &str) -> Result<(String, Image)> {
        let script = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo edgecore-prepull {version}; exit; fi\n{does}\n"
        );
        let image = Image::of_executable("edgecore-prepull", script.as_bytes())?;
        Ok((self.registry.seed(&image, &format!("{REPOSITORY}:{version}"))?, image))
    }

    async fn signed(&self, version: &str, does: &str) -> Result<String> {
        let (reference, image) = self.version(version, does)?;
        self.signer.sign(&self.registry, REPOSITORY, image.digest(), SignatureForm::Tag).await?;
        Ok(reference)
    }

    /// The agent itself as another release: with this version, of the same length, wherever it has its own.
    async fn released(&self, version: &str) -> Result<String> {
        let file = Place::here()?.new_dir("release")?.join("edgecore-prepull");
        parts::strip_program("edgecore-prepull", &file).await?;
        let (own, mut program) = (env!("CARGO_PKG_VERSION").as_bytes(), std::fs::read(&file)?);
        ensure!(own.len() == version.len(), "{version} has another length");
        let found = program.windows(own.len()).enumerate().filter(|(_, bytes)| *bytes == own);
        for at in found.map(|(at, _)| at).collect::<Vec<_>>() {
            program[at..at + own.len()].copy_from_slice(version.as_bytes());
        }
        let image = Image::of_executable("edgecore-prepull", &program)?;
        let reference = self.registry.seed(&image, &format!("{REPOSITORY}:{version}"))?;
        self.signer.sign(&self.registry, REPOSITORY, image.digest(), SignatureForm::Tag).await?;
        Ok(reference)
    }

    async fn upgrade(&self, arguments: &[&str]) -> Result<String> {
        self.machine.run(&[&["edgecore-prepull", "upgrade"], arguments].concat()).await
    }

    /// The unit's process.
    async fn pid(&self) -> Result<String> {
        self.shell("systemctl show edgecore-prepull --property=MainPID").await
    }

    async fn shell(&self, line: &str) -> Result<String> {
        self.machine.run(&["sh", "-c", line]).await
    }

    /// Checks that this version runs in place of the installed one, by the record.
    async fn proves(&self, version: &str) -> Result<String> {
        self.shell(&format!("grep -A3 proved {RECORD} | grep -q {version}")).await
    }

    /// Waits until a program is on trial.
    async fn tries(&self) -> Result<()> {
        let look = format!("grep -A9 trial {RECORD} | grep -q '\"starts\": 1'");
        eventually("it is tried", SOON, async || self.shell(&look).await).await?;
        Ok(())
    }

    /// Whether the unit's process was launched by the installed program.
    async fn is_launched(&self) -> Result<bool> {
        let line = "tr '\\0' '\\n' </proc/$(systemctl show edgecore-prepull --property=MainPID --value)/environ | \
                    grep -c PREPULL_LAUNCHED_BY || true";
        Ok(self.shell(line).await?.trim() == "1")
    }
}

/// A cluster with the Node of a box.
async fn cloud() -> Result<(Cluster, Cloud)> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    Ok((cluster, cloud))
}

/// Directories for a disk, and for what is on it.
fn disk_dirs() -> Result<(PathBuf, PathBuf)> {
    let dir = Place::here()?.new_dir("state")?;
    let root = dir.join("root");
    std::fs::create_dir(&root)?;
    Ok((dir, root))
}

#[tokio::test]
async fn a_signed_version_proves_itself_or_goes_back() -> Result<()> {
    let (cluster, cloud) = cloud().await?;
    let node = EdgeBox::install(&cloud, None).await?;
    let runs = "exec /usr/local/bin/edgecore-prepull \"$@\"";

    let (unsigned, _) = node.version("9.0.0", runs)?;
    refusal(node.upgrade(&[&unsigned]).await, "the image is not signed")?;
    node.shell(&format!("test ! -e {RECORD}")).await?;

    let second = node.signed("2.0.0", runs).await?;
    let said = node.upgrade(&[&second]).await?;
    ensure!(said.contains("2.0.0 runs and is connected"), "{said}");
    let image = node.registry.seed(&Image::of_layers("under", &[MIB])?, "team/under:v1")?;
    cluster.job("under-2").on(["edge-1"]).images([&image]).completes().await?;
    ensure!(node.containerd.has_image(&image).await?, "the image is not there");
    node.shell("systemctl restart edgecore-prepull").await?;
    eventually("the second version runs after a restart", SOON, async || {
        ensure!(node.is_launched().await?, "the installed one runs");
        Ok(())
    })
    .await?;

    // A version that hangs: the second one runs again, and the error has the reason.
    let hangs = node.signed("4.0.0", "exec sleep 1000").await?;
    refusal(
        node.upgrade(&["--within", "10s", &hangs]).await,
        "2.0.0 runs again: it did not answer at 127.0.0.1",
    )?;
    cluster.job("again-under-2").on(["edge-1"]).images([&image]).completes().await?;
    let programs = node.shell("ls /var/lib/edgecore-prepull/upgrade/programs | wc -l").await?;
    assert_eq!(programs.trim(), "1", "only the second version is kept");
    let status = node.machine.run(&["edgecore-prepull", "status"]).await?;
    ensure!(status.contains(&format!("4.0.0 of {hangs} was given up")), "{status}");

    // A damaged program: the installed one runs.
    node.shell("for f in /var/lib/edgecore-prepull/upgrade/programs/*; do echo exit 1 >$f; done").await?;
    node.shell("systemctl restart edgecore-prepull").await?;
    cluster.job("after-damage").on(["edge-1"]).images([&image]).completes().await?;
    ensure!(!node.is_launched().await?, "a damaged program runs");

    // One that proves itself, and then ends whenever it's started.
    let fades = format!("m=/var/lib/edgecore-prepull/seen; test -e $m && exit 1\n: >$m\n{runs}");
    let fades = node.signed("7.0.0", &fades).await?;
    let said = node.upgrade(&[&fades]).await?;
    ensure!(said.contains("7.0.0 runs and is connected"), "{said}");
    let restart = "systemctl reset-failed edgecore-prepull; systemctl restart edgecore-prepull";
    eventually("the installed program runs", SOON, async || {
        node.shell(restart).await?;
        node.shell(&format!("grep -q 'started 8 times within 10 minutes' {RECORD}")).await
    })
    .await?;
    cluster.job("after-restarts").on(["edge-1"]).images([&image]).completes().await?;

    node.upgrade(&[&second]).await?;
    let said = node.upgrade(&["--undo"]).await?;
    ensure!(said.contains("runs again"), "{said}");
    cluster.job("after-undo").on(["edge-1"]).images([&image]).completes().await?;
    ensure!(!node.is_launched().await?, "the installed program does not run");
    Ok(())
}

async fn boot(containerd: &Containerd, state: Option<&Path>) -> Result<Machine> {
    let machine = match state {
        Some(state) => Machine::boot_with_state("edge-1", containerd, state).await?,
        None => Machine::boot("edge-1", containerd).await?,
    };
    // Its containerd is outside of the machine, so only what is mounted counts as seen by both.
    machine.run(&["sh", "-c", &format!("mkdir -p {HOSTS} && mount --bind {HOSTS} {HOSTS}")]).await?;
    Ok(machine)
}

/// A job that upgrades edge-1 to this image.
fn upgrade_job<'a>(cluster: &'a Cluster, name: &str, image: &str) -> JobBuilder<'a> {
    let upgrade = UpgradeSpec { within: Some("20s".to_owned()), packages: false };
    cluster
        .job(name)
        .on(["edge-1"])
        .images([image])
        .spec(|spec| spec.image_pre_pull_template.upgrade = Some(upgrade))
}

#[tokio::test]
async fn a_job_upgrades_an_agent_or_it_goes_back() -> Result<()> {
    let (cluster, cloud) = cloud().await?;
    let node = EdgeBox::install(&cloud, None).await?;
    let runs = "exec /usr/local/bin/edgecore-prepull \"$@\"";

    let (unsigned, _) = node.version("9.0.0", runs)?;
    let status = upgrade_job(&cluster, "unsigned", &unsigned).fails().await?;
    let image = status.image("edge-1", &unsigned).context("no image")?;
    ensure!(image.code == Some(FailureCode::SignatureInvalid), "{image:?}");

    let second = node.signed("2.0.0", runs).await?;
    let status = upgrade_job(&cluster, "second", &second).completes().await?;
    let digest = status.image("edge-1", &second).and_then(|image| image.digest.as_ref());
    ensure!(digest.is_some(), "the status has no digest: {status:?}");
    node.proves("2.0.0").await?;
    // It runs already: no trial, no restart.
    let running = node.pid().await?;
    upgrade_job(&cluster, "again", &second).completes().await?;
    assert_eq!(node.pid().await?, running);

    let ends = node.signed("3.0.0", "exit 7").await?;
    let status = upgrade_job(&cluster, "ends", &ends).fails().await?;
    let image = status.image("edge-1", &ends).context("no image")?;
    ensure!(image.code == Some(FailureCode::UpgradeFailed), "{image:?}");
    ensure!(image.reason.contains("3.0.0 has not proved itself: it ended after"), "{}", image.reason);
    node.proves("2.0.0").await?;
    // The programs have given way to each other: systemd had nothing to do.
    let restarts = node.shell("systemctl show edgecore-prepull --property=NRestarts --value").await?;
    assert_eq!(restarts.trim(), "0");

    // From a program that the installed one became, and killed in the middle of the trial.
    node.shell("systemctl restart edgecore-prepull").await?;
    let slow = node.signed("7.0.0", &format!("sleep 3\n{runs}")).await?;
    let (upgraded, killed) = tokio::join!(upgrade_job(&cluster, "slow", &slow).completes(), async {
        node.tries().await?;
        node.shell("systemctl kill --signal=KILL edgecore-prepull").await
    });
    upgraded?;
    killed?;
    node.proves("7.0.0").await?;

    let alone = "exec /usr/local/bin/edgecore-prepull \"$@\" --tunnel-url wss://127.0.0.1:1/v1/edge";
    let alone = node.signed("5.0.0", alone).await?;
    let status = upgrade_job(&cluster, "alone", &alone).fails().await?;
    ensure!(status.reason.contains("UpgradeFailed"), "{}", status.reason);
    let node_status = status.node("edge-1").context("no node")?;
    ensure!(node_status.reason.contains("it did not connect to cloudcore within 20 s"), "{node_status:?}");
    node.proves("7.0.0").await?;
    let image = node.registry.seed(&Image::of_layers("afterwards", &[MIB])?, "team/afterwards:v1")?;
    cluster.job("afterwards").on(["edge-1"]).images([&image]).completes().await?;
    a_delta_is_applied(&cluster, &node).await
}

/// The unit lets the agent do what a delta needs.
async fn a_delta_is_applied(cluster: &Cluster, node: &EdgeBox) -> Result<()> {
    let versions = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    let before = node.registry.seed(&versions[0], "team/app:v1")?;
    let after = node.registry.seed(&versions[1], "team/app:v2")?;
    node.registry.seed_delta("team/app", &Delta::between(&versions[0], &versions[1])?)?;
    cluster.job("before").on(["edge-1"]).images([&before]).completes().await?;
    let status = cluster.job("after").on(["edge-1"]).images([&after]).completes().await?;
    let image = status.image("edge-1", &after).context("no image")?;
    ensure!(image.facts.delta_saved_bytes.is_some_and(|saved| saved > 11 * MIB), "{image:?}");
    Ok(())
}

#[tokio::test]
async fn real_releases_replace_each_other_both_ways() -> Result<()> {
    let (cluster, cloud) = cloud().await?;
    let node = EdgeBox::install(&cloud, None).await?;
    let image = node.registry.seed(&Image::of_layers("released", &[MIB])?, "team/released:v1")?;
    let pulls = async |name: &str| {
        let job = cluster.job(name).on(["edge-1"]).images([&image]).policy("Always");
        job.completes().await.map(drop)
    };
    for version in ["0.9.0", "0.0.9"] {
        let release = node.released(version).await?;
        upgrade_job(&cluster, &format!("to-{version}"), &release).completes().await?;
        node.proves(version).await?;
        pulls(&format!("under-{version}")).await?;
        node.shell("systemctl restart edgecore-prepull").await?;
        eventually("it runs after a restart", SOON, async || {
            let status = node.machine.run(&["edgecore-prepull", "status"]).await?;
            ensure!(status.contains(version), "{status}");
            Ok(())
        })
        .await?;
        pulls(&format!("again-under-{version}")).await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_upgrade_survives_power_cuts() -> Result<()> {
    let (cluster, cloud) = cloud().await?;
    let (dir, root) = disk_dirs()?;
    let mut disk = Disk::mount(Format::Ext4, disk::SIZE, &dir, &root).await?;
    let node = EdgeBox::install(&cloud, Some(&root)).await?;
    let slow = "sleep 3\nexec /usr/local/bin/edgecore-prepull \"$@\"";
    let second = node.signed("2.0.0", slow).await?;

    let job = upgrade_job(&cluster, "second", &second).apply().await?;
    node.tries().await?;
    disk.cut_power()?;
    let node = node.power_on(&mut disk).await?;
    job.completes().await?;

    // A success must be on the disk, and so must settings that the status calls in force.
    let settings = Settings::of(&cluster);
    settings.apply("cap", json!({ "nodeNames": ["edge-1"], "maxDownloadRate": "64Mi" })).await?;
    settings.are_in_force("cap").await?;
    disk.cut_power()?;
    let node = node.power_on(&mut disk).await?;
    node.proves("2.0.0").await?;
    settings.are_in_force("cap").await?;
    let sent = cloud.log().matches("sends the settings of the node").count();
    ensure!(sent == 1, "they were sent {sent} times");
    let image = node.registry.seed(&Image::of_layers("afterwards", &[MIB])?, "team/afterwards:v1")?;
    cluster.job("afterwards").on(["edge-1"]).images([&image]).completes().await?;
    ensure!(node.is_launched().await?, "the installed program runs");
    Ok(())
}

#[tokio::test]
async fn an_upgrade_survives_a_cut_at_any_write() -> Result<()> {
    let (cluster, cloud) = cloud().await?;
    let (dir, root) = disk_dirs()?;
    let mut disk = Disk::record(Format::Ext4, &dir, &root).await?;
    let mut node = EdgeBox::install(&cloud, Some(&root)).await?;
    let second = node.signed("2.0.0", "exec /usr/local/bin/edgecore-prepull \"$@\"").await?;
    let begun = disk.recorded();
    upgrade_job(&cluster, "second", &second).completes().await?;
    let known = disk.recorded();
    node.machine.end_processes();
    let recording = disk.end_recording()?;

    let mut chance = Chance::new(53, 0);
    let cuts = recording.cuts(begun, crate::power::cuts(), &mut chance);
    for (number, cut) in cuts.into_iter().chain([known]).enumerate() {
        let at = || format!("cut before event {cut} of {}, the cloud knew at {known}", recording.len());
        disk.insert(&recording, cut, &mut chance).await.with_context(at)?;
        let record =
            std::fs::read_to_string(root.join("upgrade/record.json")).unwrap_or_else(|_| "{}".to_owned());
        let record: serde_json::Value = serde_json::from_str(&record).with_context(at)?;
        println!("{}: {record}", at());
        ensure!(cut < known || record["proved"]["version"] == "2.0.0", "{}: {record}", at());
        node = node.boot_again(&root).await.with_context(at)?;
        // It pulls, and takes the version that it doesn't have yet.
        let image =
            node.registry.seed(&Image::of_layers("after", &[MIB])?, &format!("team/after:v{number}"))?;
        let after = cluster.job(&format!("after-{number}")).on(["edge-1"]).images([&image]);
        after.completes().await.with_context(at)?;
        upgrade_job(&cluster, &format!("again-{number}"), &second).completes().await.with_context(at)?;
        node.proves("2.0.0").await.with_context(at)?;
        node.machine.end_processes();
    }
    Ok(())
}
