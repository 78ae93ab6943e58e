//! Sets settings in the text of `config.yaml`, and leaves comments and an administrator's lines alone.

use serde_json::{Map, Value};

use crate::config::AgentSettings;

/// Sets these settings, by their names in the file. A setting that already has the value keeps its line.
pub(super) fn apply_settings(text: &str, wanted: &Map<String, Value>) -> Result<String, String> {
    let before = values_of(text)?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (key, value) in wanted.iter().filter(|(key, value)| before.get(*key) != Some(*value)) {
        // JSON is YAML.
        set_line(&mut lines, key, format!("{key}: {value}"));
    }
    let after = lines.join("\n") + "\n";
    if after.trim() == text.trim() {
        return Ok(text.to_owned());
    }
    let mut expected = before;
    expected.extend(wanted.clone());
    // The file has YAML that this line editor doesn't handle.
    if values_of(&after).as_ref() != Ok(&expected) {
        let keys: Vec<_> = wanted.iter().map(|(key, value)| format!("{key}: {value}")).collect();
        return Err(format!("cannot be changed line by line: set {} there by hand", keys.join(", ")));
    }
    Ok(after)
}

/// The settings that have a value.
pub(super) fn given_values(settings: &AgentSettings) -> Map<String, Value> {
    match serde_json::to_value(settings) {
        Ok(Value::Object(values)) => values,
        // `AgentSettings` has only texts, numbers and lists of texts.
        _ => Map::new(),
    }
}

fn values_of(text: &str) -> Result<Map<String, Value>, String> {
    AgentSettings::from_text(text)
        .map(|settings| given_values(&settings))
        .map_err(|problem| format!("wrong{problem}"))
}

/// Replaces the line of the key. Without one, inserts below the comment that shows the key, or else at the end.
fn set_line(lines: &mut Vec<String>, key: &str, line: String) {
    let begins = |line: &str, prefix: &str| {
        line.strip_prefix(prefix)
            .and_then(|rest| rest.strip_prefix(key))
            .is_some_and(|rest| rest.starts_with(':'))
    };
    if let Some(at) = lines.iter().position(|line| begins(line, "")) {
        // Its value may continue in the lines below.
        let rest =
            lines[at + 1..].iter().take_while(|line| line.starts_with([' ', '\t']) || line.starts_with("- "));
        let end = at + 1 + rest.count();
        lines.splice(at..end, [line]);
    } else if let Some(at) = lines.iter().position(|line| begins(line, "# ")) {
        lines.insert(at + 1, line);
    } else {
        lines.push(line);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn map(json: &str) -> Map<String, Value> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_setting_replaces_only_its_line() {
        for (before, wanted, after) in [
            ("# one\nmaxTasks: 1\n", r#"{"maxTasks": 2}"#, "# one\nmaxTasks: 2\n"),
            (
                "# runtimeEndpoint: unix:///x\n# two\n",
                r#"{"runtimeEndpoint": "unix:///y"}"#,
                "# runtimeEndpoint: unix:///x\nruntimeEndpoint: \"unix:///y\"\n# two\n",
            ),
            (
                "maxTasks: 1 # mine\n",
                r#"{"maxTasks": 1, "diskMinFree": "5GiB"}"#,
                "maxTasks: 1 # mine\ndiskMinFree: \"5GiB\"\n",
            ),
            (
                "metricsListen: off\nmaxTasks: 1",
                r#"{"metricsListen": "off"}"#,
                "metricsListen: off\nmaxTasks: 1",
            ),
            (
                "tunnelUrl:\n  - wss://a\n  - wss://b\nmaxTasks: 1\n",
                r#"{"tunnelUrl": ["wss://c"]}"#,
                "tunnelUrl: [\"wss://c\"]\nmaxTasks: 1\n",
            ),
            (
                "tunnelUrl:\n- wss://a\nmaxTasks: 1\n",
                r#"{"tunnelUrl": ["wss://c"]}"#,
                "tunnelUrl: [\"wss://c\"]\nmaxTasks: 1\n",
            ),
            ("", "{}", ""),
        ] {
            assert_eq!(apply_settings(before, &map(wanted)).unwrap(), after, "{before:?} {wanted}");
        }
    }

    #[test]
    fn unknown_yaml_is_left_to_the_administrator() {
        let error = apply_settings("{maxTasks: 1}\n", &map(r#"{"maxTasks": 2}"#)).unwrap_err();
        assert!(error.contains("set maxTasks: 2 there by hand"), "{error}");
        let error = apply_settings("maxTask: 1\n", &map(r#"{"maxTasks": 2}"#)).unwrap_err();
        assert!(error.contains("line 1") && error.contains("unknown field"), "{error}");
    }

    #[test]
    fn flags_and_file_mean_the_same() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            settings: AgentSettings,
        }
        let line = "x --download-window 01:00+4h --download-window 05:00+90m --runtime-endpoint /run/a.sock --metrics-listen off --max-tasks 2 --parallel-pulls 5 --disk-min-free 1536MiB \
                    --mem-min-free 7B --cpu-max-load 150% --image-credential-provider-config /a \
                    --image-credential-provider-bin-dir /b";
        let given = Line::try_parse_from(line.split_whitespace()).unwrap().settings;
        let written = apply_settings("", &given_values(&given)).unwrap();
        let read = AgentSettings::from_text(&written).unwrap();
        assert_eq!(
            given.or_file(AgentSettings::default()),
            read.or_file(AgentSettings::default()),
            "{written}"
        );
        assert!(written.contains("diskMinFree: \"1536MiB\"\n"), "{written}");
    }
}
