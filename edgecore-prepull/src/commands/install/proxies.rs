//! The proxies of the container runtime. The agent's unit reads them from a file of their own.

use std::fmt::Write as _;
use std::path::Path;

use prepull_registry::Proxies;

use crate::images::runtime::RuntimeEndpoint;

/// First line of a file that we wrote. A file without it is an administrator's.
const HEADER: &str = "# The proxies of the container runtime, written by `edgecore-prepull install`. Without this line it's left alone.\n";
/// The variables that Go programs read, and so containerd.
const NAMES: [&str; 6] = ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"];

/// What systemd and shells take as it is behind a backslash, within double quotes. The backslash comes first.
const ESCAPED: [char; 4] = ['\\', '"', '$', '`'];

/// Reads the proxies from the runtime's process. `None` if it doesn't run, or listens behind a socket of systemd.
pub(super) async fn of_runtime(runtime: &RuntimeEndpoint) -> Option<Vec<(String, String)>> {
    let peer = runtime.peer_pid().await.filter(|peer| *peer > 1)?;
    let environment = std::fs::read(Path::new("/proc").join(peer.to_string()).join("environ")).ok()?;
    Some(parse_proxies(&environment))
}

fn parse_proxies(environment: &[u8]) -> Vec<(String, String)> {
    let variables =
        environment.split(|byte| *byte == 0).filter_map(|variable| std::str::from_utf8(variable).ok());
    let variables = variables.filter_map(|variable| variable.split_once('='));
    let set = variables.filter(|(name, value)| {
        NAMES.contains(name) && !value.is_empty() && !value.contains(char::is_control)
    });
    set.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Whether `install` has written the file.
pub(crate) fn is_ours(text: &str) -> bool {
    text.starts_with(HEADER)
}

/// The new text of the file, if it changes.
pub(super) fn plan_file(before: Option<&str>, proxies: Option<&[(String, String)]>) -> Option<String> {
    let proxies = proxies?;
    match before {
        None if proxies.is_empty() => return None,
        Some(before) if !is_ours(before) => return None,
        _ => {}
    }
    let mut text = HEADER.to_owned();
    for (name, value) in proxies {
        // A person may have a shell read the file.
        let value = ESCAPED
            .iter()
            .fold(value.clone(), |value, special| value.replace(*special, &format!("\\{special}")));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}=\"{value}\"");
    }
    (before != Some(text.as_str())).then_some(text)
}

/// The proxies of the agent that reads this file, or else of our own environment.
pub(crate) fn of_agent(text: &str) -> Proxies {
    let value = |name: &str| {
        let lines = text.lines().filter_map(|line| line.trim().split_once('='));
        let found = lines.rev().find(|(key, _)| *key == name)?.1.trim();
        let quoted = found.strip_prefix('"').and_then(|found| found.strip_suffix('"'));
        // As systemd reads it.
        Some(quoted.map_or_else(|| found.to_owned(), unescape))
    };
    Proxies::from_variables(|name| value(name).or_else(|| std::env::var(name).ok()))
}

fn unescape(text: &str) -> String {
    let mut characters = text.chars().peekable();
    let next = || {
        let first = characters.next()?;
        Some(if first == '\\' {
            characters.next_if(|next| ESCAPED.contains(next)).unwrap_or(first)
        } else {
            first
        })
    };
    std::iter::from_fn(next).collect()
}

/// The names of the variables in the text: a proxy may have a password.
pub(super) fn names(text: &str) -> String {
    let names = text.lines().filter_map(|line| Some(line.split_once('=')?.0));
    let names: Vec<_> = names.filter(|name| NAMES.contains(name)).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn proxies_are_taken_from_the_environment() {
        let environment =
            b"PATH=/bin\0HTTPS_PROXY=http://u:p@proxy:3128\0no_proxy=a,b=c\0HTTP_PROXY=\0https_proxy=a\nb\0";
        let expected = [("HTTPS_PROXY", "http://u:p@proxy:3128"), ("no_proxy", "a,b=c")];
        assert_eq!(
            parse_proxies(environment),
            expected.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
    }

    #[test]
    fn the_agents_file_is_read_as_systemd_reads_it() {
        let secret = [("HTTPS_PROXY".to_owned(), "http://u:p%40@proxy:3128".to_owned())];
        let text = plan_file(None, Some(&secret)).unwrap();
        for (text, expected) in [
            (text.as_str(), Some("http://proxy:3128")),
            ("https_proxy=http://plain:1\n", Some("http://plain:1")),
            ("HTTPS_PROXY=http://a:1\nNO_PROXY=cloud\n", None),
        ] {
            let found = of_agent(text).of_host("cloud", 10_000).map(|proxy| proxy.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_shell_reads_our_file_alike() {
        let url = r#"http://u:a\b"c$HOME`id`'d@proxy:3128"#;
        let text = plan_file(None, Some(&[("HTTPS_PROXY".to_owned(), url.to_owned())])).unwrap();
        let script = format!("{text}printf %s \"$HTTPS_PROXY\"");
        let read = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(read.stdout).unwrap(), url);
        let value = text.lines().last().unwrap().strip_prefix("HTTPS_PROXY=\"").unwrap();
        assert_eq!(unescape(value.strip_suffix('"').unwrap()), url);
    }

    #[test]
    fn only_our_own_file_is_replaced() {
        let proxies = [("HTTPS_PROXY".to_owned(), "http://a\\b\"c".to_owned())];
        let ours = format!("{HEADER}HTTPS_PROXY=\"http://a\\\\b\\\"c\"\n");
        for (before, proxies, expected) in [
            (None, Some(&proxies[..]), Some(&*ours)),
            (Some(&*ours), Some(&proxies), None),
            (Some(HEADER), Some(&proxies), Some(&ours)),
            (Some(&ours), Some(&[]), Some(HEADER)),
            (Some(HEADER), Some(&[]), None),
            (None, Some(&[]), None),
            (Some("HTTPS_PROXY=mine\n"), Some(&proxies), None),
            // The runtime doesn't run.
            (Some(&ours), None, None),
        ] {
            assert_eq!(plan_file(before, proxies).as_deref(), expected, "{before:?} {proxies:?}");
        }
        assert_eq!((names(&ours), names(HEADER)), ("HTTPS_PROXY".to_owned(), "none".to_owned()));
    }
}
