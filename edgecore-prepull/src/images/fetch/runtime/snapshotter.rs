//! Finds the snapshotter that unpacks images, and its directory.

use std::path::{Path, PathBuf};

use containerd_client::services::v1::Plugin;

/// The type of snapshotter plugins, which precedes their names in the names of their directories.
pub(super) const PLUGIN_TYPE: &str = "io.containerd.snapshotter.v1";
/// Snapshotters that unpack the content store. Others, such as stargz, nydus and soci, may fetch by themselves.
const UNPACKING: [&str; 7] =
    ["overlayfs", "fuse-overlayfs", "native", "btrfs", "zfs", "devmapper", "blockfile"];

/// A snapshotter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Snapshotter {
    pub(super) name: String,
    /// Directory of unpacked images.
    pub(super) root: PathBuf,
}

/// Finds the snapshotter by the image directory that CRI reports, and by its name if CRI reports that. `plugins` are
/// containerd's snapshotters: one with its own `root_path` exports that.
pub(super) fn find(images: &Path, named: Option<&str>, plugins: &[Plugin]) -> Result<Snapshotter, String> {
    let exported = |plugin: &Plugin| plugin.exports.get("root").map(PathBuf::from);
    let of_directory = || {
        let name = images.file_name()?.to_str()?;
        Some(name.strip_prefix(PLUGIN_TYPE)?.strip_prefix('.')?.to_owned())
    };
    let by_root = || {
        let mut here = plugins.iter().filter(|plugin| exported(plugin).as_deref() == Some(images));
        // We can't distinguish two in one directory.
        here.next().filter(|_| here.next().is_none()).map(|plugin| plugin.id.clone())
    };
    let name =
        named.filter(|name| !name.is_empty()).map(str::to_owned).or_else(by_root).or_else(of_directory);
    let Some(name) = name else {
        return Err(format!("no snapshotter of containerd says that it unpacks to {}", images.display()));
    };
    if !UNPACKING.contains(&name.as_str()) {
        return Err(format!("the snapshotter {name} may fetch by itself"));
    }
    // Before 1.7, CRI reports the path that it would have without a root_path.
    let root = plugins.iter().find(|plugin| plugin.id == name).and_then(exported);
    Ok(Snapshotter { name, root: root.unwrap_or_else(|| images.to_owned()) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn plugin(id: &str, root: Option<&str>) -> Plugin {
        let exports = root.map(|root| ("root".to_owned(), root.to_owned())).into_iter().collect();
        Plugin { id: id.to_owned(), exports, ..Plugin::default() }
    }

    #[test]
    fn a_snapshotter_has_a_name_or_root() {
        let usual = "/c/io.containerd.snapshotter.v1.overlayfs";
        let here = |id| plugin(id, Some("/ssd"));
        for (images, named, plugins, expected) in [
            (usual, None, vec![], Ok(("overlayfs", usual))),
            (usual, None, vec![plugin("overlayfs", Some(usual))], Ok(("overlayfs", usual))),
            // 1.6: CRI reports the name, and the wrong directory.
            (usual, Some("overlayfs"), vec![here("overlayfs")], Ok(("overlayfs", "/ssd"))),
            (usual, Some("overlayfs"), vec![plugin("overlayfs", None)], Ok(("overlayfs", usual))),
            // 1.7: both. Since 2.0: only the directory.
            ("/ssd", Some("native"), vec![here("native")], Ok(("native", "/ssd"))),
            ("/ssd", None, vec![plugin("native", Some("/n")), here("overlayfs")], Ok(("overlayfs", "/ssd"))),
            ("/ssd", None, vec![here("native"), here("overlayfs")], Err("/ssd")),
            ("/ssd", None, vec![plugin("overlayfs", None)], Err("/ssd")),
            ("/ssd", None, vec![here("stargz")], Err("stargz")),
            (usual, Some("nydus"), vec![], Err("nydus")),
            ("/c/io.containerd.snapshotter.v1.soci", None, vec![], Err("soci")),
        ] {
            let found = find(Path::new(images), named, &plugins);
            match expected {
                Ok((name, root)) => {
                    let expected = Snapshotter { name: name.to_owned(), root: root.into() };
                    assert_eq!(found, Ok(expected), "{images} {named:?}");
                }
                Err(names) => assert!(found.unwrap_err().contains(names), "{images} {named:?}"),
            }
        }
    }
}
