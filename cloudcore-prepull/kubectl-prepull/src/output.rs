//! What is printed on standard output.

use std::io::Write;

use anyhow::Context;
use kube::Resource;
use prepull_api::crd::job::ImagePrePullJob;
use serde::Serialize;

use crate::cli::Output;

/// Prints a text.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("write the output")
}

/// Prints an object as JSON or YAML.
pub(crate) fn print_object<T: Serialize>(object: &T, output: Format) -> anyhow::Result<()> {
    let text = match output {
        Format::Json => serde_json::to_string_pretty(object)?,
        Format::Yaml => serde_saphyr::to_string(object)?,
    };
    print(&format!("{}\n", text.trim_end()))
}

/// A format for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

impl Output {
    /// The format, if it is one for programs.
    pub(crate) fn format(self) -> Option<Format> {
        match self {
            Self::Json => Some(Format::Json),
            Self::Yaml => Some(Format::Yaml),
            Self::Name | Self::Wide => None,
        }
    }
}

/// The name of a job as kubectl writes and takes it.
pub(crate) fn job_name(name: &str) -> String {
    format!("{}.{}/{name}", "imageprepulljob", ImagePrePullJob::group(&()))
}

/// Prints a job that was changed as kubectl does, or as `-o` says: `imageprepulljob.operations.kubeedge.io/web suspended`.
pub(crate) fn print_changed(job: &ImagePrePullJob, what: &str, output: Option<Output>) -> anyhow::Result<()> {
    let name = job_name(job.metadata.name.as_deref().unwrap_or_default());
    match output {
        Some(Output::Name) => print(&format!("{name}\n")),
        Some(Output::Json) => print_object(job, Format::Json),
        Some(Output::Yaml) => print_object(job, Format::Yaml),
        None | Some(Output::Wide) => print(&format!("{name} {what}\n")),
    }
}
