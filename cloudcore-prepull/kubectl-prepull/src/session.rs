//! Arguments and outcomes that all commands share.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::output::{DocumentFormat, OutputFormat, print, print_object};
use crate::screen::Screen;

/// The usual namespace of cloudcore-prepull.
pub(crate) const SYSTEM: &str = "prepull-system";

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GlobalArgs {
    /// Namespace of what the command names, where that has one [default: that of the context].
    #[arg(short, long, global = true, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Context of the kubeconfig [default: the current one].
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Namespace of cloudcore-prepull.
    #[arg(long, global = true, value_name = "NAME", default_value = SYSTEM)]
    pub(crate) system_namespace: String,
    /// Kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// How long an answer of the API server may take, such as 30s; 0 waits for five minutes.
    #[arg(long, global = true, value_name = "TIME", value_parser = parse_timeout, default_value = "10s")]
    pub(crate) request_timeout: Duration,
    /// What is printed [default: text for people].
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<OutputFormat>,
    /// No colours. There are none either where the output is no terminal or `NO_COLOR` is set.
    #[arg(long, global = true)]
    pub(crate) no_color: bool,
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; such as 30s, or 0"))
}

/// What every command gets.
pub(crate) struct Session {
    pub(crate) global: GlobalArgs,
    /// The terminal, or what else the output goes to.
    pub(crate) screen: Screen,
}

impl Session {
    /// Prints what `-o` asks for: the object, the names of what it is about, or a text, with more columns if it is wide.
    pub(crate) fn print(
        &self,
        object: &impl Serialize,
        names: impl IntoIterator<Item = String>,
        text: impl FnOnce(bool) -> String,
    ) -> anyhow::Result<()> {
        let output = self.global.output;
        match output.and_then(OutputFormat::format) {
            Some(format) => print_object(object, format),
            None if output == Some(OutputFormat::Name) => {
                print(&names.into_iter().flat_map(|name| [name, "\n".to_owned()]).collect::<String>())
            }
            None => print(&text(output == Some(OutputFormat::Wide))),
        }
    }

    /// Whether `-o` asks for an object.
    pub(crate) fn is_for_programs(&self) -> bool {
        self.global.output.and_then(OutputFormat::format).is_some()
    }

    /// Prints an object that has no other text, as YAML, or as JSON with `-o json`.
    pub(crate) fn print_document(&self, object: &impl Serialize) -> anyhow::Result<()> {
        print_object(
            object,
            self.global.output.and_then(OutputFormat::format).unwrap_or(DocumentFormat::Yaml),
        )
    }
}

/// How a command ended that could do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandOutcome {
    Done,
    /// What it was about has failed, such as the job that it followed.
    Failed,
    TimedOut,
    /// Ctrl-C was pressed, or the pipe was closed while a job was followed.
    Interrupted,
}

impl CommandOutcome {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::TimedOut => 3,
            // 128 and the number of SIGINT, as shells have it.
            Self::Interrupted => 130,
        }
    }
}
