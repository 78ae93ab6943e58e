//! `edgecore-prepull upgrade`: another version of the agent, from a signed image.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use prepull_api::download::DownloadTerms;
use prepull_program::errors::with_causes;
use tokio::time::{Instant, interval};

use super::install::machine::find_init;
use super::install::places::{InstallPlaces, UNIT};
use super::install::plan::Init;
use super::install::{print_line, proxies, systemd};
use super::pull::{Attempted, pull};
use crate::commands::args::{PullOptions, UpgradeArgs};
use crate::config::{AgentSettings, Effective, Listen, Rate};
use crate::images::fetch::FetchMode;
use crate::images::providers::ProviderSettings;
use crate::images::puller::Puller;
use crate::settings::CloudSettings;
use crate::upgrade::{
    IN_CONTAINER, MOST_BYTES, PATH, Program, SETTLE, UNASKED, UpgradeFiles, UpgradeRecord, VERSION,
    put_on_trial, signature_by,
};

/// How often we look whether the trial has ended.
const LOOK: Duration = Duration::from_millis(200);
/// How much longer than the program has we wait: it may be started three times, and is stopped at the end.
const GRACE: Duration = Duration::from_secs(60);

/// Upgrades, or goes back with `--undo`.
pub(crate) async fn run(args: UpgradeArgs) -> anyhow::Result<ExitCode> {
    let settings = read_settings(&args)?;
    let files = UpgradeFiles::in_state_dir(&settings.state_dir);
    let init = find_init(&InstallPlaces::default());
    if init == Init::Container {
        bail!(IN_CONTAINER);
    }
    let record = files.read_record()?;
    if args.undo {
        return undo_upgrade(&files, record, init).await;
    }
    if record.is_trying() {
        bail!("an upgrade is being tried: wait for its end, or end it with --undo");
    }
    if settings.metrics_listen == Listen::Off {
        bail!(UNASKED);
    }
    let image = args.image.ok_or_else(|| anyhow!("no image is given"))?;
    let terms = DownloadTerms { verify: Some(signature_by(&args.key)?), ..DownloadTerms::default() };
    let how = pull_as_agent(args.how, &settings);
    let proxies = std::fs::read_to_string(InstallPlaces::default().proxies).unwrap_or_default();
    let proxies = proxies::of_agent(&proxies);
    let Attempted { code, images, puller } = pull(vec![image.clone()], how, terms, proxies).await?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    // What was verified: the reference may have got another image since.
    let id = images.first().and_then(|image| image.id.as_deref());
    let id = id.ok_or_else(|| anyhow!("the container runtime reports no id of {image}"))?;
    let read = puller.read_file(id, PATH, MOST_BYTES).await;
    let content = read.map_err(|why| anyhow!("cannot take /{PATH} out of {image}: {why}"))?;
    let Program { digest, version, .. } =
        put_on_trial(&files, VERSION, &image, &content, args.within).await?;
    print_line(&format!(
        "{version} is tried: it has {} to connect",
        humantime::format_duration(args.within)
    ))?;
    restart_agent(init).await?;
    match wait_for_end(&files, args.within).await? {
        Some(ended) if ended.proved_program().is_some_and(|program| program.digest == digest) => {
            print_line(&format!("{version} runs and is connected"))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(ended) => {
            let why = ended
                .last_outcome()
                .and_then(|last| last.went_back.as_deref())
                .unwrap_or("its record is gone");
            let now = ended.proved_program().map_or(VERSION, |program| &program.version);
            bail!("{version} has not proved itself, and {now} runs again: {why}")
        }
        None => bail!("{version} is still being tried; `journalctl --unit {UNIT}` shows it"),
    }
}

/// How the agent of this machine pulls; flags win. Its windows don't count, since a person decides, and neither do its limits
/// for the free space: the program has some MiB.
fn pull_as_agent(how: PullOptions, settings: &Effective) -> PullOptions {
    let in_force = CloudSettings::load(&settings.state_dir, settings.own_bounds()).in_force();
    let ProviderSettings { config, bin_dir, timeout } = settings.providers.clone();
    PullOptions {
        // Only the agent verifies signatures.
        fetch: FetchMode::Agent,
        runtime_endpoint: how.runtime_endpoint.or_else(|| settings.runtime_endpoint.clone()),
        max_download_rate: how.max_download_rate.or(in_force.max_download_rate.map(Rate)),
        registry_config_path: how.registry_config_path.or_else(|| settings.fetch.hosts_dir.clone()),
        image_credential_provider_config: how.image_credential_provider_config.or(config),
        image_credential_provider_bin_dir: how.image_credential_provider_bin_dir.or(bin_dir),
        image_credential_provider_timeout: how.image_credential_provider_timeout.or(timeout),
        ..how
    }
}

/// Runs the installed program again.
async fn undo_upgrade(
    files: &UpgradeFiles,
    mut record: UpgradeRecord,
    init: Init,
) -> anyhow::Result<ExitCode> {
    if !record.is_trying() && record.proved_program().is_none() {
        print_line(&format!("the installed program, {VERSION}, runs already"))?;
        return Ok(ExitCode::SUCCESS);
    }
    record.undo();
    files.write_record(&record)?;
    restart_agent(init).await?;
    print_line(&format!("the installed program, {VERSION}, runs again"))?;
    Ok(ExitCode::SUCCESS)
}

/// The settings of the agent, as far as its file has them.
fn read_settings(args: &UpgradeArgs) -> anyhow::Result<Effective> {
    let usual = InstallPlaces::default().settings;
    let file = args.config.clone().or_else(|| usual.exists().then_some(usual));
    let file = file.as_deref().map(AgentSettings::from_file_by_hand).transpose()?.unwrap_or_default();
    Ok(AgentSettings::default().or_file(file))
}

async fn restart_agent(init: Init) -> anyhow::Result<()> {
    if init == Init::Systemd {
        // A few upgrades in a row would meet the limit of starts.
        systemd::systemctl(&["reset-failed", UNIT]).await?;
        return systemd::systemctl(&["restart", UNIT]).await;
    }
    print_line("no systemd runs here: restart the agent now")
}

/// The record at the end of the trial; `None` if it doesn't end in time.
async fn wait_for_end(files: &UpgradeFiles, within: Duration) -> anyhow::Result<Option<UpgradeRecord>> {
    let (deadline, mut looks) = (Instant::now() + 3 * (within + SETTLE) + GRACE, interval(LOOK));
    while Instant::now() < deadline {
        looks.tick().await;
        match files.read_record() {
            Ok(record) if record.is_trying() => {}
            Ok(record) => return Ok(Some(record)),
            Err(error) => bail!("{}", with_causes(error.as_ref())),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser as _;

    use super::*;
    use crate::commands::args::{AgentCommand, Cli};

    #[test]
    fn an_upgrade_pulls_as_the_agent_does() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("settings.json"), r#"{"maxDownloadRate": 1000}"#)?;
        let text = "runtimeEndpoint: /a.sock\nmaxDownloadRate: 1MiB\nregistryConfigPath: /hosts\n\
                    imageCredentialProviderConfig: /providers\nimageCredentialProviderBinDir: /bin\n\
                    downloadWindow: [\"01:00+1h\"]\n";
        let mut settings = AgentSettings::from_text(text).map_err(anyhow::Error::msg)?;
        settings.state_dir = Some(dir.path().to_owned());
        let settings = AgentSettings::default().or_file(settings);
        for (line, rate, hosts) in [
            ("", 1000, "/hosts"),
            (" --max-download-rate 2MiB --registry-config-path /mine", 2 << 20, "/mine"),
        ] {
            let line = format!("edgecore-prepull upgrade{line} agent:2");
            let AgentCommand::Upgrade(args) = Cli::try_parse_from(line.split(' '))?.command else {
                bail!("another command")
            };
            let how = pull_as_agent(args.how, &settings);
            assert_eq!(how.runtime_endpoint, settings.runtime_endpoint);
            assert_eq!(how.max_download_rate.map(|Rate(rate)| rate.get()), Some(rate));
            assert_eq!(how.registry_config_path.as_deref(), Some(Path::new(hosts)));
            assert_eq!(how.image_credential_provider_config.as_deref(), Some(Path::new("/providers")));
            assert_eq!(how.image_credential_provider_bin_dir.as_deref(), Some(Path::new("/bin")));
            assert!(how.download_window.is_empty() && how.fetch == FetchMode::Agent);
        }
        Ok(())
    }
}
