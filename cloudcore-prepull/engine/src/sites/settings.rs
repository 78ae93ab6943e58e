//! Settings of the tracker of sites.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Default budget of all sites in bytes: ten thousand boxes that share forty layers need half of it.
const MEMORY_LIMIT: usize = 256 << 20;

/// How nodes are grouped, and the defaults of jobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SiteSettings {
    /// The label of a Node whose value is its site.
    pub label: String,
    /// Whether NodeImages share, and jobs that don't set it.
    pub share_by_default: bool,
    /// Rough budget of all sites in bytes. Beyond it, new layers are not shared.
    #[serde(default = "default_memory")]
    pub memory: usize,
}

fn default_memory() -> usize {
    MEMORY_LIMIT
}

impl SiteSettings {
    /// The site of a Node with these labels. `None`: it has no site.
    pub fn site_of<'a>(&self, labels: &'a BTreeMap<String, String>) -> Option<&'a str> {
        labels.get(&self.label).map(String::as_str).filter(|site| !site.is_empty())
    }
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { label: SITE_LABEL.to_owned(), share_by_default: false, memory: MEMORY_LIMIT }
    }
}

/// The default label of a Node whose value is its site.
pub const SITE_LABEL: &str = prepull_api::edges::SITE_LABEL;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn settings_without_a_memory_have_the_default_one() {
        let settings: SiteSettings = serde_json::from_str(r#"{"label":"x","shareByDefault":true}"#).unwrap();
        let expected =
            SiteSettings { label: "x".to_owned(), share_by_default: true, ..SiteSettings::default() };
        assert_eq!(settings, expected);
    }
}
