//! Settings of another version of this program: as much of them as this one understands.

use std::io::Write as _;
use std::path::Path;

use serde_json::{Map, Value};

use super::{AgentSettings, Effective};

impl AgentSettings {
    /// Reads a file, without the keys and values that this version doesn't understand. A file that can't be read has none.
    pub(crate) fn from_file_leniently(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut known = Map::new();
        for (key, value) in serde_saphyr::from_str::<Map<String, Value>>(&text).unwrap_or_default() {
            let single = Map::from_iter([(key.clone(), value.clone())]);
            // JSON is YAML.
            if Self::from_text(&Value::from(single).to_string()).is_ok() {
                known.insert(key, value);
            }
        }
        Self::from_text(&Value::from(known).to_string()).unwrap_or_default()
    }

    /// Reads a file for a command by hand, and reports what this version doesn't understand: a newer one, which runs on this
    /// machine, may.
    ///
    /// # Errors
    /// The file can't be read.
    pub(crate) fn from_file_by_hand(path: &Path) -> anyhow::Result<Self> {
        Self::from_file(path).or_else(|problem| {
            if problem.is::<std::io::Error>() {
                return Err(problem);
            }
            writeln!(std::io::stderr(), "warning: {problem}; the other settings hold")?;
            Ok(Self::from_file_leniently(path))
        })
    }

    /// Finds what launching another version needs, the state directory and the address of the metrics, in the arguments of
    /// `run`, the environment and the file. All else has its default.
    pub(crate) fn find_for_launch(arguments: &[String], env: impl Fn(&str) -> Option<String>) -> Effective {
        let find = |name: &str| {
            let flag = format!("--{name}");
            let given = arguments.iter().enumerate().find_map(|(at, argument)| {
                match argument.strip_prefix(&flag)?.strip_prefix('=') {
                    None if *argument == flag => arguments.get(at + 1).cloned(),
                    value => value.map(str::to_owned),
                }
            });
            let variable = format!("PREPULL_{}", name.replace('-', "_").to_uppercase());
            given.or_else(|| env(&variable)).filter(|value| !value.is_empty())
        };
        let flags = Self {
            state_dir: find("state-dir").map(Into::into),
            metrics_listen: find("metrics-listen").and_then(|address| address.parse().ok()),
            ..Self::default()
        };
        let file = find("config").map(|file| Self::from_file_leniently(file.as_ref()));
        flags.or_file(file.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Listen, Percent};

    #[test]
    fn a_file_is_read_as_far_as_understood() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("config.yaml");
        let read = |text: &str| {
            std::fs::write(&file, text)?;
            anyhow::Ok(AgentSettings::from_file_leniently(&file).or_file(AgentSettings::default()))
        };
        let text =
            "newKey: {a: 1}\nmetricsListen: off\nmaxTasks: many\nimageGcHighThreshold: 80\nstateDir: /s\n";
        let settings = read(text)?;
        assert_eq!(settings.metrics_listen, Listen::Off);
        assert_eq!(settings.state_dir, Path::new("/s"));
        assert_eq!(settings.fetch.room.gc_high_threshold, Percent(80));
        let defaults = AgentSettings::default().or_file(AgentSettings::default());
        assert_eq!(settings.max_tasks, defaults.max_tasks);
        for text in ["", "hello", "a: [", "a: 1"] {
            assert_eq!(read(text)?, defaults, "{text}");
        }
        Ok(())
    }

    #[test]
    fn flags_win_over_variables_and_the_file() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("config.yaml").display().to_string();
        std::fs::write(&file, "stateDir: /of-file\nmetricsListen: off\n")?;
        let defaults = || AgentSettings::default().or_file(AgentSettings::default());
        let find = |line: &str, variable: Option<(&str, &str)>| {
            let arguments: Vec<_> = line.split(' ').map(str::to_owned).collect();
            let env = |name: &str| variable.filter(|known| known.0 == name).map(|known| known.1.to_owned());
            let found = AgentSettings::find_for_launch(&arguments, env);
            (found.state_dir.display().to_string(), found.metrics_listen)
        };
        let usual = (defaults().state_dir.display().to_string(), defaults().metrics_listen);
        for (line, variable, expected) in [
            ("run --state-dirs /x --state-dir", None, usual.clone()),
            ("run --new x --state-dir /s", None, ("/s".to_owned(), usual.1)),
            ("run --state-dir=/s", Some(("PREPULL_STATE_DIR", "/v")), ("/s".to_owned(), usual.1)),
            ("run", Some(("PREPULL_STATE_DIR", "/v")), ("/v".to_owned(), usual.1)),
            ("run", Some(("PREPULL_STATE_DIR", "")), usual.clone()),
            ("run --metrics-listen nowhere", None, usual.clone()),
            (&format!("run --config {file}"), None, ("/of-file".to_owned(), Listen::Off)),
            ("run", Some(("PREPULL_CONFIG", &file)), ("/of-file".to_owned(), Listen::Off)),
        ] {
            assert_eq!(find(line, variable), expected, "{line} {variable:?}");
        }
        Ok(())
    }
}
