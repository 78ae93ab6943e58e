//! containerd's configuration file, for settings that containerd 2 doesn't report over its API.

use std::collections::VecDeque;
use std::path::{Component, Path, PathBuf};

use super::Registries;
use super::view::{FilesystemView, Sight};

/// Largest file that we read.
const MAX_FILE: u64 = 1 << 20;
/// Most files that we read: the main one and its imports.
const MAX_FILES: usize = 64;
/// Remedy for a configuration that the agent can't read.
const REMEDY: &str = "mount it into the agent's container, or set --registry-config-path";

/// The main configuration file of containerd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MainFile {
    path: PathBuf,
    /// Whether the path is from the command line. Without that, containerd may use another file.
    is_certain: bool,
}

impl MainFile {
    /// Takes the path from the command line of containerd, if we can read that. Otherwise takes the usual path for a
    /// containerd with this directory.
    pub(super) fn find(peer: Option<u32>, root: &Path) -> Self {
        let line = peer
            .filter(|peer| *peer > 0)
            .and_then(|peer| std::fs::read(format!("/proc/{peer}/cmdline")).ok());
        let line = line.unwrap_or_default();
        let words: Vec<_> =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        // If systemd has opened the socket, its peer is systemd.
        let program = words.first().map(Path::new).and_then(Path::file_name);
        let is_certain = program.is_some_and(|program| program.to_string_lossy().starts_with("containerd"));
        let named = of_command_line(&words).filter(|_| is_certain);
        Self { path: named.unwrap_or_else(|| usual_file(root)), is_certain }
    }
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

/// The usual path, by containerd's directory: k3s, RKE2 and k0s have their own.
fn usual_file(root: &Path) -> PathBuf {
    if let Some(agent) =
        root.parent().filter(|agent| agent.ends_with("agent") && root.ends_with("containerd"))
    {
        return agent.join("etc/containerd/config.toml");
    }
    let of_k0s = root.ends_with("k0s/containerd");
    PathBuf::from(if of_k0s { "/etc/k0s/containerd.toml" } else { "/etc/containerd/config.toml" })
}

/// Reads the file and its imports. The error explains why that's impossible.
pub(super) async fn read_registries(file: MainFile, view: FilesystemView) -> Result<Registries, String> {
    // These are a few small files, but a disk may be slow.
    let read = tokio::task::spawn_blocking(move || read_all(&file, &view)).await;
    read.unwrap_or_else(|error| Err(format!("reading containerd's configuration: {error}")))
}

fn read_all(main: &MainFile, view: &FilesystemView) -> Result<Registries, String> {
    let MainFile { path, is_certain } = main;
    match view.look_at(path) {
        Sight::There => {}
        Sight::Absent if *is_certain => return Ok(Registries::default()),
        _ => {
            let path = path.display();
            return Err(format!("containerd's configuration isn't visible at {path}: {REMEDY}"));
        }
    }
    let mut registries = Registries::default();
    let mut read = Vec::new();
    let mut pending = VecDeque::from([path.clone()]);
    // A later import wins.
    while let Some(file) = pending.pop_front() {
        if read.contains(&file) {
            continue;
        }
        if read.len() == MAX_FILES {
            return Err(format!("{} imports more than {MAX_FILES} files", path.display()));
        }
        let table = read_table(&file)?;
        take_over(&mut registries, &table);
        let imports = table.get("imports").and_then(toml::Value::as_array);
        for pattern in imports.into_iter().flatten().filter_map(toml::Value::as_str) {
            pending.extend(imported_files(file.parent().unwrap_or(Path::new("/")), pattern, view)?);
        }
        read.push(file);
    }
    Ok(registries)
}

fn read_table(file: &Path) -> Result<toml::Table, String> {
    let bad = |why: String| format!("cannot read containerd's configuration {}: {why}", file.display());
    let size = std::fs::metadata(file).map_err(|error| bad(format!("{error} ({REMEDY})")))?.len();
    if size > MAX_FILE {
        return Err(bad(format!("it is larger than {MAX_FILE} bytes")));
    }
    let text = std::fs::read_to_string(file).map_err(|error| bad(error.to_string()))?;
    // The parser's own message would quote the line, which may have a password.
    text.parse().map_err(|error: toml::de::Error| bad(error.message().to_owned()))
}

/// The files of an import: a path relative to the importing file, with at most one asterisk, in its last part.
fn imported_files(base: &Path, pattern: &str, view: &FilesystemView) -> Result<Vec<PathBuf>, String> {
    let path = clean(&base.join(pattern));
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return Ok(Vec::new());
    };
    let Some((before, after)) = name.split_once('*') else { return Ok(vec![path]) };
    let is_special = |text: &str| text.contains(['*', '?', '[', '\\']);
    if is_special(&directory.to_string_lossy()) || is_special(before) || is_special(after) {
        return Err(format!(
            "the import {pattern:?} of containerd's configuration isn't understood by the agent"
        ));
    }
    match view.look_at(directory) {
        Sight::There => {}
        Sight::Absent => return Ok(Vec::new()),
        Sight::Hidden => {
            let directory = directory.display();
            return Err(format!(
                "containerd's configuration imports files of {directory}, which isn't visible: {REMEDY}"
            ));
        }
    }
    let entries = std::fs::read_dir(directory);
    let entries = entries.map_err(|error| format!("cannot read {}: {error}", directory.display()))?;
    let fits = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
    };
    let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(fits).collect();
    found.sort();
    Ok(found)
}

