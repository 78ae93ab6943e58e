//! Flags that several commands have.

use clap::{ArgAction, Args};
use prepull_engine::sites::{SITE_LABEL, SiteSettings};

/// The flags of sites.
#[derive(Clone, Debug, Args)]
pub struct SiteArgs {
    /// Label of the Nodes whose value is their site: the nodes of a site may share what they download
    #[arg(long, value_name = "LABEL", default_value = SITE_LABEL, env = "PREPULL_SITE_LABEL")]
    site_label: String,
    /// Let the nodes of a site download each layer once and share it, also for jobs that do not say so, and for Kruise's
    #[arg(long, env = "PREPULL_SHARE_WITHIN_SITE")]
    share_within_site: bool,
}

impl Default for SiteArgs {
    fn default() -> Self {
        Self { site_label: SITE_LABEL.to_owned(), share_within_site: false }
    }
}

impl SiteArgs {
    pub(crate) fn settings(&self) -> SiteSettings {
        SiteSettings {
            label: self.site_label.clone(),
            share_by_default: self.share_within_site,
            ..SiteSettings::default()
        }
    }
}

/// Memory below the smallest holds no site of a thousand nodes; the largest is more than a node of the cloud has to spare.
const MEMORY_RANGE: std::ops::RangeInclusive<usize> = 16 << 20..=16 << 30;

/// Parses an amount of memory, as `512MiB`.
pub(crate) fn parse_memory(text: &str) -> Result<usize, String> {
    let units = [("GiB", 30), ("Gi", 30), ("MiB", 20), ("Mi", 20)];
    let amount = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, 1_usize << shift)));
    let bytes = amount.and_then(|(number, unit)| number.parse::<usize>().ok()?.checked_mul(unit));
    let usable = bytes.filter(|bytes| MEMORY_RANGE.contains(bytes));
    usable.ok_or_else(|| "must be from 16MiB to 16GiB; the default is 256MiB".to_owned())
}

/// The flag that restricts a secret to the jobs that its owner allows. On by default, because that is the safe setting.
#[derive(Clone, Copy, Debug, Args)]
pub struct ConsentArgs {
    /// Use a registry secret only for the jobs that its annotation prepull.kubeedge.io/allow names. With `false`, as in
    /// KubeEdge, the right to create jobs gives access to every registry secret that cloudcore-prepull may read.
    #[arg(
        long, value_name = "BOOL", env = "PREPULL_REQUIRE_SECRET_CONSENT", action = ArgAction::Set,
        default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true"
    )]
    pub require_secret_consent: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_a_unit_and_bounds() {
        for (text, bytes) in
            [("16MiB", 16 << 20), ("512Mi", 512 << 20), ("2GiB", 2 << 30), ("16Gi", 16 << 30)]
        {
            assert_eq!(parse_memory(text), Ok(bytes), "{text}");
        }
        for bad in ["", "256", "15MiB", "17GiB", "-1GiB", "1.5GiB", "99999999999999999999GiB", "GiB"] {
            assert!(parse_memory(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_memory("256MiB"), Ok(SiteSettings::default().memory));
    }
}
