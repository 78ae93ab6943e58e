//! Flags that `plan` shares with `cloudcore-prepull run`.

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
    /// As the controller has them.
    pub fn settings(&self) -> SiteSettings {
        SiteSettings {
            label: self.site_label.clone(),
            share_by_default: self.share_within_site,
            ..SiteSettings::default()
        }
    }
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
