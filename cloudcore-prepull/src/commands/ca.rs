//! The commands `cloudcore-prepull ca show`, `rotate` and `retire`.

use std::fmt::Write as _;
use std::io::Write;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Subcommand;
use prepull_api::enroll::hex;
use ring::digest::{SHA256, digest};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::edges::pki::ca_set::certificates_of_pem;
use crate::edges::pki::published::{Published, RotationProgress};
use crate::edges::pki::rotation::{RotationStep, SERVED_BEFORE_RETIREMENT};
use crate::edges::pki::store::CaStore;

/// The commands about the CA in the Secret prepull-ca.
#[derive(Debug, Subcommand)]
pub(crate) enum CaCommand {
    /// Show the CAs, and how far a rotation is.
    Show,
    /// Begin to replace the CA by a new one. No edge has to join again.
    ///
    /// The leader announces the new CA to all edges, lets it sign as soon as they know it (after ten minutes at most),
    /// and has every connected edge renew its certificate. The old CA stays trusted for the edges that are away, until
    /// --edge-cert-ttl and --renew-grace are over or until `ca retire`.
    Rotate,
    /// End the trust in the old CA after a rotation. The leader does so by itself in the end.
    #[command(after_help = "After the key of a CA has leaked:\n  cloudcore-prepull ca rotate\n  \
                            cloudcore-prepull ca show      # until every connected edge has renewed\n  \
                            cloudcore-prepull ca retire --now")]
    Retire {
        /// Also before its time. Edges that are away and know only the old CA have to join again.
        #[arg(long)]
        now: bool,
    },
}

pub(crate) async fn run(
    command: CaCommand,
    client: kube::Client,
    namespace: &str,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let published = || async {
        let published = Published::read(client.clone(), namespace).await;
        let published = published.with_context(|| format!("reading ConfigMap {namespace}/prepull-ca"))?;
        published.with_context(|| {
            format!(
                "there is no ConfigMap {namespace}/prepull-ca: cloudcore-prepull publishes its CA there once it leads"
            )
        })
    };
    let store = CaStore::new(client.clone(), namespace);
    let read = || async {
        let stored = store.read().await?;
        stored.with_context(|| {
            format!(
                "there is no Secret {namespace}/prepull-ca: with --ca-cert and --ca-key, rotate by replacing the files"
            )
        })
    };
    let now = SystemTime::now();
    match command {
        CaCommand::Show => write!(out, "{}", render_ca_table(&published().await?)?)?,
        CaCommand::Rotate => {
            let stored = read().await?;
            let data = stored.rotation.rotate(now)?;
            store.write(stored, data).await?;
            writeln!(
                out,
                "a new CA is announced; `cloudcore-prepull ca show` shows how far the rotation is"
            )?;
        }
        CaCommand::Retire { now: at_once } => {
            let stored = read().await?;
            let data = stored.rotation.retire(now)?;
            if !at_once {
                check_retirable(published().await?.progress, now)?;
            }
            store.write(stored, data).await?;
            writeln!(out, "the old CA is not trusted any more")?;
        }
    }
    Ok(())
}

/// Whether the old CA may be retired without locking anybody out.
fn check_retirable(progress: Option<RotationProgress>, now: SystemTime) -> anyhow::Result<()> {
    let Some(RotationProgress {
        step: RotationStep::Signing,
        retired_after: Some(after),
        edges: Some(edges),
        served_since,
        ..
    }) = progress
    else {
        bail!("cloudcore-prepull has not said yet how far the rotation is: does it run? --now does without");
    };
    let served_since = served_since.context(
        "the leader is of an older release, and doesn't say since when it serves: upgrade it (--now)",
    )?;
    let left = edges.connected - edges.renewed.min(edges.connected);
    ensure!(
        edges.unable == 0,
        "{} of {} connected edges have an agent that is too old to learn of another CA: upgrade them, or they have to \
         join again (--now)",
        edges.unable,
        edges.connected
    );
    ensure!(
        left == 0 && edges.informed >= edges.connected,
        "{left} of {} connected edges have a certificate of the old CA: wait, or they have to join again (--now)",
        edges.connected
    );
    let is_past = |time: &str, and: Duration| {
        humantime::parse_rfc3339(time)
            .is_ok_and(|time| now.duration_since(time).is_ok_and(|past| past >= and))
    };
    ensure!(
        is_past(&served_since, SERVED_BEFORE_RETIREMENT),
        "the leader has served since {served_since}, and edges that were connected to the one before may not be back: wait for an \
         hour, or they may have to join again (--now)"
    );
    ensure!(
        is_past(&after, Duration::ZERO),
        "edges that are away may know the old CA alone. It is retired by itself at {after}; before, they would have to \
         join again (--now)"
    );
    Ok(())
}

