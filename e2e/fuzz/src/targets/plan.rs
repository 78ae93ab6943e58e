//! `cloudcore-prepull plan`, with one file as the job, as the nodes and as the secrets.

use std::cell::RefCell;
use std::io::Write as _;

use futures::FutureExt;
use prepull_plan::{ConsentArgs, PlanArgs, PlanFormat, SiteArgs, SizeArgs, run as print_plan};
use serde_json::Value;
use tempfile::NamedTempFile;

thread_local! {
    static FILE: RefCell<Option<NamedTempFile>> = const { RefCell::new(None) };
}

pub(crate) fn run(input: &[u8]) {
    FILE.with_borrow_mut(|file| {
        let path = replace_contents(file, input);
        let print = |output| {
            let (job, nodes, secrets) = (path.clone(), Some(path.clone()), Some(path.clone()));
            // Either way, and the same for each output of one input.
            let consent = ConsentArgs { require_secret_consent: input.len().is_multiple_of(2) };
            let (sizes, sites) = (SizeArgs::default(), SiteArgs::default());
            let args = PlanArgs { job, nodes, secrets, consent, sizes, sites, output, kubeconfig: None };
            let mut printed = Vec::new();
            // Without a cluster the command has nothing to wait for.
            let no_cluster = async |_: Option<&std::path::Path>| Err(anyhow::anyhow!("there is no cluster"));
            let outcome =
                print_plan(&args, no_cluster, &mut printed).now_or_never().expect("the command waits");
            (String::from_utf8(printed).expect("text"), outcome.map_err(|error| format!("{error:#}")))
        };
        let (json, outcome) = print(PlanFormat::Json);
        if let Err(error) = &outcome {
            assert!(error.len() < 16 * 1024, "an error of {} bytes", error.len());
        }
        // The output is complete, even if it ends in an error about an image without credentials.
        if json.is_empty() {
            assert!(outcome.is_err(), "neither a plan nor an error");
            return;
        }
        let json: Value = serde_json::from_str(&json).expect("JSON");
        let (yaml, _) = print(PlanFormat::Yaml);
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).ok(), Some(json), "{yaml}");
        let (table, _) = print(PlanFormat::Table);
        assert!(!table.is_empty());
    });
}

/// Replaces the file's contents: in memory where there is such a file system, for speed.
fn replace_contents(file: &mut Option<NamedTempFile>, input: &[u8]) -> std::path::PathBuf {
    let new = || NamedTempFile::new_in("/dev/shm").or_else(|_| NamedTempFile::new());
    let file = file.get_or_insert_with(|| new().expect("a temporary file"));
    std::fs::write(file.path(), input).and_then(|()| file.flush()).expect("a file that can be written");
    file.path().to_owned()
}
