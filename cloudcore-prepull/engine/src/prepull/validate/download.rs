//! The download settings of a job: cap, windows, pin and signatures. All of them may change while the job runs.

use std::num::NonZeroU64;
use std::time::Duration;

use prepull_api::crd::download::{DownloadSpec, VerifyKey, VerifySpec, WindowSpec};
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::download::{
    Deltas, MAX_VERIFICATION_KEYS, MAX_WINDOWS, VerificationMode, Weekday, Window, Zone,
};
use prepull_api::overriders::SecretRef;
use prepull_window::{check_duration, is_zone, parse_duration, write_duration};

use super::{SpecRefusal, non_empty, parse_each};

/// The lowest cap. Below it a small image takes hours, and what was meant has another unit.
const LEAST_RATE: u64 = 1024;

/// How the images of a job are downloaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DownloadPolicy {
    /// Bytes a second on each node.
    pub max_rate: Option<NonZeroU64>,
    /// When nodes may download; always if there are none.
    pub windows: Vec<Window>,
    /// Whether no node may download, in no window.
    pub paused: bool,
    /// By how much at most a node begins later than its window opens.
    pub jitter: Duration,
    /// Whether the images are kept from the kubelet's garbage collection.
    pub pin: bool,
    /// The signatures that the images must have.
    pub verify: Option<VerifyPolicy>,
    /// Whether the nodes of a site share layers. `None`: the default of cloudcore-prepull.
    pub share: Option<bool>,
    /// Bytes a second over the uplink of each site, over all its nodes.
    pub max_site_rate: Option<NonZeroU64>,
    /// Whether nodes may rebuild images from earlier ones and deltas.
    pub deltas: Deltas,
}

/// The signatures that the images of a job must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyPolicy {
    /// What happens to an image without one.
    pub mode: VerificationMode,
    /// Where the public keys are; never empty.
    pub keys: Vec<SecretRef>,
}

pub(super) fn download_policy(spec: &ImagePrePullJobSpec) -> Result<DownloadPolicy, SpecRefusal> {
    let DownloadSpec { max_rate, share_within_site: share, max_site_rate, deltas } =
        spec.download.clone().unwrap_or_default();
    let windows = parse_windows(&spec.windows)?;
    let jitter = match non_empty(spec.window_jitter.as_ref()) {
        Some(text) => parse_jitter(text, &windows)?,
        None => Duration::ZERO,
    };
    let max_site_rate = parse_rate(max_site_rate.as_ref(), "spec.download.maxSiteRate")?;
    if max_site_rate.is_some() && share == Some(false) {
        let message = "needs shareWithinSite: nodes that download each for itself have only maxRate";
        return Err(SpecRefusal::new("spec.download.maxSiteRate", message));
    }
    Ok(DownloadPolicy {
        max_rate: parse_rate(max_rate.as_ref(), "spec.download.maxRate")?,
        windows,
        paused: spec.pause,
        jitter,
        pin: spec.pin,
        verify: spec.verify.as_ref().map(parse_verify).transpose()?,
        share,
        max_site_rate,
        deltas: non_empty(deltas.as_ref()).map(deltas_rule).transpose()?.unwrap_or_default(),
    })
}

fn deltas_rule(text: &str) -> Result<Deltas, SpecRefusal> {
    Deltas::ALL.into_iter().find(|rule| rule.as_str() == text).ok_or_else(|| {
        SpecRefusal::new("spec.download.deltas", format!("{text:?} is no rule: write Auto, Never or Require"))
    })
}

/// The rate in a field, if it's set.
pub(crate) fn parse_rate(text: Option<&String>, field: &str) -> Result<Option<NonZeroU64>, SpecRefusal> {
    non_empty(text).map(|text| parse_byte_rate(text, field)).transpose()
}

/// A quantity of Kubernetes in whole bytes.
fn parse_byte_rate(text: &str, field: &str) -> Result<NonZeroU64, SpecRefusal> {
    let refuse = || {
        let least = LEAST_RATE >> 10;
        SpecRefusal::new(
            field,
            format!("{text:?} is not a rate: write bytes a second as 500k, 2M or 2Mi, at least {least}Ki"),
        )
    };
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return Err(refuse()),
    };
    let rate = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    rate.filter(|rate| *rate >= LEAST_RATE).and_then(NonZeroU64::new).ok_or_else(refuse)
}

/// The windows in `spec.windows`.
pub(crate) fn parse_windows(specs: &[WindowSpec]) -> Result<Vec<Window>, SpecRefusal> {
    if specs.len() > MAX_WINDOWS {
        let message = format!("{} windows; at most {MAX_WINDOWS} are allowed", specs.len());
        return Err(SpecRefusal::new("spec.windows", message));
    }
    parse_each(specs, window_from_spec)
}

