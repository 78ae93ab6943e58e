//! The plan's section on downloads: rate cap, windows, pin and signatures.

use prepull_api::download::{Deltas, VerificationMode};
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::resolve_verification;
use prepull_engine::prepull::validate::{DownloadPolicy, VerifyPolicy};
use prepull_window::{write_duration, write_window};
use serde::Serialize;

use super::KnownSecrets;

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DownloadReport {
    /// Bytes a second on each node.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_rate: Option<u64>,
    /// When nodes may download, as `Mon-Fri 01:00+4h Europe/Berlin`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    windows: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    window_jitter: Option<String>,
    /// Whether nothing is downloaded until the job is resumed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    paused: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pin: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    share_within_site: Option<bool>,
    /// Bytes a second over the uplink of each site.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_site_rate: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deltas: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) verify: Option<VerifyReport>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct VerifyReport {
    mode: &'static str,
    secrets: Vec<String>,
    /// Why their keys cannot be used; absent as well if the secrets are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// `None` if the job doesn't set it.
pub(super) fn report(policy: &DownloadPolicy, known: Option<&KnownSecrets<'_>>) -> Option<DownloadReport> {
    if *policy == DownloadPolicy::default() {
        return None;
    }
    let DownloadPolicy { max_rate, windows, paused, jitter, pin, verify, share, max_site_rate, deltas } =
        policy;
    Some(DownloadReport {
        max_rate: max_rate.map(std::num::NonZeroU64::get),
        windows: windows.iter().map(write_window).collect(),
        window_jitter: (!jitter.is_zero() && !windows.is_empty()).then(|| write_duration(*jitter)),
        paused: *paused,
        pin: *pin,
        share_within_site: *share,
        max_site_rate: max_site_rate.map(std::num::NonZeroU64::get),
        deltas: (*deltas != Deltas::Auto).then(|| deltas.as_str()),
        verify: verify.as_ref().map(|verify| verify_report(verify, known)),
    })
}

fn verify_report(policy: &VerifyPolicy, known: Option<&KnownSecrets<'_>>) -> VerifyReport {
    let known = known.filter(|known| known.has_read(&policy.keys));
    let error = known.and_then(|known| {
        let details = resolve_verification(policy, known.user, |secret| known.lookup(secret)).details;
        (!details.is_empty()).then(|| details.join("; "))
    });
    VerifyReport {
        mode: match policy.mode {
            VerificationMode::Enforce => "Enforce",
            VerificationMode::Warn => "Warn",
        },
        secrets: policy.keys.iter().map(SecretRef::to_string).collect(),
        error,
    }
}

/// One line for people per setting of the job.
pub(super) fn lines(report: &DownloadReport) -> Vec<String> {
    let DownloadReport {
        max_rate,
        windows,
        window_jitter,
        paused,
        pin,
        verify,
        share_within_site,
        max_site_rate,
        deltas,
    } = report;
    let mut lines = Vec::new();
    lines.extend(max_rate.map(|rate| format!("download: at most {rate} bytes a second on each node")));
    if !windows.is_empty() {
        let jitter = window_jitter.as_ref().map(|jitter| format!(", each node up to {jitter} later"));
        lines.push(format!("windows: {}{}", windows.join("; "), jitter.unwrap_or_default()));
    }
    if *paused {
        lines.push("pause: nothing is downloaded until the job is resumed".to_owned());
    }
    if *pin {
        lines.push("pin: the images are kept from the kubelet's garbage collection".to_owned());
    }
    lines.extend(
        max_site_rate
            .map(|rate| format!("maxSiteRate: at most {rate} bytes a second over the uplink of each site")),
    );
    lines.extend(share_within_site.map(|share| {
        if share {
            "shareWithinSite: each layer crosses the uplink of a site once".to_owned()
        } else {
            "shareWithinSite: each node downloads for itself".to_owned()
        }
    }));
    lines.extend(deltas.map(|rule| format!("deltas: {rule}")));
    if let Some(VerifyReport { mode, secrets, error }) = verify {
        let error = error.as_ref().map(|error| format!(": {error}"));
        lines.push(format!("verify: {mode}, keys of {}{}", secrets.join(","), error.unwrap_or_default()));
    }
    lines
}
