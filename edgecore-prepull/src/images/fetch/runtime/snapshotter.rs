//! Which snapshotter unpacks images, and where.

use std::path::{Path, PathBuf};

use containerd_client::services::v1::Plugin;

/// The type of the plugins that are snapshotters, which stands before their names in those of their directories.
pub(super) const PLUGIN_TYPE: &str = "io.containerd.snapshotter.v1";
/// Snapshotters that unpack what is in the content store. Others may fetch by themselves, such as stargz, nydus and soci.
const UNPACKING: [&str; 7] =
    ["overlayfs", "fuse-overlayfs", "native", "btrfs", "zfs", "devmapper", "blockfile"];

/// A snapshotter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Snapshotter {
    pub(super) name: String,
    /// Where it unpacks.
    pub(super) root: PathBuf,
}

/// Finds the snapshotter by where CRI says that images are, and by its name where CRI tells that. `plugins` are those of
/// containerd that are snapshotters: one with a `root_path` of its own exports that.
pub(super) fn find(images: &Path, named: Option<&str>, plugins: &[Plugin]) -> Result<Snapshotter, String> {
    let exported = |plugin: &Plugin| plugin.exports.get("root").map(PathBuf::from);
    let of_directory = || {
        let name = images.file_name()?.to_str()?;
        Some(name.strip_prefix(PLUGIN_TYPE)?.strip_prefix('.')?.to_owned())
    };
    let by_root = || {
        let mut here = plugins.iter().filter(|plugin| exported(plugin).as_deref() == Some(images));
        // Two in one directory cannot be told apart.
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
    // Before 1.7, CRI says where it would be without a root_path.
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
    fn a_snapshotter_is_known_by_name_or_root() {
        let usual = "/c/io.containerd.snapshotter.v1.overlayfs";
        let here = |id| plugin(id, Some("/ssd"));
        for (images, named, plugins, expected) in [
            (usual, None, vec![], Ok(("overlayfs", usual))),
            (usual, None, vec![plugin("overlayfs", Some(usual))], Ok(("overlayfs", usual))),
            // 1.6: CRI tells the name, and the wrong directory.
            (usual, Some("overlayfs"), vec![here("overlayfs")], Ok(("overlayfs", "/ssd"))),
            (usual, Some("overlayfs"), vec![plugin("overlayfs", None)], Ok(("overlayfs", usual))),
            // 1.7: both. From 2.0 on: the directory alone.
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