fn window_from_spec(index: usize, spec: &WindowSpec) -> Result<Window, SpecRefusal> {
    let WindowSpec { days, start, duration, time_zone } = spec;
    let field = |part: &str| format!("spec.windows[{index}].{part}");
    let days = parse_each(days, |i, text| {
        Weekday::ALL.into_iter().find(|day| day.as_str() == text).ok_or_else(|| {
            SpecRefusal::new(
                format!("{}[{i}]", field("days")),
                format!("{text:?} is not a day: write Mon, Tue, Wed, Thu, Fri, Sat or Sun"),
            )
        })
    })?;
    let start = start
        .parse()
        .map_err(|error| SpecRefusal::new(field("start"), format!("{start:?} is no time of day: {error}")))?;
    let duration = parse_duration(duration)
        .and_then(check_duration)
        .map_err(|message| SpecRefusal::new(field("duration"), message))?;
    let time_zone = Zone::from(time_zone.clone());
    if let Zone::Named(name) = &time_zone
        && !is_zone(name)
    {
        let message = format!(
            "{name:?} is not a time zone: write a name of the IANA database, such as Europe/Berlin or UTC, or Node"
        );
        return Err(SpecRefusal::new(field("timeZone"), message));
    }
    Ok(Window { days, start, duration, time_zone })
}

/// A jitter that is as long as a window would leave nothing of it to some nodes. Without windows it has no effect, so that
/// these may be removed alone.
fn parse_jitter(text: &str, windows: &[Window]) -> Result<Duration, SpecRefusal> {
    let refuse = |message| SpecRefusal::new("spec.windowJitter", message);
    let jitter = parse_duration(text).map_err(refuse)?;
    let shortest = windows.iter().map(|window| window.duration).min();
    match shortest {
        Some(shortest) if jitter >= shortest => Err(refuse(format!(
            "{} is not shorter than the shortest window, {}: some nodes would never begin",
            write_duration(jitter),
            write_duration(shortest)
        ))),
        _ => Ok(jitter),
    }
}