fn render_ca_table(published: &Published) -> anyhow::Result<String> {
    let cas = certificates_of_pem(&published.bundle).map_err(anyhow::Error::msg)?;
    let mut text = String::from(
        "SHA-256                                                           EXPIRES               ROLE\n",
    );
    let step = published.progress.as_ref().map_or(RotationStep::Settled, |progress| progress.step);
    for (index, ca) in cas.iter().enumerate() {
        let (_, parsed) = X509Certificate::from_der(ca).context("the ConfigMap holds a CA that is none")?;
        let seconds = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
        let end = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let role = match (index, step) {
            (0, _) => "signs",
            (_, RotationStep::Announced) => "trusted, will sign",
            _ => "trusted",
        };
        let hash = hex(digest(&SHA256, ca).as_ref());
        writeln!(text, "{hash}  {}  {role}", humantime::format_rfc3339_seconds(end))?;
    }
    let Some(RotationProgress { step, since, retired_after, edges, served_since }) = &published.progress
    else {
        return Ok(text);
    };
    let since = since.as_deref().unwrap_or("the beginning");
    match step {
        RotationStep::Settled => {}
        RotationStep::Announced => {
            writeln!(text, "\nThe new CA is trusted since {since}. It signs once the edges know it.")?;
        }
        RotationStep::Signing => {
            let after = retired_after.as_deref().unwrap_or("a time that is not known");
            writeln!(
                text,
                "\nThe new CA signs since {since}. The old one is retired after {after}, or by `ca retire`."
            )?;
            if let Some(served_since) = served_since {
                writeln!(
                    text,
                    "The leader serves since {served_since}. `ca retire` needs an hour of that, for edges to come back."
                )?;
            }
        }
    }
    if let Some(edges) = edges {
        writeln!(
            text,
            "Of {} connected edges {} trust both, {} have a certificate of the CA that signs, and {} have an agent that \
             cannot learn of another CA.",
            edges.connected, edges.informed, edges.renewed, edges.unable
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::edges::pki::CaCensus;
    use crate::edges::pki::published::rfc3339;
    use crate::edges::pki::{Authority, CaSet};

    #[test]
    fn retiring_waits_for_edges_of_the_old_ca() {
        let now = SystemTime::now();
        let of_leader = |served: Option<Duration>, after: SystemTime, edges| {
            let (since, retired_after) = (Some(rfc3339(now)), Some(rfc3339(after)));
            let served_since = served.map(|served| rfc3339(now - served));
            Some(RotationProgress {
                step: RotationStep::Signing,
                since,
                retired_after,
                edges: Some(edges),
                served_since,
            })
        };
        let progress =
            |after, edges| of_leader(Some(SERVED_BEFORE_RETIREMENT + Duration::from_secs(1)), after, edges);
        let all = CaCensus { connected: 3, informed: 3, renewed: 3, unable: 0, old_subject: 0 };
        let (past, future) = (now - Duration::from_secs(5), now + Duration::from_secs(3600));
        check_retirable(progress(past, all), now).unwrap();
        for (progress, reason) in [
            (None, "does it run?"),
            (
                progress(past, CaCensus { unable: 1, ..all }),
                "1 of 3 connected edges have an agent that is too old",
            ),
            (
                progress(past, CaCensus { renewed: 1, ..all }),
                "2 of 3 connected edges have a certificate of the old CA",
            ),
            (progress(future, all), "edges that are away may know the old CA alone"),
            (of_leader(Some(Duration::from_secs(60)), past, all), "may not be back"),
            (of_leader(None, past, all), "an older release"),
        ] {
            let error = check_retirable(progress, now).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn shows_role_and_progress_of_each_ca() {
        let now = SystemTime::now();
        let (signer, other) = (Authority::generate(now).unwrap().0, Authority::generate(now).unwrap().0);
        let hashes = [&signer, &other].map(|ca| hex(&ca.fingerprint()));
        let bundle = [CaSet::from(signer).bundle(), CaSet::from(other).bundle()].concat();
        let edges = Some(CaCensus { connected: 3, informed: 2, renewed: 1, unable: 1, old_subject: 1 });
        let progress = RotationProgress {
            step: RotationStep::Announced,
            since: Some("T".to_owned()),
            retired_after: None,
            edges,
            served_since: None,
        };
        let shown =
            render_ca_table(&Published { bundle: bundle.clone(), progress: Some(progress.clone()) }).unwrap();
        let lines: Vec<_> = shown.lines().collect();
        assert!(lines[1].starts_with(&hashes[0]) && lines[1].ends_with("  signs"), "{shown}");
        assert!(lines[2].starts_with(&hashes[1]) && lines[2].ends_with("  trusted, will sign"), "{shown}");
        assert!(shown.contains("trusted since T"), "{shown}");
        assert!(shown.contains("Of 3 connected edges 2 trust both, 1 have a certificate"), "{shown}");

        let served_since = Some("S".to_owned());
        let signing = RotationProgress { step: RotationStep::Signing, served_since, ..progress };
        let shown = render_ca_table(&Published { bundle, progress: Some(signing) }).unwrap();
        assert!(shown.contains("The leader serves since S."), "{shown}");
    }
}
