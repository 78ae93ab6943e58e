//! containerd's configuration file, for what containerd 2 does not tell over its API.

use std::path::{Path, PathBuf};

use super::Registries;

/// The file that is read where nobody says another one.
const DEFAULT: &str = "/etc/containerd/config.toml";
/// Largest file that is read.
const MAX_FILE: u64 = 1 << 20;
/// Most files that are read: the main one and what it imports.
const MAX_FILES: usize = 64;

/// Finds the configuration file in the command line of containerd. Its process is looked up only if both of us count
/// processes alike.
pub(super) fn of_process(pid: u64, namespace: u64) -> Option<PathBuf> {
    let own = std::fs::read_link("/proc/self/ns/pid").ok()?;
    if own.to_str()? != format!("pid:[{namespace}]") {
        return None;
    }
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    of_command_line(&words)
}

fn of_command_line(words: &[String]) -> Option<PathBuf> {
    words.iter().enumerate().find_map(|(index, word)| match word.as_str() {
        "--config" | "-config" | "-c" => words.get(index + 1).map(PathBuf::from),
        word => ["--config=", "-config=", "-c="]
            .iter()
            .find_map(|flag| word.strip_prefix(flag))
            .map(PathBuf::from),
    })
}

/// Reads the file, and those that it imports. `None` if it cannot be read.
pub(super) async fn read(file: Option<PathBuf>) -> Option<Registries> {
    let file = file.unwrap_or_else(|| DEFAULT.into());
    // A few small files; but a disk may be slow.
    tokio::task::spawn_blocking(move || read_all(&file)).await.ok().flatten()
}

fn read_all(main: &Path) -> Option<Registries> {
    let first = parse(main)?;
    let imports = first.get("imports").and_then(toml::Value::as_array).cloned().unwrap_or_default();
    let imported = imports
        .iter()
        .filter_map(toml::Value::as_str)
        .flat_map(|pattern| matching(main.parent().unwrap_or(Path::new("/")), pattern))
        .take(MAX_FILES)
        .filter_map(|file| parse(&file));
    let mut registries = Registries::default();
    // What is imported later wins.
    for table in std::iter::once(first.clone()).chain(imported) {
        take_over(&mut registries, &table);
    }
    Some(registries)
}

fn parse(file: &Path) -> Option<toml::Table> {
    if std::fs::metadata(file).ok()?.len() > MAX_FILE {
        return None;
    }
    std::fs::read_to_string(file).ok()?.parse().ok()
}

/// The files of an import: a path, relative to the file that imports it, whose last part may have one asterisk.
fn matching(base: &Path, pattern: &str) -> Vec<PathBuf> {
    let path = base.join(pattern);
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return Vec::new();
    };
    let Some((before, after)) = name.split_once('*') else { return vec![path] };
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let fits = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
    };
    let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(fits).collect();
    found.sort();
    found
}

/// Takes over what one file says of the CRI's images, in the form of containerd 2 or of containerd 1.
fn take_over(registries: &mut Registries, table: &toml::Table) {
    let Some(plugins) = table.get("plugins").and_then(toml::Value::as_table) else { return };
    let old = plugins.get("io.containerd.grpc.v1.cri");
    for images in [old, plugins.get("io.containerd.cri.v1.images")].into_iter().flatten() {
        if let Some(registry) = images.get("registry") {
            if let Some(path) = registry.get("config_path").and_then(toml::Value::as_str) {
                registries.config_path = Some(path.to_owned());
            }
            let is_set = |name| {
                let map = registry.get(name).and_then(toml::Value::as_table);
                map.is_some_and(|map| !map.is_empty())
            };
            registries.has_old_settings |= is_set("mirrors") || is_set("configs");
        }
        let discards = images
            .get("discard_unpacked_layers")
            .or_else(|| images.get("containerd")?.get("discard_unpacked_layers"));
        if let Some(discards) = discards.and_then(toml::Value::as_bool) {
            registries.discards_layers = discards;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_file_is_taken_from_the_command_line() {
        let of = |line: &str| of_command_line(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(of("containerd --log-level info --config /a.toml"), Some("/a.toml".into()));
        assert_eq!(of("containerd -c /b.toml"), Some("/b.toml".into()));
        assert_eq!(of("containerd --config=/c.toml"), Some("/c.toml".into()));
        assert_eq!(of("containerd"), None);
    }

    #[test]
    fn imports_win_over_the_file_that_imports_them() {
        let dir = tempfile::TempDir::new().unwrap();
        let main = dir.path().join("config.toml");
        let images = "[plugins.\"io.containerd.cri.v1.images\"";
        std::fs::write(
            &main,
            format!("version = 3\nimports = [\"conf.d/*.toml\"]\n{images}.registry]\nconfig_path = \"/a\"\n"),
        )
        .unwrap();
        let read = || read_all(&main).unwrap();
        let registries = |path: &str, discards| Registries {
            config_path: Some(path.to_owned()),
            has_old_settings: false,
            discards_layers: discards,
        };
        assert_eq!(read(), registries("/a", false));
        std::fs::create_dir(dir.path().join("conf.d")).unwrap();
        let add =
            |name: &str, text: String| std::fs::write(dir.path().join("conf.d").join(name), text).unwrap();
        add("2.toml", format!("{images}.registry]\nconfig_path = \"/c\"\n"));
        add(
            "1.toml",
            format!("{images}]\ndiscard_unpacked_layers = true\n{images}.registry]\nconfig_path = \"/b\"\n"),
        );
        add("3.txt", "nonsense".to_owned());
        assert_eq!(read(), registries("/c", true));
        assert_eq!(read_all(&dir.path().join("absent")), None);
    }

    #[test]
    fn mirrors_in_the_form_of_containerd_1_are_noticed() {
        let mut registries = Registries::default();
        let text =
            "[plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.\"r.io\"]\nendpoint = [\"http://m\"]\n";
        take_over(&mut registries, &text.parse().unwrap());
        assert_eq!(registries, Registries { has_old_settings: true, ..Registries::default() });
    }
}