fn parse_verify(spec: &VerifySpec) -> Result<VerifyPolicy, SpecRefusal> {
    let VerifySpec { keys, mode } = spec;
    let mode = match non_empty(mode.as_ref()) {
        None | Some("Enforce") => VerificationMode::Enforce,
        Some("Warn") => VerificationMode::Warn,
        Some(other) => {
            let message = format!("unknown mode {other:?}: use Enforce or Warn");
            return Err(SpecRefusal::new("spec.verify.mode", message));
        }
    };
    if keys.is_empty() || keys.len() > MAX_VERIFICATION_KEYS {
        let message =
            format!("{} secrets with keys: name 1 to {MAX_VERIFICATION_KEYS}, or remove verify", keys.len());
        return Err(SpecRefusal::new("spec.verify.keys", message));
    }
    let keys = parse_each(keys, |i, VerifyKey { secret_ref }| {
        SecretRef::parse(secret_ref)
            .map_err(|error| SpecRefusal::new(format!("spec.verify.keys[{i}].secretRef"), error))
    })?;
    Ok(VerifyPolicy { mode, keys })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policy(spec: Value) -> Result<DownloadPolicy, String> {
        let spec: ImagePrePullJobSpec = serde_json::from_value(spec).unwrap();
        download_policy(&spec).map_err(|refusal| refusal.to_string())
    }

    fn window_with(field: &str, value: Value) -> Value {
        let mut window = json!({ "start": "01:00", "duration": "4h", "timeZone": "Europe/Berlin" });
        window[field] = value;
        json!({ "windows": [window] })
    }

    #[test]
    fn a_job_says_how_it_is_downloaded() {
        assert_eq!(policy(json!({})).unwrap(), DownloadPolicy::default());
        let policy = policy(json!({
            "download": { "maxRate": "2Mi", "shareWithinSite": true, "maxSiteRate": "4Mi", "deltas": "Require" },
            "windows": [
                { "days": ["Mon", "Fri"], "start": "01:00", "duration": "4h", "timeZone": "Europe/Berlin" },
                { "start": "22:30", "duration": "1h30m", "timeZone": "Node" },
            ],
            "windowJitter": "20m",
            "pin": true,
            "verify": { "keys": [{ "secretRef": "prepull-system/cosign" }] },
        }))
        .unwrap();
        assert_eq!(policy.max_rate.unwrap().get(), 2 << 20);
        assert_eq!((policy.share, policy.max_site_rate), (Some(true), NonZeroU64::new(4 << 20)));
        assert_eq!(policy.deltas, Deltas::Require);
        assert_eq!(policy.windows[0].days, [Weekday::Mon, Weekday::Fri]);
        assert_eq!(policy.windows[1].time_zone, Zone::Node);
        assert_eq!(policy.windows[1].duration, Duration::from_secs(5400));
        assert_eq!((policy.jitter, policy.pin), (Duration::from_secs(1200), true));
        let verify = policy.verify.unwrap();
        assert_eq!(verify.mode, VerificationMode::Enforce);
        assert_eq!(verify.keys[0].to_string(), "prepull-system/cosign");
    }

    #[test]
    fn a_rate_is_a_quantity_of_bytes() {
        let rate = |text: &str| policy(json!({ "download": { "maxRate": text } })).map(|p| p.max_rate);
        for (text, expected) in [("1024", 1024), ("500k", 500_000), ("2M", 2_000_000), ("1Gi", 1 << 30)] {
            assert_eq!(rate(text).unwrap().unwrap().get(), expected, "{text}");
        }
        let large = ["1G", "1T", "1Ti"].map(|text| rate(text).unwrap().unwrap().get());
        assert_eq!(large, [1_000_000_000, 1_000_000_000_000, 1 << 40]);
        assert_eq!(rate("").unwrap(), None);
        for bad in ["0", "1023", "2m", "2MB", "-1", "1.5Mi", "Mi", "99999999999999Ti", "2 Mi"] {
            let refusal = rate(bad).unwrap_err();
            assert!(refusal.starts_with("spec.download.maxRate: ") && refusal.contains("2Mi"), "{refusal}");
        }
    }

    #[test]
    fn a_mistake_is_refused_with_a_remedy() {
        let keys = |count| vec![json!({ "secretRef": "a/b" }); count];
        let jittered = json!({
            "windowJitter": "1h",
            "windows": [{ "start": "01:00", "duration": "1h", "timeZone": "UTC" }],
        });
        let window = window_with("days", json!([]))["windows"][0].clone();
        let windows = |count| json!({ "windows": vec![window.clone(); count] });
        for (spec, field, remedy) in [
            (window_with("days", json!(["Mon", "mon"])), "spec.windows[0].days[1]: ", "write Mon"),
            (window_with("start", json!("25:00")), "spec.windows[0].start: ", "00:00 to 23:59"),
            (window_with("duration", json!("4")), "spec.windows[0].duration: ", "such as 4h"),
            (window_with("duration", json!("0s")), "spec.windows[0].duration: ", "write 1s to 168h"),
            (window_with("timeZone", json!("Europe/Nowhere")), "spec.windows[0].timeZone: ", "or Node"),
            (window_with("timeZone", json!("")), "spec.windows[0].timeZone: ", "Europe/Berlin"),
            (windows(17), "spec.windows: ", "at most 16"),
            (jittered, "spec.windowJitter: ", "not shorter than the shortest window, 1h"),
            (json!({ "windowJitter": "soon" }), "spec.windowJitter: ", "such as 4h"),
            (json!({ "download": { "maxSiteRate": "1" } }), "spec.download.maxSiteRate: ", "at least 1Ki"),
            (
                json!({ "download": { "maxSiteRate": "1Mi", "shareWithinSite": false } }),
                "spec.download.maxSiteRate: ",
                "needs shareWithinSite",
            ),
            (json!({ "download": { "deltas": "auto" } }), "spec.download.deltas: ", "write Auto, Never or"),
            (json!({ "verify": { "keys": [] } }), "spec.verify.keys: ", "name 1 to 8"),
            (json!({ "verify": { "keys": keys(9) } }), "spec.verify.keys: ", "name 1 to 8"),
            (
                json!({ "verify": { "keys": [{ "secretRef": "cosign" }] } }),
                "spec.verify.keys[0].secretRef: ",
                "{namespace}/{name}",
            ),
            (json!({ "verify": { "keys": keys(1), "mode": "Off" } }), "spec.verify.mode: ", "use Enforce"),
        ] {
            let refusal = policy(spec).unwrap_err();
            assert!(refusal.starts_with(field) && refusal.contains(remedy), "{refusal}");
        }
        assert_eq!(policy(windows(16)).unwrap().windows.len(), 16);
        assert_eq!(policy(json!({ "verify": { "keys": keys(8) } })).unwrap().verify.unwrap().keys.len(), 8);
        // What has no effect does not stand in the way of removing the windows.
        assert!(policy(json!({ "windowJitter": "20m" })).is_ok());
    }
}
