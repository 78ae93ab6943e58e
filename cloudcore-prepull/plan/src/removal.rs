//! The plan's section on removals: what a job removes from each of its nodes.

use prepull_api::task::Removal;
use prepull_window::write_duration;
use serde::Serialize;

/// It's the same for all nodes: a job that removes has no overriders.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RemovalReport {
    /// Normalized references.
    images: Vec<String>,
    /// Normalized names.
    repositories: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    older_than: Option<String>,
    keep_last: u32,
    pub(super) dry_run: bool,
}

pub(super) fn report(removal: &Removal) -> RemovalReport {
    let Removal { images, repositories, older_than, keep_last, dry_run } = removal;
    RemovalReport {
        images: images.clone(),
        repositories: repositories.clone(),
        older_than: older_than.map(write_duration),
        keep_last: *keep_last,
        dry_run: *dry_run,
    }
}

impl RemovalReport {
    /// The table, with the names of the nodes in its first row.
    pub(super) fn rows(&self, names: String) -> Vec<Vec<String>> {
        let images = self.images.iter().map(|image| (image, "<none>".to_owned()));
        let repositories = self.repositories.iter().map(|repository| (repository, self.rule()));
        let names = std::iter::once(names).chain(std::iter::repeat(String::new()));
        let header = ["NODES", "REMOVE", "RULE"].map(str::to_owned).to_vec();
        let rows = images.chain(repositories).zip(names);
        let rows = rows.map(|((what, rule), names)| vec![names, what.clone(), rule]);
        std::iter::once(header).chain(rows).collect()
    }

    /// Which images of a repository go.
    fn rule(&self) -> String {
        let age =
            self.older_than.as_ref().map_or_else(|| "all".to_owned(), |age| format!("older than {age}"));
        match self.keep_last {
            0 => age,
            kept => format!("{age}, except the newest {kept}"),
        }
    }
}