/// The path without `.` and `..`, as in containerd: files that import each other are read once.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(clean.pop()),
            part => clean.push(part),
        }
    }
    clean
}

/// Adds the settings of one file for the CRI's images, in the form of containerd 2 or of containerd 1.
fn take_over(registries: &mut Registries, table: &toml::Table) {
    let Some(plugins) = table.get("plugins").and_then(toml::Value::as_table) else { return };
    let names = ["cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images"];
    for images in names.into_iter().filter_map(|name| plugins.get(name)) {
        if let Some(registry) = images.get("registry") {
            if let Some(path) = registry.get("config_path").and_then(toml::Value::as_str) {
                registries.config_path = Some(path.to_owned());
            }
            let is_set = |name| {
                let map = registry.get(name).and_then(toml::Value::as_table);
                map.is_some_and(|map| !map.is_empty())
            };
            registries.has_old_settings |= ["mirrors", "configs", "auths"].into_iter().any(is_set);
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
        // This process isn't containerd.
        let own = MainFile::find(Some(std::process::id()), Path::new("/r"));
        assert_eq!(own, MainFile { path: "/etc/containerd/config.toml".into(), is_certain: false });
    }

    #[test]
    fn distributions_have_files_of_their_own() {
        for (root, file) in [
            ("/var/lib/containerd", "/etc/containerd/config.toml"),
            (
                "/var/lib/rancher/k3s/agent/containerd",
                "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
            ),
            ("/data/rke2/agent/containerd", "/data/rke2/agent/etc/containerd/config.toml"),
            ("/var/lib/k0s/containerd", "/etc/k0s/containerd.toml"),
        ] {
            assert_eq!(usual_file(Path::new(root)), Path::new(file), "{root}");
        }
    }

    const IMAGES: &str = "[plugins.\"io.containerd.cri.v1.images\"";

    fn registries(path: &str, discards_layers: bool) -> Registries {
        Registries { config_path: Some(path.to_owned()), has_old_settings: false, discards_layers }
    }

    #[test]
    fn imports_win_over_their_importer() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("config.toml");
        let add = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let of_path = |path: &str| format!("{IMAGES}.registry]\nconfig_path = \"{path}\"\n");
        add("config.toml", &format!("version = 3\nimports = [\"conf.d/*.toml\"]\n{}", of_path("/a")));
        let main = MainFile { path: path.clone(), is_certain: false };
        let read = || read_all(&main, &FilesystemView::Whole).unwrap();
        assert_eq!(read(), registries("/a", false));
        std::fs::create_dir(dir.path().join("conf.d")).unwrap();
        add("conf.d/2.toml", &of_path("/c"));
        let first = format!("imports = [\"../more.toml\"]\n{IMAGES}]\ndiscard_unpacked_layers = true\n");
        add("conf.d/1.toml", &format!("{first}{}", of_path("/b")));
        add("conf.d/3.txt", "nonsense");
        add("more.toml", "imports = [\"config.toml\"]\n");
        assert_eq!(read(), registries("/c", true));
        add("more.toml", &of_path("/d"));
        assert_eq!(read(), registries("/d", true));
    }

    #[test]
    fn unreadable_files_are_named() {
        let dir = tempfile::TempDir::new().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let path = dir.join("config.toml");
        let read =
            |is_certain, view: &FilesystemView| read_all(&MainFile { path: path.clone(), is_certain }, view);
        let mounted = FilesystemView::Mounts(vec![dir.clone()]);
        // containerd runs without a file, or with another one.
        assert_eq!(read(true, &FilesystemView::Whole), Ok(Registries::default()));
        assert!(read(false, &FilesystemView::Whole).unwrap_err().contains("config.toml"));
        assert!(read(false, &mounted).unwrap_err().contains(REMEDY));
        for (text, named) in [
            ("imports = [\"/nowhere/*.toml\"]", "/nowhere"),
            ("imports = [\"/nowhere/x.toml\"]", "/nowhere/x.toml"),
            ("imports = [\"*/x*.toml\"]", "*/x*.toml"),
            ("imports = [\"conf.d/[ab]*.toml\"]", "[ab]*.toml"),
            ("version = ", "config.toml"),
        ] {
            std::fs::write(&path, text).unwrap();
            let why = read(false, &mounted).unwrap_err();
            assert!(why.contains(named), "{text}: {why}");
        }
        std::fs::write(&path, "imports = [\"conf.d/*.toml\"]").unwrap();
        assert_eq!(read(false, &mounted), Ok(Registries::default()));
        assert!(
            read(false, &FilesystemView::Mounts(vec!["/nowhere".into()])).is_err(),
            "the container's own"
        );
    }

    #[test]
    fn old_forms_of_mirrors_are_noticed() {
        for plugin in ["cri", "\"io.containerd.grpc.v1.cri\""] {
            let mut registries = Registries::default();
            let text = format!("[plugins.{plugin}.registry.mirrors.\"r.io\"]\nendpoint = [\"http://m\"]\n");
            take_over(&mut registries, &text.parse().unwrap());
            assert_eq!(registries, Registries { has_old_settings: true, ..Registries::default() });
        }
    }
}
