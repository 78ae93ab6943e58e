//! Printing on standard output.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::Context;
use clap::ValueEnum;
use kube::Resource;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::text::is_display_control;
use serde::Serialize;
use serde_json::Value;

use crate::screen::sanitize_output;

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// JSON for programs
    Json,
    /// YAML for programs
    Yaml,
    /// Only names, as kubectl takes them
    Name,
    /// Text for people, with more columns
    Wide,
}

pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(sanitize_output(text).as_bytes()).and_then(|()| out.flush()).context("write the output")
}

pub(crate) fn print_object<T: Serialize>(object: &T, output: DocumentFormat) -> anyhow::Result<()> {
    let text = match output {
        DocumentFormat::Json => escape_json(&serde_json::to_string_pretty(object)?),
        DocumentFormat::Yaml => to_yaml(object)?,
    };
    print(&format!("{}\n", text.trim_end()))
}

/// Prints the separator of two documents. JSON needs none.
pub(crate) fn print_separator(output: DocumentFormat) -> anyhow::Result<()> {
    match output {
        DocumentFormat::Json => Ok(()),
        DocumentFormat::Yaml => print("---\n"),
    }
}

/// Escapes what a terminal would act on. It can only be within strings, so the values stay the same.
fn escape_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if c != '\n' && is_display_control(c) {
            // All of them are in the Basic Multilingual Plane. Writing to a String doesn't fail.
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// The object as YAML, in which strings that a terminal would act on are double-quoted and escaped.
fn to_yaml<T: Serialize>(object: &T) -> anyhow::Result<String> {
    let is_hostile = |c: char| c != '\n' && is_display_control(c);
    let yaml = serde_saphyr::to_string(object)?;
    if !yaml.contains(is_hostile) {
        return Ok(yaml);
    }
    // The serializer has no option for which strings to quote. So we replace each by a placeholder, and the placeholder in
    // the text by the JSON string, which is YAML too.
    let mut prefix = "string-with-control-characters".to_owned();
    while yaml.contains(&prefix) {
        prefix.push('-');
    }
    let placeholder = |index: usize| format!("{prefix}-{index}-");
    let mut value = serde_json::to_value(object)?;
    let mut strings = Vec::new();
    replace_strings(&mut value, &is_hostile, &placeholder, &mut strings);
    let text = serde_saphyr::to_string(&value)?;
    let (mut yaml, mut rest) = (String::with_capacity(text.len()), &*text);
    // They come in this order. What was put in isn't searched: it may look like another placeholder.
    for (index, string) in strings.iter().enumerate() {
        let (before, after) =
            rest.split_once(&placeholder(index)).context("a string was lost in the YAML")?;
        yaml.extend([before, &escape_json(&serde_json::to_string(string)?)]);
        rest = after;
    }
    yaml.push_str(rest);
    Ok(yaml)
}

/// Replaces strings by placeholders.
fn replace_strings(
    value: &mut Value,
    is_hostile: &impl Fn(char) -> bool,
    placeholder: &impl Fn(usize) -> String,
    strings: &mut Vec<String>,
) {
    let replace = |value: &mut Value| replace_strings(value, is_hostile, placeholder, strings);
    match value {
        Value::Array(items) => items.iter_mut().for_each(replace),
        Value::Object(fields) => fields.values_mut().for_each(replace),
        Value::String(text) if text.contains(is_hostile) => {
            strings.push(std::mem::replace(text, placeholder(strings.len())));
        }
        _ => {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DocumentFormat {
    Json,
    Yaml,
}

impl OutputFormat {
    pub(crate) fn format(self) -> Option<DocumentFormat> {
        match self {
            Self::Json => Some(DocumentFormat::Json),
            Self::Yaml => Some(DocumentFormat::Yaml),
            Self::Name | Self::Wide => None,
        }
    }
}

/// The name of a job as kubectl writes and takes it.
pub(crate) fn job_name(name: &str) -> String {
    format!("{}.{}/{name}", "imageprepulljob", ImagePrePullJob::group(&()))
}

/// Prints a changed job as kubectl does, or in the format of `-o`: `imageprepulljob.operations.kubeedge.io/web suspended`.
pub(crate) fn print_changed(
    job: &ImagePrePullJob,
    what: &str,
    output: Option<OutputFormat>,
) -> anyhow::Result<()> {
    let name = job_name(job.metadata.name.as_deref().unwrap_or_default());
    match output {
        Some(OutputFormat::Name) => print(&format!("{name}\n")),
        Some(OutputFormat::Json) => print_object(job, DocumentFormat::Json),
        Some(OutputFormat::Yaml) => print_object(job, DocumentFormat::Yaml),
        None | Some(OutputFormat::Wide) => print(&format!("{name} {what}\n")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    /// Clipboard, wiped line, bidirectional override, C1, and a line separator.
    const HOSTILE: &str = "a\u{1b}]52;c;eA==\u{7}\u{1b}[2K\r\u{202e}\u{9b}8m\u{2028}\nz: 'é'";

    #[test]
    fn printed_objects_cannot_move_the_cursor() {
        let object = json!({"items": [{"reason": HOSTILE, "name": "edge-1"}], "other": "string-with-control-characters-0-",
            "lines": "one\ntwo\n"});
        let json = escape_json(&serde_json::to_string_pretty(&object).unwrap());
        let yaml = to_yaml(&object).unwrap();
        for (text, read) in [
            (&json, serde_json::from_str::<Value>(&json).unwrap()),
            (&yaml, serde_saphyr::from_str::<Value>(&yaml).unwrap()),
        ] {
            assert!(!text.contains(|c: char| c != '\n' && is_display_control(c)), "{text}");
            assert_eq!(read, object, "{text}");
        }
    }

    #[test]
    fn a_hostile_string_takes_no_others_place() {
        let object = json!({
            "a": {"string-with-control-characters-0-": "x"},
            "b": "string-with-control-characters-1-\u{202e}", "c": "\u{202e} # x",
        });
        let yaml = to_yaml(&object).unwrap();
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), object, "{yaml}");
    }

    #[test]
    fn harmless_yaml_stays_as_it_is() {
        let object = json!({"b": "größer", "a": ["x: y", "two\nlines"]});
        assert_eq!(to_yaml(&object).unwrap(), serde_saphyr::to_string(&object).unwrap());
    }
}
